"""A pool of images inverted from single networks, and a student that learns a teacher's answers to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from fedbicross import models
from fedbicross.engine.fast import recorded, run_on_streams, scalar
from fedbicross.engine.images import grid_png
from fedbicross.engine.recipe import lr_multiplier
from fedbicross.errors import MethodError
from fedbicross.parts.diagnosis import Curves
from fedbicross.parts.students import new_student
from fedbicross.steps.augment import cutmix as put_in_box
from fedbicross.steps.augment import draw_boxes, turn_and_mirror
from fedbicross.steps.distill import soft_kd_loss
from fedbicross.steps.inversion import Inversion, InversionSettings
from fedbicross.steps.pool import Pool, Storage

if TYPE_CHECKING:
    from torch import Tensor

    from fedbicross.context import Context
    from fedbicross.engine.ensemble import Ensemble
    from fedbicross.engine.student import Student
    from fedbicross.steps.trajectory import Teacher

AT_ONCE = 8  # inversions side by side on a GPU
BLOCK = 100  # steps of the student whose random numbers come from one stream
SHOWN = 8  # images of each class in the report
RECOGNISED = 0.5  # share of its own images that a network should call as it was asked to


def invert_each(
    sources: Mapping[str, Ensemble],
    mixes: Mapping[str, Tensor],
    settings: InversionSettings,
    each: int,
    storage: Storage,
    ctx: Context,
) -> Pool:
    """``each`` batches from every source, with labels drawn from its class mix [C]; on a GPU several side by side."""
    names = list(sources)
    size = AT_ONCE if ctx.fast else 1
    groups = [names[first : first + size] for first in range(0, len(names), size)]
    rounds = [(group, number) for group in groups for number in range(each)]
    pool = Pool(each * len(names), storage)
    stage = ctx.stage("pool", "images inverted from the networks", len(rounds), keep_end=True, pool=pool)
    for step in stage.steps():
        group, number = rounds[step]
        running = [_start(sources[name], mixes[name], name, number, settings, ctx) for name in group]
        for _ in range(settings.steps):
            run_on_streams([inversion.step for inversion in running], ctx.device if ctx.fast else "cpu")
        for name, inversion in zip(group, running, strict=True):
            source = torch.full_like(inversion.labels, names.index(name))
            pool.add(inversion.images, inversion.labels, source=source)
            if number == each - 1:
                sources[name].captured.clear()  # a recording holds the activations of a whole pass
    return pool


def _start(
    source: Ensemble, mix: Tensor, name: str, number: int, settings: InversionSettings, ctx: Context
) -> Inversion:
    shares = (mix / mix.sum()).numpy()
    labels = torch.from_numpy(ctx.rng("labels", name, f"batch-{number}").choice(len(shares), settings.batch, p=shares))
    rng = ctx.torch_rng("synthesis", name, f"batch-{number}", device=ctx.device)
    return Inversion.start(source, labels.to(ctx.device), ctx.task.image_shape, settings, rng)


class _Draws:
    """The random numbers of every step: images of the pool, their turns, and boxes for pieces of their neighbours.

    Drawn on the device, a block of steps at a time, each from a stream of its own: any step can be made again.
    """

    def __init__(self, pool: Pool, batch: int, turns: bool, cutmix: int, ctx: Context) -> None:
        self.pool, self.batch, self.turns, self.cutmix, self.ctx = pool, batch, turns, cutmix, ctx
        self.block = -1

    def at(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, kinds of turns and boxes of this step, from 0."""
        if step // BLOCK != self.block:
            self._draw(step // BLOCK)
        i = step % BLOCK
        return self.rows[i], self.kinds[i], self.boxes[i]

    def _draw(self, block: int) -> None:
        device = self.ctx.device
        rng = self.ctx.torch_rng("distillation", f"block-{block}", device=device)
        shape = (BLOCK, self.batch)
        self.block, self.rows = block, torch.randint(self.pool.images, shape, generator=rng, device=device)
        self.kinds = torch.randint(8 if self.turns else 1, shape, generator=rng, device=device)
        size = self.ctx.task.image_size
        self.boxes = draw_boxes(BLOCK * self.batch, size, rng).view(*shape, 4)
        cut = torch.arange(block * BLOCK, (block + 1) * BLOCK, device=device)
        mixed = (cut % self.cutmix == self.cutmix - 1) if self.cutmix else torch.zeros_like(cut, dtype=torch.bool)
        self.boxes = self.boxes * mixed.view(-1, 1, 1)


def distil(
    pool: Pool,
    teacher: Teacher,
    ctx: Context,
    *,
    total: int,
    batch: int,
    lr: float,
    schedule: str,
    momentum: float,
    weight_decay: float,
    turns: bool,
    cutmix: int,
) -> Student:
    """A new student after ``total`` steps of SGD on τ² KL(teacher ‖ student), images drawn by `_Draws`."""
    student, curves = new_student(ctx, 0, total), Curves(total)
    draws = _Draws(pool, batch, turns, cutmix, ctx)

    def learn(images: Tensor, kinds: Tensor, boxes: Tensor, lr: Tensor) -> list[Tensor]:
        with torch.no_grad():
            turned = turn_and_mirror(images, kinds)
            seen = put_in_box(turned, turned.roll(1, 0), boxes)
            soft = teacher.original(seen)
        loss, gradients = student.gradient(seen, lambda logits: soft_kd_loss(logits, soft, teacher.temperature))
        student.update(gradients, lr, momentum, weight_decay)
        return [loss]

    step_once = recorded(student.captured, "learn from the pool", learn, student.in_place, ctx.fast)
    stage = ctx.stage("distillation", "student", total, student=student, curves=curves)
    for step in stage.steps():
        rows, kinds, boxes = draws.at(step)
        now = scalar(lr * lr_multiplier(schedule, stage.progress), ctx.device)
        (loss,) = step_once(pool.take(rows)["images"], kinds, boxes, now)
        curves.add(step + 1, distillation=loss)
    if not student.finite:
        raise MethodError("diverged", "the student's weights are no longer finite; lower its lr, or lr_synthesis")
    ctx.record.add("curves", "student: distillation loss", curves.plot(["distillation"], "loss"))
    return student


@torch.no_grad()
def describe(pool: Pool, sources: Mapping[str, Ensemble], teacher: Teacher, student: Student, ctx: Context) -> None:
    """Are the images what their network was asked for? Does the student say what its teacher says? And a picture."""
    names = list(sources)
    recognised: dict[str, list[Tensor]] = {name: [] for name in names}
    agree = []
    for number in range(len(pool)):
        batch = pool.batch(number)
        images, name = batch["images"], names[int(batch["source"][0])]
        recognised[name].append(sources[name].logits(images).mean(0).argmax(1) == batch["labels"])
        agree.append(student.eval_logits(images).argmax(1) == teacher.original(images).argmax(1))
    shares = {name: float(torch.cat(found).float().mean()) for name, found in recognised.items()}
    rows = [[name, round(share, 4)] for name, share in shares.items()]
    columns = ["client", "share of its images that its network calls as it was asked to"]
    ctx.record.add("tables", "images inverted from the networks", {"columns": columns, "rows": rows})
    lost = [name for name, share in shares.items() if share < RECOGNISED]
    if lost:
        some = ", ".join(lost[:8])
        ctx.record.warn(
            f"the networks of {some} do not recognise most of their own images; lower alpha_bn, or raise steps"
        )
    agreement = float(torch.cat(agree).float().mean())
    ctx.record.add("scalars", "student agrees with its teacher on the images it learnt from", round(agreement, 4))
    _picture(pool, ctx)


def _picture(pool: Pool, ctx: Context) -> None:
    """Some images of each class as a PNG beside the run; grey where there are too few."""
    classes, size = len(ctx.task.classes), ctx.task.image_size
    grid = torch.zeros(classes, SHOWN, ctx.task.channels, size, size)
    kept = [pool.batch(number) for number in range(len(pool))]
    for index in range(classes):
        found = [batch["images"][batch["labels"] == index][:2] for batch in kept]
        chosen = torch.cat(found)[:SHOWN]
        grid[index, : len(chosen)] = chosen.float().cpu()
    path = f"diagnosis/{ctx.scope}/pool.png"
    levels = ((grid.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    ctx.store.save(path, grid_png(levels.permute(0, 1, 3, 4, 2).numpy()))
    columns = [f"image {number + 1}" for number in range(SHOWN)]
    entry = {"rows": list(ctx.task.classes), "columns": columns, "images": path}
    ctx.record.add("image_strips", "images inverted from the networks", entry)


def flops(architectures: Sequence[str], inverted: int, asked: int, seen: int, ctx: Context) -> int:
    """Forward passes, times the cost of each: 2 for every step of an inverted image, 1 a teacher, 3 the student.

    ``inverted`` counts images times steps, each by ``asked`` networks; ``seen`` the images that the student saw.
    """
    shape = ctx.architecture[1:]
    everyone = sum(models.forward_flops(name, *shape) for name in architectures)
    return inverted * 2 * asked * everyone // len(architectures) + seen * (
        everyone + 3 * models.forward_flops(*ctx.architecture)
    )
