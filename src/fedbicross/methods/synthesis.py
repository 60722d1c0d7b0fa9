"""What FedISCA, E-FedISCA and FedBiCross share: settings, teachers, students, and watching the synthesis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

from pydantic import Field

from fedbicross import engine, steps
from fedbicross.context import Context
from fedbicross.errors import MethodError
from fedbicross.exchange import Client, Predictor, Reply, Upload, file_name
from fedbicross.methods.base import Method, MethodConfig

if TYPE_CHECKING:
    from torch import Tensor

    from fedbicross.engine.student import Student
    from fedbicross.steps.inversion import InversionSettings
    from fedbicross.steps.trajectory import Sample, Teacher


class SynthesisConfig(MethodConfig):
    """Synthesis, teachers, and the student's optimiser; the papers' values are the defaults."""

    steps: int = Field(
        500, ge=1, description="T (FedISCA: I, S): synthesis steps per batch (paper: 500; 1,000 at 224 px)"
    )
    batch: int = Field(256, ge=2, description="B: images per synthesised batch (paper: 256; 50 at 224 px)")
    lr_synthesis: float = Field(5e-2, gt=0, description="η_s: Adam's rate on the pixels (paper: 5e-2)")
    alpha_tv: float = Field(2.5e-5, ge=0, description="α_TV: weight of total variation (paper: 2.5e-5)")
    alpha_bn: float = Field(10.0, ge=0, description="α_BN: weight of the batch-norm term (paper: 10)")
    jitter: int | None = Field(None, ge=0, description="random shift in pixels; none: 2, or 30 above 128 px (code)")
    bn_reduction: Literal["mean", "sum"] = Field(
        "mean", description="batch-norm term over clients (FedISCA's code: sum)"
    )
    bn_distance: Literal["absolute", "relative"] = Field(
        "absolute", description="a layer's batch-norm distances as they are (papers), or over its own spread (ours)"
    )
    ce: Literal["mean_logits", "mean_ce"] = Field(
        "mean_logits", description="cross-entropy of the mean logits (code), or mean of the clients' (E-FedISCA's text)"
    )
    temperature: float = Field(20.0, gt=0, description="τ of teacher and student, with the factor τ² (paper: 20)")
    teacher: Literal["mean_logits", "mean_probs", "class_weighted"] = Field(
        "mean_logits", description="how the clients are combined into one teacher (papers: mean_logits)"
    )
    adaptation: Literal["batch", "ema", "none"] = Field(
        "batch", description="noise-adapted teachers: batch (authors' code), ema (the equation as written), or none"
    )
    momentum_adaptation: float = Field(0.9, ge=0, lt=1, description="β (FedISCA: α) of the ema adaptation (paper: 0.9)")
    momentum: float = Field(0.9, ge=0, lt=1, description="of the student's SGD (authors' code: 0.9)")
    weight_decay: float = Field(5e-4, ge=0, description="of the student's SGD (authors' code: 5e-4)")
    teachers_at_once: int | None = Field(
        None, ge=1, description="clients in memory at once during synthesis; none: as many as fit (ours, for large N)"
    )

    @property
    def distillation_steps(self) -> int:
        """How many batches a student learns from."""
        return self.steps

    @property
    def synthesis_steps(self) -> int:
        """Steps of all syntheses together: one for each batch."""
        return self.distillation_steps

    def inversion(self, image_size: int) -> InversionSettings:
        """The settings of the synthesis at this image size."""
        jitter = self.jitter if self.jitter is not None else (30 if image_size > 128 else 2)
        return steps.inversion.InversionSettings(
            steps=self.steps,
            batch=self.batch,
            lr=self.lr_synthesis,
            alpha_tv=self.alpha_tv,
            alpha_bn=self.alpha_bn,
            jitter=min(jitter, image_size - 1),
            bn_reduction=self.bn_reduction,
            ce=self.ce,
        )

    def load_teacher(self, method: str, uploads: Sequence[Upload], ctx: Context) -> Teacher:
        """All clients as one frozen teacher; damaged uploads are refused here."""
        import torch

        names, architectures = [upload.client for upload in uploads], [upload.task.model for upload in uploads]
        ensemble = steps.teachers.load_teachers(
            names,
            architectures,
            [upload.tensors for upload in uploads],
            ctx.architecture[1:],
            ctx.device,
            ctx.precision,
            ctx.fast,
            self.bn_distance,
        )
        steps.teachers.need_batchnorm(ensemble, names, method)
        ensemble.at_once = self.teachers_at_once or steps.inversion.clients_that_fit(
            architectures, ctx.architecture[1:], self.batch, ctx.device
        )
        asked = self.distillation_steps
        ensemble.expect(architectures, {"match": self.synthesis_steps, "batch": asked, "stored": asked})
        weights = None
        if self.teacher == "class_weighted":
            counts = torch.tensor([list(upload.class_counts or ()) for upload in uploads], dtype=torch.float64)
            weights = steps.distill.class_weights(counts).float().to(ctx.device)
        return steps.trajectory.Teacher(
            ensemble, self.temperature, self.teacher, weights, self.adaptation, self.momentum_adaptation
        )

    def learn(self, student: Student, sample: Sample, lr: float, track: bool = True) -> Tensor:
        """One SGD step on one batch: Eq. 3 of FedISCA, Eq. 5 of FedBiCross. ``track``: it moves running statistics."""
        fast = engine.fast

        def step(*tensors: Tensor) -> list[Tensor]:
            images, original, adapted, lam, rate = tensors
            given = sample._replace(images=images, original=original, adapted=adapted, lam=lam)
            loss, gradients = student.gradient(images, partial(self.loss, sample=given), track)
            student.update(gradients, rate, self.momentum, self.weight_decay)
            return [loss]

        numbers = [fast.scalar(sample.lam, student.device), fast.scalar(lr, student.device)]
        inputs = (sample.images, sample.original, sample.adapted, *numbers)
        return fast.recorded(student.captured, f"learn {track}", step, student.in_place, student.fast)(*inputs)[0]

    def loss(self, logits: Tensor, sample: Sample) -> Tensor:
        """λ KL(adapted ‖ student) + (1-λ) KL(original ‖ student), with τ²."""
        return steps.distill.mixed_kd_loss(logits, sample.original, sample.adapted, sample.lam, self.temperature)


SynthesisT = TypeVar("SynthesisT", bound=SynthesisConfig)


class SynthesisMethod(Method[SynthesisT]):
    """A method whose server inverts the uploaded networks."""

    @property
    def needs(self) -> frozenset[str]:
        """Weights with batch-normalisation statistics, and class counts where the teacher needs them."""
        return frozenset({"weights", "bn_stats", *(["class_counts"] if self._weighted else [])})

    @property
    def leaves(self) -> str:
        """What leaves the hospital, in words."""
        counts = " and the number of training images per class" if self._weighted else ""
        return (
            f"The trained network with its batch-normalisation statistics{counts}; the server inverts it into images."
        )

    @property
    def refuses_mixed_models(self) -> str:
        """Nothing: clients teach by their answers, whatever their architecture."""
        return ""

    @property
    def _weighted(self) -> bool:
        return self.config.teacher == "class_weighted"

    def upload(self, client: Client, ctx: Context, previous: Reply | None = None) -> Upload:
        """What leaves the hospital: the network, and class counts only where the teacher needs them."""
        counts = client.class_counts(len(ctx.task.classes)) if self._weighted else None
        return Upload(client.name, ctx.task_of(client), ctx.local_model(client).state, class_counts=counts)


class GlobalStudentMethod(SynthesisMethod[SynthesisT]):
    """Such a method that ends with one student for everyone."""

    personal = False

    def personalize(self, client: Client, reply: Reply, ctx: Context) -> Predictor:
        """The global student as it is."""
        return Predictor(ctx.task, (str(reply.info["architecture"]),), (dict(reply.tensors),))


def rate(schedule: str, progress: float) -> float:
    """Learning-rate multiplier at ``progress`` from 0 to 1."""
    if schedule == "step":
        return steps.distill.multi_step(progress)
    return steps.distill.cosine(progress) if schedule == "cosine" else 1.0


def new_student(ctx: Context, number: int, passes: int) -> Student:
    """A freshly initialised student; number k is that of cluster k. ``passes`` is what all students make together."""
    model = ctx.new_model(ctx.torch_rng("student", str(number)))
    return engine.student.Student(model, ctx.device, ctx.precision, ctx.fast, passes)


def image_shape(ctx: Context) -> tuple[int, int, int]:
    """(channels, height, width)."""
    return ctx.task.channels, ctx.task.image_size, ctx.task.image_size


def synthesis_flops(
    ctx: Context, clients: Sequence[str], batch: int, synthesis_steps: int, distil_steps: int, students: int = 1
) -> int:
    """Forward passes counted, times the cost of each: synthesis 2 a client, both teachers 2 a client, a student 3.

    ``clients`` are their architectures.
    """
    from fedbicross import models

    shape = ctx.architecture[1:]
    everyone = sum(models.forward_flops(name, *shape) for name in clients)
    student = models.forward_flops(*ctx.architecture)
    return batch * (2 * everyone * synthesis_steps + (2 * everyone + 3 * student * students) * distil_steps)


class Watch:
    """Progress, curves and pictures of one synthesis, and at its end what there is to say about it."""

    moment = "step"  # what a column of the strip is

    def __init__(self, title: str, ctx: Context, strip_steps: int, total: int) -> None:
        self.title, self.ctx, self.total = title, ctx, total
        self.curves = steps.diagnosis.Curves(total)
        self.strip = steps.diagnosis.Strip(strip_steps, len(ctx.task.classes))
        self.step = 0

    def add(self, sample: Sample, **losses: Tensor) -> None:
        """After each step."""
        self.step += 1
        if sample.loss is not None:
            losses |= {"synthesis": sample.loss.total, "cross-entropy": sample.loss.cross_entropy}
            losses |= {"batch norm": sample.loss.batch_norm}
        self.curves.add(self.step, **losses)
        self.strip.add(sample)

    def finish(self, teacher: Teacher, sample: Sample, labels: Tensor, student: Student) -> float:
        """Numbers, curves, the strip of pictures, and warnings in words; the student's agreement with its teacher."""
        if not student.finite:
            hint = "lower the student's lr, or lr_synthesis"
            raise MethodError("diverged", f"{self.title}: the student's weights are no longer finite; {hint}")
        record = self.ctx.record
        diagnosis = steps.diagnosis
        diagnosis.describe_synthesis(record, self.title, teacher, sample.images, labels, self.ctx.task.classes)
        answers = student.eval_logits(sample.images)
        agreement = diagnosis.describe_student(record, self.title, answers, sample.original)
        names = [name for name in ("synthesis", "cross-entropy", "batch norm") if name in self.curves.values]
        if names:
            record.add("curves", f"{self.title}: synthesis loss", self.curves.plot(names, "loss"))
        losses = [name for name in self.curves.values if name not in names]
        record.add("curves", f"{self.title}: distillation loss", self.curves.plot(losses, "loss"))
        self.picture()
        return agreement

    def picture(self) -> None:
        """The strip from noise to finished images, a row per class, as a PNG beside the run."""
        if not self.strip.frames:
            return
        from fedbicross.engine.images import grid_png

        path = f"diagnosis/{self.ctx.scope}/{file_name(self.title.replace(' ', '-'))}.png"
        self.ctx.store.save(path, grid_png(self.strip.grid()))
        entry = {
            "rows": list(self.ctx.task.classes),
            "columns": [f"{self.moment} {t}" for t in self.strip.taken],
            "images": path,
        }
        self.ctx.record.add("image_strips", f"{self.title}: synthetic images", entry)

    def tensors(self) -> dict[str, Tensor]:
        """State for a checkpoint."""
        import torch

        return {**self.curves.tensors(), **self.strip.tensors(), "step": torch.tensor(self.step)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self.curves.load(tensors)
        self.strip.load(tensors)
        self.step = int(tensors["step"])
