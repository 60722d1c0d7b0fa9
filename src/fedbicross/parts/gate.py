"""The gate at the client: its own model, mixed with the shared one or not, and referral of classes it seldom sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fedbicross.bundle import validate
from fedbicross.engine.combine import NEVER, NOT_REFERRED, log_prior
from fedbicross.engine.predict import batch_logits
from fedbicross.errors import MethodError
from fedbicross.messages import Predictor
from fedbicross.steps.gate import Choice, choose, referral

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fedbicross.context import Context
    from fedbicross.messages import Client


def gated(
    client: Client, own: Predictor, shared: Predictor, ctx: Context, held_back: np.ndarray | None = None
) -> Predictor:
    """The model that the client should use, by the two rules of `steps.gate`; ``own`` is what it would use alone.

    ``held_back`` are the rows of images that ``own`` was not trained on; none: those of the client's own network.
    """
    validate.check_predictor(shared)  # it came from elsewhere, and is asked here before anybody else looks at it
    if own.encoder != shared.encoder:
        raise MethodError("no_gate", "heads on the features of different encoders cannot be mixed")
    rows = ctx.validation_rows(client) if held_back is None else held_back
    counts = torch.tensor(client.class_counts(len(ctx.task.classes)))
    labels = torch.from_numpy(client.labels)
    on_own_images = log_probabilities(shared, client.images, ctx)
    choice = choose(log_probabilities(own, client.images[rows], ctx), on_own_images[rows], labels[rows], counts)
    # A referral is answered by one network as it is: no weights or class mix beside it.
    single = len(shared.states) == 1 and shared.combine != "consensus"
    referred = referral(on_own_images, labels, counts) if single else None
    _describe(ctx, client, choice, referred)
    if choice.share == 1 and referred is None:
        return own
    w = choice.share
    (mine, b_mine), (theirs, b_theirs) = log_linear(own), log_linear(shared)
    weights = torch.cat([w * mine, (1 - w) * theirs])
    prior = w * b_mine.double() + (1 - w) * (b_theirs.double() + log_prior(counts, choice.flatness))
    used = (weights > 0).any(1)
    used[-1] |= referred is not None
    keep = [i for i in range(len(used)) if used[i]]
    architectures, states = (*own.architectures, *shared.architectures), (*own.states, *shared.states)
    return Predictor(
        ctx.task,
        tuple(architectures[i] for i in keep),
        tuple(states[i] for i in keep),
        "consensus",
        weights[keep].float(),
        encoder=own.encoder,
        log_prior=prior.float(),
        referral=None if referred is None else referred.float(),
    )


def log_linear(predictor: Predictor) -> tuple[Tensor, Tensor]:
    """A [N,C] and b [C] with which log p(c) = Σ_i A(i,c) log p_i(c) + b(c), up to a number for each image."""
    count, classes = len(predictor.states), len(predictor.task.classes)
    if predictor.referral is not None or not count:
        kind = "with a referral" if count else "without a network"
        raise MethodError("no_gate", f"a model {kind} cannot be mixed with another one")
    if predictor.combine == "consensus":
        assert predictor.class_weights is not None
        weights, prior = predictor.class_weights, predictor.log_prior
        b = torch.zeros(classes) if prior is None else prior
        return weights, torch.where((weights > 0).any(0), b, NEVER)
    if count == 1 or predictor.combine == "mean_logits":
        return torch.full((count, classes), 1 / count), torch.zeros(classes)
    raise MethodError("no_gate", f"networks combined by {predictor.combine} cannot be mixed with another model")


def _describe(ctx: Context, client: Client, choice: Choice, referred: Tensor | None) -> None:
    """What was decided and by what, for the report."""
    if not choice.images:
        ctx.record.warn(f"{client.label}: no validation images to try the shared model on; its own model stays")
    columns = [
        "validation images",
        "log-loss gained by mixing",
        "p",
        "answers won",
        "lost",
        "own model's share",
        "classes referred, from odds",
    ]
    odds = [] if referred is None else referred.tolist()
    classes = [f"{ctx.task.classes[c]} {value:.1f}" for c, value in enumerate(odds) if value < NOT_REFERRED]
    tried = [round(choice.gain, 4), round(choice.chance, 4), choice.won, choice.lost, choice.share]
    row = [choice.images, *tried, ", ".join(classes) or "none"]
    ctx.record.add("tables", f"{client.label}: own model and shared model", {"columns": columns, "rows": [row]})


def log_probabilities(predictor: Predictor, images: np.ndarray, ctx: Context) -> Tensor:
    """log p(c|x) [n,C] of a whole predictor but for its referral, in float64 on the CPU."""
    weights, b = log_linear(predictor)
    found = [logits.cpu() for logits in batch_logits(predictor, images, ctx.device, store=ctx.store)]
    logits = torch.cat([torch.zeros(len(weights), 0, len(b)), *found], dim=1).double()
    return (torch.einsum("nc,nbc->bc", weights.double(), logits.log_softmax(-1)) + b.double()).log_softmax(-1)
