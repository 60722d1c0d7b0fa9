"""FedISCA (Kang et al., MICCAI 2023): distil the ensemble on images on their way from noise to finished.

Per epoch: synthesise one batch from the client models (Eq. 1), keep every intermediate batch, adapt a copy of the
teachers to the noise (Eq. 2), and train one global student on all of them, the noisier the batch the more by the
adapted teachers (Eq. 3). Differences to the paper and to the authors' code: docs/methods/fedisca.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from fedbicross import engine, parts, steps
from fedbicross.context import Context
from fedbicross.messages import Reply, Upload
from fedbicross.methods.families import ShotsMethod
from fedbicross.parts.settings import ShotsConfig

if TYPE_CHECKING:
    from torch import Tensor

    from fedbicross.engine.fast import Source
    from fedbicross.steps.sources import Batches
    from fedbicross.steps.trajectory import Sample, Teacher


class FedISCAConfig(ShotsConfig):
    """FedISCA's settings; the paper's values are the defaults."""

    epochs: int = Field(100, ge=1, description="synthesised batches, each distilled once (paper: 100)")
    lr: float = Field(1e-3, gt=0, description="η_d: the student's SGD rate (authors' code: 1e-3)")
    schedule: Literal["step", "cosine", "constant"] = Field("step", description="step: x0.1 at 50 % and 75 % (code)")
    noise_level: Literal["paper", "released"] = Field("paper", description="λ = 1 - t/T, or the code's 1 - (t-1)/T")
    synthesis: bool = Field(True, description="false: train on fresh N(0,1) noise only (ablation w/o IS)")
    intermediate: bool = Field(True, description="false: train on finished images only (ablation w/o N, DeepInversion)")

    memory: int = Field(0, ge=0, description="earlier batches kept to be learnt from again (paper: none; ours)")
    replays: int = Field(1, ge=1, description="of these, how many are learnt from again after each new batch (ours)")

    @property
    def distillation_steps(self) -> int:
        """Of all epochs."""
        return self.epochs * self.steps

    @property
    def synthesis_steps(self) -> int:
        """One for each batch; none in the ablation on noise."""
        return self.distillation_steps if self.synthesis else 0


class FedISCA(ShotsMethod[FedISCAConfig]):
    """One global student for everyone."""

    name = "fedisca"
    summary = "distils the ensemble on images inverted from it, from noise to finished (MICCAI 2023)"
    Config = FedISCAConfig
    variants = {
        "ema": {"adaptation": "ema"},
        "no_synthesis": {"synthesis": False},
        "no_synthesis_no_adaptation": {"synthesis": False, "adaptation": "none"},
        "no_adaptation": {"adaptation": "none"},
        "no_noise": {"intermediate": False, "adaptation": "none"},
        "class_weighted": {"teacher": "class_weighted"},
        "two_shots": {"shots": 2},
        "five_shots": {"shots": 5},
    }
    variant_notes = {
        "ema": "noise-adapted teachers by the paper's equation instead of the authors' code",
        "no_synthesis": "ablation w/o IS: N(0,1) noise instead of synthesised images",
        "no_synthesis_no_adaptation": "ablation w/o IS&Ada",
        "no_adaptation": "ablation w/o Ada: original teachers only",
        "no_noise": "ablation w/o N: finished images only (DeepInversion)",
        "class_weighted": "ours: clients weighted per class by their class counts",
        "two_shots": "clients train again from the first student (E-FedISCA's last row of N=20)",
        "five_shots": "five times; E-FedISCA 5.6 sees FedAvg's 100 rounds passed from here on",
    }
    # Without a memory, and at a rate of 0.1, rounding alone moves the student by several points.
    quick_settings = {
        "steps": 100,
        "batch": 32,
        "epochs": 6,
        "lr_synthesis": 0.1,
        "lr": 0.05,
        "schedule": "cosine",
        "memory": 300,
        "replays": 3,
    }

    def fuse(self, uploads: Sequence[Upload], ctx: Context) -> list[Reply]:
        """Algorithm 1: synthesise, adapt and distil, epoch after epoch."""
        config = self.config
        shot, ctx = parts.shots.at_shot(self.name, config, uploads, ctx)
        total = config.distillation_steps
        teacher = parts.teachers.load_teacher(config, self.name, uploads, ctx)
        student = parts.shots.first_student(self.name, config, shot, ctx)
        log = parts.synthesis_log.SynthesisLog("student", ctx, config.steps, total)
        memory = steps.sources.SampleMemory(
            config.memory, config.replays, lambda seen: ctx.rng("memory", f"sample-{seen}")
        )
        pool = steps.sources.Batches()
        label = f"{self.name}: synthesis and distillation"
        stage = ctx.stage("distillation", label, total, student=student, watch=log, memory=memory, pool=pool)
        source = partial(self._source, teacher, pool, ctx)
        for _, (sample,) in stage.samples("epoch", config.epochs, [source]):
            lr = config.lr * engine.recipe.lr_multiplier(config.schedule, stage.progress)
            loss = parts.students.learn(student, sample, config, lr)
            for earlier in memory.replay_and_keep(sample):  # statistics stay those of the newest images
                parts.students.learn(student, earlier, config, lr, track=False)
            log.add(sample, distillation=loss)
        labels = steps.inversion.balanced_labels(config.batch, len(ctx.task.classes), ctx.device)
        log.finish(teacher, sample, labels, student)
        ctx.record.flops += parts.costs.synthesis_flops(ctx, uploads, config.batch, config.synthesis_steps, total)
        reply = parts.shots.reply(config, student, shot, ctx)
        return [reply for _ in uploads]

    def _source(
        self, teacher: Teacher, pool: Batches, ctx: Context, epoch: int, saved: Mapping[str, Tensor] | None
    ) -> Source[Sample]:
        """One epoch's batches: a trajectory, or what an ablation puts in its place."""
        config, shape = self.config, ctx.task.image_shape
        if not config.synthesis:
            done = 0 if saved is None else int(saved["done"])
            names = ("noise", f"epoch-{epoch}")
            return steps.sources.NoiseOnly(
                teacher,
                (config.batch, *shape),
                config.steps,
                lambda t: ctx.torch_rng(*names, f"step-{t}", device=ctx.device),
                done,
            )
        settings, level = parts.teachers.inversion_settings(config, ctx.task.image_size), config.noise_level
        if saved is not None:
            trajectory = steps.trajectory.Trajectory.from_tensors(teacher, settings, saved, level)
        else:
            rng = ctx.torch_rng("synthesis", "cluster-0", f"trajectory-{epoch}", device=ctx.device)
            trajectory = steps.trajectory.Trajectory.start(teacher, settings, shape, len(ctx.task.classes), rng, level)
        if config.intermediate:
            return trajectory
        drawn = 0 if saved is None else int(saved["drawn"])
        order = ctx.rng("finished", f"epoch-{epoch}")
        draw = lambda size: [int(i) for i in order.integers(0, size, config.steps)]  # noqa: E731
        return steps.sources.FinishedOnly(trajectory, pool, draw, drawn)
