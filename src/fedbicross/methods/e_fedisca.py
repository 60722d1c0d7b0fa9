"""E-FedISCA (Kang et al., Medical Image Analysis 2025): one synthesis, then mixtures with structured noise.

Synthesise once and keep the batches with a low loss (Algorithm 2, lines 4-10). Then, epoch after epoch, mix stored
batches with structured noise at falling noise levels (Eq. 9) and distil from original and noise-adapted teachers
(Eq. 8). Differences to the paper: docs/methods/e_fedisca.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from fedbicross import engine, parts, steps
from fedbicross.context import Context
from fedbicross.lazy_torch import torch
from fedbicross.messages import Reply, Upload
from fedbicross.methods.families import ShotsMethod
from fedbicross.parts.settings import ShotsConfig

if TYPE_CHECKING:
    from torch import Tensor

    from fedbicross.engine.ensemble import Statistics
    from fedbicross.parts.synthesis_log import SynthesisLog
    from fedbicross.steps.noise import Memory
    from fedbicross.steps.trajectory import Sample, Teacher


TOGETHER = 4  # mixtures of which the teachers are asked at once: a GPU's work on an image falls up to there
MOST_PIXELS = 2**20  # in such a group, so that large images fit in memory


class EFedISCAConfig(ShotsConfig):
    """E-FedISCA's settings; the paper's values are the defaults."""

    steps: int = Field(1000, ge=1, description="synthesis steps, once (paper: 1,000; 2,000 at 224 px)")
    batch: int = Field(256, ge=2, description="B: images per synthesised batch (paper: 256; 96 at 224 px)")
    ce: Literal["mean_logits", "mean_ce"] = Field("mean_ce", description="mean of the clients' cross-entropies (paper)")
    memory: int = Field(500, ge=1, description="n: stored batches (paper: 500)")
    threshold: float = Field(50.0, gt=0, description="L_th: loss below which a batch is stored (paper: 50)")
    epochs: int = Field(100, ge=1, description="of adaptation and distillation (paper: 100)")
    steps_distil: int = Field(500, ge=1, description="S: distillation steps per epoch (not stated; FedISCA: 500)")
    lr: float = Field(1e-3, gt=0, description="η_d: the student's SGD rate (FedISCA's code: 1e-3)")
    schedule: Literal["step", "cosine", "constant"] = Field("step", description="step: x0.1 at 50 % and 75 %")
    noise: Literal["oriented", "pink", "dead_leaves"] = Field(
        "oriented", description="structured noise N' (paper: oriented)"
    )
    noise_images: int = Field(20_000, ge=1, description="noise images to draw from, made once (paper: a published set)")
    synthesis: bool = Field(True, description="false: noise only (ablations b and d)")
    mixing: bool = Field(True, description="false: stored images only (ablation a)")

    @property
    def synthesis_steps(self) -> int:
        """Of the one synthesis, unless an ablation leaves it out."""
        return self.steps if self.synthesis else 0

    @property
    def distillation_steps(self) -> int:
        """Of all epochs."""
        return self.epochs * self.steps_distil


class EFedISCA(ShotsMethod[EFedISCAConfig]):
    """One global student for everyone, from a single synthesis."""

    name = "e_fedisca"
    summary = "one synthesis, then distillation on its mixtures with structured noise (MedIA 2025)"
    Config = EFedISCAConfig
    variants = {
        "ema": {"adaptation": "ema"},
        "synthesis_only": {"mixing": False, "adaptation": "none"},
        "noise_only": {"synthesis": False, "adaptation": "none"},
        "no_adaptation": {"adaptation": "none"},
        "no_synthesis": {"synthesis": False},
        "class_weighted": {"teacher": "class_weighted"},
        "two_shots": {"shots": 2},
        "five_shots": {"shots": 5},
    }
    variant_notes = {
        "ema": "noise-adapted teachers by the paper's equation",
        "synthesis_only": "ablation (a): stored images, no noise, no adaptation",
        "noise_only": "ablation (b): structured noise only, no adaptation",
        "no_adaptation": "ablation (c): images and noise, original teachers only",
        "no_synthesis": "ablation (d): noise and adaptation, no synthesised images",
        "class_weighted": "ours: clients weighted per class by their class counts",
        "two_shots": "clients train again from the first student (E-FedISCA's last row of N=20)",
        "five_shots": "five times; E-FedISCA 5.6 sees FedAvg's 100 rounds passed from here on",
    }
    quick_settings = {
        "steps": 150,
        "batch": 32,
        "memory": 75,
        "epochs": 4,
        "steps_distil": 150,
        "lr": 0.1,
        "schedule": "cosine",
        "noise_images": 2000,
    }

    def fuse(self, uploads: Sequence[Upload], ctx: Context) -> list[Reply]:
        """Algorithm 2: synthesise once; then adapt and distil on mixtures, epoch after epoch."""
        config = self.config
        shot, ctx = parts.shots.at_shot(self.name, config, uploads, ctx)
        teacher = parts.teachers.load_teacher(config, self.name, uploads, ctx)
        total = config.distillation_steps
        log = parts.synthesis_log.SynthesisLog("student", ctx, config.steps, total)
        stored = self._synthesise(teacher, log, ctx).batches() if config.synthesis else None
        noise = self._noise(ctx) if config.mixing else None
        student = parts.shots.first_student(self.name, config, shot, ctx)
        adapted: Statistics | None = teacher.ensemble.initial_statistics() if config.adaptation == "ema" else None

        def batches(epoch: int, saved: Mapping[str, Tensor] | None) -> DistillationBatches:
            nonlocal adapted  # by every epoch further than by the one before
            mixtures = MixupBatches(epoch, stored, noise, config, ctx)
            if adapted is not None and saved is not None:
                adapted = engine.ensemble.statistics_from_tensors(saved)
            elif adapted is not None:
                last = steps.adaptation.window(config.momentum_adaptation)
                rising = (mixtures.at(s, s / config.steps_distil, "adaptation") for s in mixtures.steps[-last:])
                adapted = steps.adaptation.adapt(teacher.ensemble, rising, config.momentum_adaptation, adapted)
            return DistillationBatches(mixtures, teacher, adapted, 0 if saved is None else int(saved["done"]))

        stage = ctx.stage("distillation", f"{self.name}: distillation", total, student=student, watch=log)
        for _, (sample,) in stage.samples("epoch", config.epochs, [batches]):
            lr = config.lr * engine.recipe.lr_multiplier(config.schedule, stage.progress)
            loss = parts.students.learn(student, sample, config, lr)
            log.step += 1
            log.curves.add(log.step, distillation=loss)
        labels = steps.inversion.balanced_labels(config.batch, len(ctx.task.classes), ctx.device)
        log.finish(teacher, sample, labels, student)
        ctx.record.flops += parts.costs.synthesis_flops(ctx, uploads, config.batch, config.synthesis_steps, total)
        reply = parts.shots.reply(config, student, shot, ctx)
        return [reply for _ in uploads]

    def _synthesise(self, teacher: Teacher, log: SynthesisLog, ctx: Context) -> Memory:
        """Lines 4-10: one synthesis; batches with a low loss go to the memory."""
        config = self.config
        settings = parts.teachers.inversion_settings(config, ctx.task.image_size)
        memory = steps.noise.Memory(config.memory, config.threshold)
        labels = steps.inversion.balanced_labels(config.batch, len(ctx.task.classes), ctx.device)
        rng = ctx.torch_rng("synthesis", "cluster-0", "trajectory-0", device=ctx.device)
        inversion = steps.inversion.Inversion.start(teacher.ensemble, labels, ctx.task.image_shape, settings, rng)
        curves = parts.diagnosis.Curves(config.steps)
        label, strip = f"{self.name}: synthesis", log.strip
        stage = ctx.stage(
            "synthesis",
            label,
            config.steps,
            keep_end=True,
            inversion=inversion,
            memory=memory,
            curves=curves,
            strip=strip,
        )
        for _ in stage.steps():
            loss = inversion.step()
            memory.add(inversion.images, loss.total)
            terms = {"synthesis": loss.total, "cross-entropy": loss.cross_entropy, "batch norm": loss.batch_norm}
            curves.add(inversion.t, **terms)
            log.strip.add(steps.trajectory.Sample(inversion.t, inversion.images, labels, labels, 0.0, loss))
        ctx.record.add("curves", "synthesis loss", curves.plot(list(curves.values), "loss"))
        below = memory.qualified()
        ctx.record.add("scalars", f"stored batches with a loss below {config.threshold:g}", f"{below} of {len(memory)}")
        return memory

    def _noise(self, ctx: Context) -> Tensor:
        """The pool of structured noise N'; made in pieces, the same on every resume."""
        pieces = []
        for start in range(0, self.config.noise_images, 1000):
            count = min(1000, self.config.noise_images - start)
            rng = ctx.torch_rng("structured-noise", str(start), device=ctx.device)
            pieces.append(steps.noise.structured_noise(self.config.noise, (count, *ctx.task.image_shape), rng))
        return torch.cat(pieces)


@dataclass
class DistillationBatches:
    """The distillation steps of one epoch: mixtures at falling noise levels, with what both teachers say of them."""

    mixtures: MixupBatches
    teacher: Teacher
    statistics: Statistics | None
    done: int

    def tensors(self) -> dict[str, Tensor]:
        """State for a checkpoint: every step can be made alone."""
        kept = {} if self.statistics is None else engine.ensemble.statistics_to_tensors(self.statistics)
        return {**kept, "done": torch.tensor(self.done)}

    def __iter__(self) -> Iterator[Sample]:
        total = len(self.mixtures.steps)
        together = 1 if self.statistics is not None else self.mixtures.together
        # Groups begin at fixed steps, so that a run that goes on makes the same ones.
        for start in range(self.done - self.done % together, total, together):
            group = self.mixtures.steps[start : start + together]
            lams = [1 - s / total for s in group]
            images = [self.mixtures.at(s, lam, "distillation") for s, lam in zip(group, lams, strict=True)]
            if self.statistics is None:
                answers = self.teacher.soft_labels_of_batches(images, lams)
            else:
                answers = [self.teacher.soft_labels(images[0], lams[0], self.statistics)]
            for s, seen, answer in zip(group, images, answers, strict=True):
                if s > self.done:
                    self.done = s
                    yield steps.trajectory.Sample(s, seen, *answer, None)


class MixupBatches:
    """One epoch's mixtures of stored and noise images; all draws up-front, so that any step can be made alone."""

    def __init__(
        self, epoch: int, stored: Tensor | None, noise: Tensor | None, config: EFedISCAConfig, ctx: Context
    ) -> None:
        self.stored, self.noise = stored, noise
        pixels = config.batch * ctx.task.image_size**2
        self.together = max(1, min(TOGETHER, MOST_PIXELS // pixels))
        self.steps = list(range(1, config.steps_distil + 1))
        self.draws = {}
        for use in ("adaptation", "distillation"):
            rng = ctx.torch_rng("mixing", use, f"epoch-{epoch}", device=ctx.device)
            batches, size = 1 if stored is None else len(stored), 1 if noise is None else len(noise)
            self.draws[use] = (
                torch.randint(batches, (len(self.steps), 1), generator=rng, device=ctx.device),
                torch.randint(size, (len(self.steps), config.batch), generator=rng, device=ctx.device),
            )

    def at(self, s: int, lam: float, use: str) -> Tensor:
        """Eq. 9 at step s with noise level ``lam``; without one of the two, the other alone."""
        which, rows = self.draws[use][0][s - 1], self.draws[use][1][s - 1]
        if self.stored is None:
            assert self.noise is not None
            return self.noise[rows]
        images = self.stored.index_select(0, which)[0]
        return images if self.noise is None else steps.noise.mixup(self.noise[rows], images, lam)
