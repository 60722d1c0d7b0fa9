"""Logs of a synthesis or a generator: loss curves and images on the way, a diagnosis and warnings at its end."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedbicross.context import Context
from fedbicross.engine.images import grid_png
from fedbicross.engine.student import Student
from fedbicross.errors import MethodError
from fedbicross.messages import file_name
from fedbicross.parts import diagnosis
from fedbicross.steps import adversarial
from fedbicross.steps.trajectory import Sample, Teacher


class SynthesisLog:
    """Curves and images of one synthesis, and a diagnosis at its end."""

    moment = "step"  # what a column of the strip is

    def __init__(self, title: str, ctx: Context, strip_steps: int, total: int) -> None:
        self.title, self.ctx, self.total = title, ctx, total
        self.curves = diagnosis.Curves(total)
        self.strip = diagnosis.Strip(strip_steps, len(ctx.task.classes))
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
        return {**self.curves.tensors(), **self.strip.tensors(), "step": torch.tensor(self.step)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self.curves.load(tensors)
        self.strip.load(tensors)
        self.step = int(tensors["step"])


class GeneratorLog(SynthesisLog):
    """Curves and images of a generator and its student, and a diagnosis at the end."""

    moment = "epoch"

    def __init__(self, ctx: Context, epochs: int, made: int, learned: int) -> None:
        super().__init__("student", ctx, epochs, learned)
        self.generator_curves, self.made = diagnosis.Curves(made), 0

    def generated(self, **losses: Tensor) -> None:
        """After a step of the generator."""
        self.made += 1
        self.generator_curves.add(self.made, **losses)

    def learned(self, loss: Tensor) -> None:
        """After a step of the student."""
        self.step += 1
        self.curves.add(self.step, distillation=loss)

    def show(self, epoch: int, images: Tensor, labels: Tensor) -> None:
        """One image per class at the end of an epoch; white where there is none."""
        if epoch not in self.strip.moments:
            return
        shown = first_of_each_class(images, labels, len(self.ctx.task.classes))
        self.strip.add(Sample(epoch, shown, labels, labels, 0.0, None))

    def describe(
        self, images: Tensor, labels: Tensor, logits: Tensor, student: Student, hints: Mapping[str, str]
    ) -> None:
        """Numbers, curves, the strip of pictures, and warnings in words; ``logits`` are the teacher's."""
        if not student.finite:
            hint = "lower the student's lr, or lr_generator"
            raise MethodError("diverged", f"{self.title}: the student's weights are no longer finite; {hint}")
        record, classes = self.ctx.record, self.ctx.task.classes
        soft = logits.softmax(-1)
        diagnosis.describe_images(record, self.title, logits, soft, images, labels, classes, hints)
        variety = adversarial.variety(images, labels, len(classes)).tolist()
        diagnosis.describe_variety(record, self.title, variety, classes, hints["variety"])
        diagnosis.describe_student(record, self.title, student.eval_logits(images), soft)
        names = list(self.generator_curves.values)
        record.add("curves", f"{self.title}: generator loss", self.generator_curves.plot(names, "loss"))
        record.add("curves", f"{self.title}: distillation loss", self.curves.plot(["distillation"], "loss"))
        self.picture()

    def tensors(self) -> dict[str, Tensor]:
        """State for a checkpoint."""
        curves = {f"generator/{name}": value for name, value in self.generator_curves.tensors().items()}
        return {**super().tensors(), **curves, "made": torch.tensor(self.made)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        super().load(tensors)
        prefix = "generator/"
        self.generator_curves.load({n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)})
        self.made = int(tensors["made"])


def first_of_each_class(images: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The first image of every class [C,...]; white for a class without one. Waits for no device."""
    member = labels == torch.arange(classes, device=labels.device)[:, None]
    shown = images.index_select(0, member.int().argmax(1))
    return torch.where(member.any(1).view(-1, 1, 1, 1), shown, torch.ones_like(shown))
