"""The gate at the client: its own model, the shared one, or a mixture, by the rule of `steps.gate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fedbicross.bundle import validate
from fedbicross.engine.combine import NEVER, log_prior
from fedbicross.engine.device import to_device
from fedbicross.engine.predict import load_model, member_logits
from fedbicross.errors import MethodError
from fedbicross.exchange import Predictor
from fedbicross.steps.gate import Choice, choose, make_folds

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fedbicross.context import Context
    from fedbicross.exchange import Client


def gated(client: Client, own: Predictor, shared: Predictor, ctx: Context) -> Predictor:
    """The model that the client should use for its own patients.

    ``ctx`` is the one that the own model was trained in: its validation images decide.
    """
    validate.check_predictor(shared)  # it came from elsewhere, and is asked here before anybody else looks at it
    rows = ctx.validation_rows(client)
    counts = torch.tensor(client.class_counts(len(ctx.task.classes)))
    labels = torch.from_numpy(client.labels[rows])
    has_prior = not ctx.training.balanced
    mine = _log_scores(own, client.images[rows], ctx)[0]
    tables, b = log_linear(shared)
    theirs = torch.einsum("nc,nbc->bc", tables.double(), _log_scores(shared, client.images[rows], ctx)) + b.double()
    patients = None if client.patients is None else client.patients[rows]
    folds = make_folds(len(rows), patients, ctx.rng("gate", client.name))
    choice = choose(mine, theirs.log_softmax(1), labels, counts, folds, has_prior)
    _describe(ctx, client, choice)
    if not choice.accepted:
        return own
    mixture = choice.mixture
    w, t = mixture.share, mixture.temperature
    weights = torch.cat([torch.full((1, len(counts)), w / t), (1 - w) / t * tables])
    prior = (1 - w) / t * b.double() + (1 - w if has_prior else 1.0) * log_prior(counts, mixture.flatness)
    keep = [i for i in range(len(weights)) if bool((weights[i] > 0).any())]
    architectures, states = (*own.architectures, *shared.architectures), (*own.states, *shared.states)
    return Predictor(
        ctx.task,
        tuple(architectures[i] for i in keep),
        tuple(states[i] for i in keep),
        "consensus",
        weights[keep].float(),
        log_prior=prior.float(),
    )


def log_linear(predictor: Predictor) -> tuple[Tensor, Tensor]:
    """A [N,C] and b [C] with which log p(c) = Σ_i A(i,c) log p_i(c) + b(c), up to a number for each image."""
    count, classes = len(predictor.states), len(predictor.task.classes)
    if predictor.combine == "consensus":
        assert predictor.class_weights is not None
        weights, prior = predictor.class_weights, predictor.log_prior
        b = torch.zeros(classes) if prior is None else prior
        return weights, torch.where((weights > 0).any(0), b, NEVER)
    if count == 1 or predictor.combine == "mean_logits":
        return torch.full((count, classes), 1 / count), torch.zeros(classes)
    raise MethodError(
        "no_gate", f"a model that combines its networks by {predictor.combine} cannot be mixed with another"
    )


def _describe(ctx: Context, client: Client, choice: Choice) -> None:
    """What was decided and by what, for the report."""
    if not choice.images:
        ctx.record.warn(f"{client.label}: no validation images to try the shared model on; its own model stays")
        return
    columns = ["own model right", "mixture right", "images", "gain of log-loss", "± standard error", "taken"]
    columns += ["own model's share", "temperature", "flatness of the class mix"]
    right = [choice.right_own, choice.right_mixed, choice.images]
    by = [round(choice.gain, 4), round(choice.error, 4), "mixture" if choice.accepted else "own model"]
    mixture = choice.mixture
    row = [*right, *by, mixture.share, mixture.temperature, mixture.flatness]
    ctx.record.add(
        "tables", f"{client.label}: own or shared, on validation images", {"columns": columns, "rows": [row]}
    )


@torch.no_grad()
def _log_scores(predictor: Predictor, images: np.ndarray, ctx: Context) -> Tensor:
    """log p_i(c|x) [N,B,C] of a predictor's networks, in float64 on the CPU."""
    task = predictor.task
    networks = [
        load_model(architecture, state, task.channels, len(task.classes), task.image_size).to(ctx.device)
        for architecture, state in zip(predictor.architectures, predictor.states, strict=True)
    ]
    parts = torch.split(to_device(images, ctx.device), 500)
    logits = torch.cat([member_logits(networks, part, "fp32") for part in parts], dim=1)
    return logits.double().log_softmax(-1).cpu()
