"""Operations of a server's work: forward passes counted, times the cost of each."""

from __future__ import annotations

from collections.abc import Sequence

from fedbicross import models
from fedbicross.context import Context
from fedbicross.messages import Upload
from fedbicross.steps import generators


def synthesis_flops(
    ctx: Context, uploads: Sequence[Upload], batch: int, synthesis_steps: int, distil_steps: int, students: int = 1
) -> int:
    """Of synthesis, 2 passes a client; both teachers, 2 a client; and a student, 3."""
    clients, student, _ = forward_flops(ctx, uploads)
    return batch * (2 * clients * synthesis_steps + (2 * clients + 3 * student * students) * distil_steps)


def forward_flops(
    ctx: Context, uploads: Sequence[Upload], generator: generators.GeneratorSettings | None = None
) -> tuple[int, int, int]:
    """Per image, of one forward pass of all clients, of the student, and of the generator if there is one."""
    clients = sum(models.forward_flops(upload.task.model, *ctx.architecture[1:]) for upload in uploads)
    student = models.forward_flops(*ctx.architecture)
    if generator is None:
        return clients, student, 0
    return clients, student, generators.forward_flops(generator, ctx.task.channels, ctx.task.image_size)
