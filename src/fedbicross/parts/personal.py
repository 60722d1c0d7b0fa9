"""Distillation on the client's own images: FedBiCross Eq. 9, and several networks into one.

Teachers are frozen, so that their answers are made once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedbicross import models
from fedbicross.engine.device import normalise, to_device
from fedbicross.engine.fast import recorded, scalar
from fedbicross.engine.predict import load_model, member_logits
from fedbicross.engine.recipe import lr_multiplier
from fedbicross.engine.student import Student
from fedbicross.engine.train import epoch_batches, split_validation, turn_and_mirror
from fedbicross.errors import MethodError
from fedbicross.messages import Predictor
from fedbicross.seeds import numpy_rng
from fedbicross.steps.distill import personal_loss, soft_kd_loss
from fedbicross.steps.gate import better_beyond_chance

if TYPE_CHECKING:
    from fedbicross.context import Context
    from fedbicross.messages import Client

EPOCHS_INTO_ONE = 20  # from a network that is nearly there, at the rate of the local training


def distil_personal(
    client: Client,
    ctx: Context,
    *,
    cluster_state: dict[str, Tensor],
    own_state: dict[str, Tensor],
    gamma: float,
    delta: float,
    temperature: float,
    epochs: int,
    lr: float,
    schedule: str,
    batch: int,
    momentum: float,
    weight_decay: float,
    start: Literal["cluster", "own"],
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The personal model f_pers and, on held-out local images, the accuracies of all three models.

    It has the architecture, and at first the weights, of the model that it starts from.

    Training uses the same local split as the client's own training did, so that none of the three models was trained
    on the validation images; a client too small to have any gets no comparison.
    """
    name, *shape = ctx.architecture
    own = ctx.model_of(client)  # only its answers are used, so that it may be of any architecture
    both = ((name, cluster_state), (own, own_state))
    first = both[start == "own"]
    networks = [load_model(which, state, *shape).to(ctx.device) for which, state in both]
    rng = numpy_rng(ctx.training_seed, "training", client.name, "validation-split")
    rows, held = split_validation(client.labels, client.patients, ctx.training.validation, rng)
    images = to_device(client.images, ctx.device)
    labels = torch.from_numpy(client.labels).to(ctx.device)
    cached = torch.cat([member_logits(networks, part, ctx.precision) for part in torch.split(images, 500)], dim=1)
    student = Student(load_model(*first, *shape), ctx.device, ctx.precision, ctx.fast, passes=0)

    def step(index: Tensor, kinds: Tensor, rate: float | Tensor) -> list[Tensor]:
        del kinds  # images as they are

        def loss_of(logits: Tensor) -> Tensor:
            given = {"temperature": temperature, "gamma": gamma, "delta": delta}
            return personal_loss(logits, labels[index], cached[0, index], cached[1, index], **given).total

        loss, gradients = student.gradient(normalise(images[index]), loss_of)
        student.update(gradients, rate, momentum, weight_decay)
        return [loss]

    rates = [lr * lr_multiplier(schedule, epoch / epochs) for epoch in range(epochs)]
    _epochs(student, step, rows, client, ctx, batch=batch, rates=rates, hint="lower lr_personal")
    per_image = [models.forward_flops(which, *shape) for which, _ in (*both, first)]
    ctx.record.flops += sum(per_image[:2]) * len(labels) + 3 * per_image[2] * epochs * len(rows)
    return student.state(), _compare(student, images, labels, cached, held)


def _compare(student: Student, images: Tensor, labels: Tensor, cached: Tensor, held: Any) -> dict[str, float]:
    if not len(held):
        return {}
    index = torch.from_numpy(held).to(images.device)
    answers = {
        "cluster model": cached[0, index],
        "own model": cached[1, index],
        "personal": torch.cat([student.eval_logits(normalise(part)) for part in torch.split(images[index], 500)]),
    }
    return {name: float((z.argmax(1) == labels[index]).float().mean()) for name, z in answers.items()}


def _epochs(
    student: Student,
    step: Callable[[Tensor, Tensor, float | Tensor], list[Tensor]],
    rows: np.ndarray,
    client: Client,
    ctx: Context,
    *,
    batch: int,
    rates: Sequence[float],
    hint: str,
    kinds: int = 1,
) -> None:
    """A pass over the rows for each rate: ``step`` gets a batch of them, a symmetry of the square each, the rate."""
    update = ctx.progress.start(f"personalising {client.label}", max(len(rates), 1))
    kept: dict[str, Any] = {}  # recorded steps, by batch size
    for epoch, lr in enumerate(rates):
        rng = ctx.rng("personal", client.name, f"epoch-{epoch}")
        rate = scalar(lr, ctx.device) if ctx.fast else lr
        for chosen in epoch_batches(len(rows), batch, rng):
            index, drawn = (
                torch.from_numpy(values).to(ctx.device)
                for values in (rows[chosen], rng.integers(0, kinds, len(chosen)))
            )
            recorded(kept, f"{len(chosen)} images", step, student.in_place, ctx.fast)(index, drawn, rate)
        update(epoch + 1, "")
    if not student.finite:
        raise MethodError("diverged", f"{client.label}: the personal weights are no longer finite; {hint}")


def distil_into_one(client: Client, several: Predictor, starts: Predictor, turns: bool, ctx: Context) -> Predictor:
    """One network that answers on the client's training images as ``several`` do; these, where it is clearly worse.

    It starts from that network of ``starts`` which is least surprised by the validation images, and is kept unless the
    several are better there beyond chance. Without validation images nothing is shown, and the several stay.
    """
    held = ctx.validation_rows(client)
    if len(several.states) == 1:
        return several
    if not len(held):
        ctx.record.warn(f"{client.label}: no validation images to try one network on; all {len(several.states)} stay")
        return several
    rows = np.setdiff1d(np.arange(len(client.labels)), held)
    labels = torch.from_numpy(client.labels[held])
    candidates = [
        Predictor(ctx.task, (name,), (state,)) for name, state in zip(starts.architectures, starts.states, strict=True)
    ]
    losses = [_surprise(candidate.probabilities(client.images[held], ctx.device), labels) for candidate in candidates]
    first = losses.index(min(losses))
    state = _learn_from(client, several, candidates[first], rows, turns, ctx)
    one = replace(candidates[first], states=(state,))
    by_one, by_several = (model.probabilities(client.images[held], ctx.device).argmax(1) for model in (one, several))
    truth = client.labels[held]
    won = int(((by_several == truth) & (by_one != truth)).sum())
    lost = int(((by_one == truth) & (by_several != truth)).sum())
    worse = better_beyond_chance(won, lost)
    columns = ["validation images", "right where the several are wrong", "the reverse", "networks kept"]
    row = [len(held), lost, won, len(several.states) if worse else 1]
    ctx.record.add("tables", f"{client.label}: one network from several", {"columns": columns, "rows": [row]})
    return several if worse else one


def _learn_from(
    client: Client, several: Predictor, start: Predictor, rows: np.ndarray, turns: bool, ctx: Context
) -> dict[str, Tensor]:
    """The start after some epochs on the soft labels of the several, each image turned and mirrored at random."""
    recipe, task, kinds = ctx.training, ctx.task, 8 if turns else 1
    views = [np.rot90(client.images, kind % 4, axes=(1, 2)) for kind in range(kinds)]
    views = [np.ascontiguousarray(view[:, :, ::-1] if kind >= 4 else view) for kind, view in enumerate(views)]
    soft = torch.stack([torch.from_numpy(several.probabilities(view, ctx.device)) for view in views]).to(ctx.device)
    images = to_device(client.images, ctx.device)
    network = load_model(start.architectures[0], start.states[0], task.channels, len(task.classes), task.image_size)
    student = Student(network, ctx.device, ctx.precision, ctx.fast, passes=0)

    def step(index: Tensor, drawn: Tensor, rate: float | Tensor) -> list[Tensor]:
        def loss_of(logits: Tensor) -> Tensor:
            return soft_kd_loss(logits, soft[drawn, index], 1.0)

        loss, gradients = student.gradient(turn_and_mirror(normalise(images[index]), drawn), loss_of)
        student.update(gradients, rate, recipe.momentum, recipe.weight_decay)
        return [loss]

    rates = [recipe.lr * lr_multiplier("cosine", epoch / EPOCHS_INTO_ONE) for epoch in range(EPOCHS_INTO_ONE)]
    options: dict[str, Any] = {"batch": recipe.batch_size, "rates": rates, "hint": "lower training.lr"}
    _epochs(student, step, rows, client, ctx, kinds=kinds, **options)
    asked, learnt = (
        sum(models.forward_flops(name, *ctx.architecture[1:]) for name in model.architectures)
        for model in (several, start)
    )
    ctx.record.flops += kinds * asked * len(client.labels) + 3 * learnt * EPOCHS_INTO_ONE * len(rows)
    return student.state()


def _surprise(probabilities: np.ndarray, labels: Tensor) -> float:
    return float(F.nll_loss(torch.from_numpy(probabilities).double().clamp_min(1e-300).log(), labels))
