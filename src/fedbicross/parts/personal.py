"""Personal distillation at the client: FedBiCross Eq. 9. Both teachers are frozen, so their logits are made once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedbicross import models
from fedbicross.engine.device import normalise, to_device
from fedbicross.engine.fast import recorded, scalar
from fedbicross.engine.predict import load_model, member_logits
from fedbicross.engine.student import Student
from fedbicross.engine.train import epoch_batches, split_validation
from fedbicross.errors import MethodError
from fedbicross.seeds import numpy_rng
from fedbicross.steps.distill import personal_loss

if TYPE_CHECKING:
    from fedbicross.context import Context
    from fedbicross.messages import Client


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
    batch: int,
    momentum: float,
    weight_decay: float,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The personal model f_pers and, on held-out local images, the accuracies of all three models.

    Training uses the same local split as the client's own training did, so that none of the three models was trained
    on the validation images; a client too small to have any gets no comparison.
    """
    name, *shape = ctx.architecture
    own = ctx.model_of(client)  # only its answers are used, so that it may be of any architecture
    both = ((name, cluster_state), (own, own_state))
    networks = [load_model(which, state, *shape).to(ctx.device) for which, state in both]
    rng = numpy_rng(ctx.training_seed, "training", client.name, "validation-split")
    rows, held = split_validation(client.labels, client.patients, ctx.training.validation, rng)
    images = to_device(client.images, ctx.device)
    labels = torch.from_numpy(client.labels).to(ctx.device)
    cached = torch.cat([member_logits(networks, part, ctx.precision) for part in torch.split(images, 500)], dim=1)
    student = Student(load_model(name, cluster_state, *shape), ctx.device, ctx.precision, ctx.fast, passes=0)
    update = ctx.progress.start(f"personalising {client.label}", max(epochs, 1))
    kept: dict[str, Any] = {}  # recorded steps, by batch size
    rate = scalar(lr, ctx.device) if ctx.fast else lr

    def step(index: Tensor) -> list[Tensor]:
        def loss_of(logits: Tensor) -> Tensor:
            given = {"temperature": temperature, "gamma": gamma, "delta": delta}
            return personal_loss(logits, labels[index], cached[0, index], cached[1, index], **given).total

        loss, gradients = student.gradient(normalise(images[index]), loss_of)
        student.update(gradients, rate, momentum, weight_decay)
        return [loss]

    for epoch in range(epochs):
        for chosen in epoch_batches(len(rows), batch, ctx.rng("personal", client.name, f"epoch-{epoch}")):
            index = torch.from_numpy(rows[chosen]).to(ctx.device)
            recorded(kept, f"{len(chosen)} images", step, student.in_place, ctx.fast)(index)
        update(epoch + 1, "")
    if not student.finite:
        raise MethodError("diverged", f"{client.label}: the personal weights are no longer finite; lower lr_personal")
    per_image = models.forward_flops(*ctx.architecture)
    answers = (per_image + models.forward_flops(*ctx.architecture_of(client))) * len(labels)
    ctx.record.flops += answers + 3 * per_image * epochs * len(rows)
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
