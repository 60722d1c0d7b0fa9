"""A pool of images inverted from single networks, and a student that learns a teacher's answers to them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fedbicross import models
from fedbicross.engine.fast import recorded, run_on_streams, scalar
from fedbicross.engine.images import grid_png
from fedbicross.engine.recipe import lr_multiplier
from fedbicross.engine.train import turn_and_mirror
from fedbicross.errors import MethodError
from fedbicross.parts.diagnosis import Curves
from fedbicross.parts.students import new_student
from fedbicross.steps.augment import cutmix as put_in_box
from fedbicross.steps.augment import draw_boxes, draw_views, zoomed
from fedbicross.steps.distill import soft_kd_loss
from fedbicross.steps.inversion import Inversion, InversionSettings
from fedbicross.steps.pool import Pool, Storage, decode, encode

if TYPE_CHECKING:
    from torch import Tensor

    from fedbicross.context import Context
    from fedbicross.engine.ensemble import Ensemble
    from fedbicross.engine.student import Student
    from fedbicross.parts.settings import PoolConfig
    from fedbicross.steps.trajectory import Teacher

AT_ONCE = 8  # inversions side by side on a GPU
PAGE = 64  # batches that are augmented and labelled together, if they have
PAGE_VALUES = 2**28  # at most so many numbers: 64 batches of 256 colour images up to 73 px
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
    fitting = min(source.at_once or AT_ONCE for source in sources.values())  # networks whose activations fit
    size = min(AT_ONCE, fitting) if ctx.fast else 1
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


class _Pages:
    """The pool as the student sees it, with the teacher's answers: so many augmented batches, a page, at a time.

    Asking N teachers is most of the work, so each page is learnt from ``reuse`` times, in another order each time.
    Pages and orders are drawn on the device, each from a stream of its own: any step can be made again.
    """

    def __init__(self, pool: Pool, teacher: Teacher, config: PoolConfig, ctx: Context) -> None:
        self.pool, self.teacher, self.config, self.ctx = pool, teacher, config, ctx
        self.batches = page_batches(config, ctx)
        self.page = self.turn = -1
        self.captured: dict[str, Any] = {}  # the recorded step of labelling

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """The images of this step, from 0, and their soft labels."""
        page, place = divmod(step, self.batches * self.config.reuse)
        turn, number = divmod(place, self.batches)
        if page != self.page:
            self._make(page)
        if turn != self.turn:
            rng = self.ctx.torch_rng("distillation", f"page-{page}", f"order-{turn}", device=self.ctx.device)
            self.order, self.turn = torch.randperm(len(self.soft), generator=rng, device=self.ctx.device), turn
        rows = self.order[number * self.config.batch : (number + 1) * self.config.batch]
        return decode(self.images[rows]), self.soft[rows]

    def _make(self, page: int) -> None:
        config, device, count = self.config, self.ctx.device, self.batches * self.config.batch
        rng = self.ctx.torch_rng("distillation", f"page-{page}", device=device)
        rows = torch.randint(self.pool.images, (count,), generator=rng, device=device)
        kinds = torch.randint(8 if config.turns else 1, (count,), generator=rng, device=device)
        views = draw_views(count, rng)
        cut = torch.arange(count, device=device) % config.cutmix == config.cutmix - 1 if config.cutmix else kinds < 0
        boxes = draw_boxes(count, self.ctx.task.image_size, rng) * cut.view(-1, 1)
        label = recorded(self.captured, "label", self._label, [], self.ctx.fast)
        parts = [torch.split(drawn, config.batch) for drawn in (rows, kinds, views, boxes)]
        made = [label(self.pool.take(some)["images"], *drawn) for some, *drawn in zip(*parts, strict=True)]
        self.images, self.soft = (torch.cat(part) for part in zip(*made, strict=True))
        self.page, self.turn = page, -1

    @torch.no_grad()
    def _label(self, images: Tensor, kinds: Tensor, views: Tensor, boxes: Tensor) -> list[Tensor]:
        """Turned, zoomed and cut together, as they are kept, and what the teacher says of them."""
        seen = turn_and_mirror(images, kinds)
        seen = zoomed(seen, views) if self.config.zoom else seen
        kept = encode(put_in_box(seen, seen.roll(1, 0), boxes), self.pool.storage)
        return [kept, self.teacher.original(decode(kept))]


def distil(
    pool: Pool, teacher: Teacher, config: PoolConfig, ctx: Context, start: Mapping[str, Tensor] | None = None
) -> Student:
    """A student after its steps of SGD on τ² KL(teacher ‖ student), from these weights or from fresh ones."""
    total = config.steps_distil
    student, curves = new_student(ctx, 0, total, start), Curves(total)
    pages = _Pages(pool, teacher, config, ctx)

    def learn(images: Tensor, soft: Tensor, lr: Tensor) -> list[Tensor]:
        loss, gradients = student.gradient(images, lambda logits: soft_kd_loss(logits, soft, teacher.temperature))
        student.update(gradients, lr, config.momentum, config.weight_decay)
        return [loss]

    step_once = recorded(student.captured, "learn from the pool", learn, student.in_place, ctx.fast)
    stage = ctx.stage("distillation", "student", total, student=student, curves=curves)
    for step in stage.steps():
        now = scalar(config.lr * lr_multiplier(config.schedule, stage.progress), ctx.device)
        (loss,) = step_once(*pages.at(step), now)
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


def flops(architectures: Sequence[str], inverted: int, asked: int, labelled: int, seen: int, ctx: Context) -> int:
    """Forward passes, times the cost of each: 2 for every step of an inverted image, 1 a teacher, 3 the student.

    ``inverted`` counts images times steps, each by ``asked`` networks; ``labelled`` the images that all teachers were
    asked about, ``seen`` those that the student learnt from.
    """
    shape = ctx.architecture[1:]
    everyone = sum(models.forward_flops(name, *shape) for name in architectures)
    inverting = inverted * 2 * asked * everyone // len(architectures)
    return inverting + labelled * everyone + seen * 3 * models.forward_flops(*ctx.architecture)


def labelled(config: PoolConfig, ctx: Context) -> int:
    """How many images `distil` asks the teacher about: whole pages."""
    batches = page_batches(config, ctx)
    return math.ceil(config.steps_distil / (batches * config.reuse)) * batches * config.batch


def page_batches(config: PoolConfig, ctx: Context) -> int:
    """Batches of a page: `PAGE`, or fewer where images are large or steps few."""
    room = PAGE_VALUES // (config.batch * math.prod(ctx.task.image_shape))
    return max(1, min(PAGE, room, math.ceil(config.steps_distil / config.reuse)))
