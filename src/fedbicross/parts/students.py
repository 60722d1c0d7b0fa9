"""Students: initialisation, SGD steps towards soft labels, and the finished student at the client."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from fedbicross.context import Context
from fedbicross.engine.fast import recorded, scalar
from fedbicross.engine.student import Student
from fedbicross.messages import Predictor, Reply
from fedbicross.parts.settings import SynthesisConfig
from fedbicross.steps.distill import soft_kd_loss
from fedbicross.steps.generators import clipped
from fedbicross.steps.trajectory import Sample, sample_loss


def new_student(ctx: Context, number: int, passes: int) -> Student:
    """A freshly initialised student; number k is that of cluster k. ``passes`` is what all students make together."""
    model = ctx.new_model(ctx.torch_rng("student", str(number)))
    return Student(model, ctx.device, ctx.precision, ctx.fast, passes)


def learn(student: Student, sample: Sample, config: SynthesisConfig, lr: float, track: bool = True) -> Tensor:
    """One SGD step on one batch: Eq. 3 of FedISCA, Eq. 5 of FedBiCross. ``track``: it moves running statistics."""

    def step(*tensors: Tensor) -> list[Tensor]:
        images, original, adapted, lam, rate = tensors
        given = sample._replace(images=images, original=original, adapted=adapted, lam=lam)
        loss_of = partial(sample_loss, sample=given, temperature=config.temperature)
        loss, gradients = student.gradient(images, loss_of, track)
        student.update(gradients, rate, config.momentum, config.weight_decay)
        return [loss]

    numbers = [scalar(sample.lam, student.device), scalar(lr, student.device)]
    inputs = (sample.images, sample.original, sample.adapted, *numbers)
    return recorded(student.captured, f"learn {track}", step, student.in_place, student.fast)(*inputs)[0]


def learn_soft(
    student: Student,
    images: Tensor,
    soft: Tensor,
    lr: float,
    *,
    temperature: float,
    momentum: float,
    weight_decay: float,
    clip: float | None,
) -> Tensor:
    """One SGD step towards soft labels: τ² KL(teacher ‖ student)."""

    def step(*tensors: Tensor) -> list[Tensor]:
        images, soft, rate = tensors
        loss, gradients = student.gradient(images, partial(soft_kd_loss, teacher_soft=soft, temperature=temperature))
        if clip is not None:
            gradients = tuple(clipped(gradients, clip))
        student.update(gradients, rate, momentum, weight_decay)
        return [loss]

    inputs = (images, soft, scalar(lr, student.device))
    return recorded(student.captured, "learn", step, student.in_place, student.fast)(*inputs)[0]


def global_student(reply: Reply, ctx: Context) -> Predictor:
    """At the client: the student of a reply as it is."""
    return Predictor(ctx.task, (str(reply.info["architecture"]),), (dict(reply.tensors),))
