"""One synthesis and its teachers: the stream of (images, soft labels, noise level) on which students are distilled.

With ``batch`` adaptation, the authors' code, nothing needs to be stored: each x(t) is made, labelled and handed on.
With ``ema`` (Eq. 3 as written) the adapted teacher exists only after the whole trajectory, which is therefore kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedbicross.engine.combine import Combination, combine_logits
from fedbicross.engine.ensemble import Ensemble, Statistics
from fedbicross.engine.fast import recorded
from fedbicross.engine.workers import OnWorker, Workers
from fedbicross.steps.adaptation import adapt, window
from fedbicross.steps.distill import mixed_kd_loss, noise_level
from fedbicross.steps.inversion import Inversion, InversionLoss, InversionSettings, balanced_labels

Adaptation = Literal["batch", "ema", "none"]


class Sample(NamedTuple):
    """x(t), what the original and the noise-adapted teacher say of it, and the noise level λ(t)."""

    t: int
    images: Tensor
    original: Tensor  # soft labels [B,C] of F
    adapted: Tensor  # soft labels [B,C] of F̃
    lam: float | Tensor
    loss: InversionLoss | None  # of the synthesis step that made x(t)


def sample_loss(logits: Tensor, sample: Sample, temperature: float) -> Tensor:
    """L_KD of Eq. 5: λ KL(adapted ‖ student) + (1-λ) KL(original ‖ student), with τ²."""
    return mixed_kd_loss(logits, sample.original, sample.adapted, sample.lam, temperature)


@dataclass(frozen=True)
class Teacher:
    """An ensemble of clients and how its soft labels are made: combination, temperature, adaptation."""

    ensemble: Ensemble
    temperature: float = 20.0
    combine: Combination = "mean_logits"
    class_weights: Tensor | None = None
    adaptation: Adaptation = "batch"
    momentum: float = 0.9

    @torch.no_grad()
    def original(self, x: Tensor) -> Tensor:
        """Soft labels of F."""
        return self._soft(self.ensemble.logits(x))

    @torch.no_grad()
    def adapted(self, x: Tensor, statistics: Statistics | None = None, batches: int = 1) -> Tensor:
        """Soft labels of F̃: by the given statistics, or by those of each of the batches that x holds."""
        if statistics is None:
            return self._soft(self.ensemble.batch_logits(x, batches))
        return self._soft(self.ensemble.adapted_logits(x, statistics))

    def both(self, x: Tensor, batches: int = 1) -> list[Tensor]:
        """Soft labels of F, and of F̃ by the statistics of each of the batches that x holds."""
        return [self.original(x), self.adapted(x, batches=batches)]

    def soft_labels(self, x: Tensor, lam: float, statistics: Statistics | None = None) -> tuple[Tensor, Tensor, float]:
        """Both soft labels and the noise level; a teacher whose weight is 0 is not computed."""
        if self.adaptation == "none" or lam <= 0:
            (original,) = self._ask("original", lambda x: [self.original(x)], x)
            return original, original, 0.0
        if statistics is not None:
            adapted = self.adapted(x, statistics)
            return (self.original(x) if lam < 1 else adapted), adapted, lam
        if lam < 1:
            original, adapted = self._ask("both", self.both, x)
            return original, adapted, lam
        (adapted,) = self._ask("adapted", lambda x: [self.adapted(x)], x)
        return adapted, adapted, lam

    def soft_labels_of_batches(
        self, batches: Sequence[Tensor], lams: Sequence[float]
    ) -> list[tuple[Tensor, Tensor, float]]:
        """`soft_labels` for several batches of one size; with ``fast`` one pass a teacher, which uses a GPU better."""
        if not self.ensemble.fast or self.adaptation != "batch" or len(batches) < 2:
            return [self.soft_labels(x, lam) for x, lam in zip(batches, lams, strict=True)]
        count = len(batches)
        answers = self._ask(f"both of {count}", partial(self.both, batches=count), torch.cat(list(batches)))
        originals, adapted = (answer.chunk(count) for answer in answers)
        return [
            (original, original, 0.0) if lam <= 0 else (original, other, lam)
            for original, other, lam in zip(originals, adapted, lams, strict=True)
        ]

    def on(self, device: str) -> Teacher:
        """A copy on this device."""
        weights = None if self.class_weights is None else self.class_weights.to(device)
        return replace(self, ensemble=self.ensemble.on(device), class_weights=weights)

    def _ask(self, which: str, function: Callable[[Tensor], list[Tensor]], x: Tensor) -> Sequence[Tensor]:
        key = f"{which} {self.combine} {self.temperature} {id(self.class_weights)} {tuple(x.shape)}"
        return recorded(self.ensemble.captured, key, function, [], self.ensemble.fast)(x)

    def _soft(self, logits: Tensor) -> Tensor:
        return combine_logits(logits, self.combine, self.temperature, self.class_weights)


class Trajectory:
    """x(1), …, x(T) of one batch with its soft labels, in order from noise to images."""

    def __init__(
        self,
        teacher: Teacher,
        settings: InversionSettings,
        inversion: Inversion,
        convention: Literal["paper", "released"] = "paper",
        done: int = 0,
    ) -> None:
        self.teacher, self.settings, self.convention = teacher, settings, convention
        self.inversion, self.done = inversion, done
        self._beginning = dict(inversion.tensors())

    @classmethod
    def start(
        cls,
        teacher: Teacher,
        settings: InversionSettings,
        image_shape: tuple[int, int, int],
        classes: int,
        generator: torch.Generator,
        convention: Literal["paper", "released"] = "paper",
    ) -> Trajectory:
        """A fresh batch of noise with balanced labels."""
        labels = balanced_labels(settings.batch, classes, generator.device)
        inversion = Inversion.start(teacher.ensemble, labels, image_shape, settings, generator)
        return cls(teacher, settings, inversion, convention)

    @property
    def labels(self) -> Tensor:
        """The class that each image is driven to."""
        return self.inversion.labels

    def tensors(self) -> dict[str, Tensor]:
        """State for a checkpoint between two samples."""
        inner = self._beginning if self.teacher.adaptation == "ema" else self.inversion.tensors()
        return {**inner, "done": torch.tensor(self.done)}

    @classmethod
    def from_tensors(
        cls,
        teacher: Teacher,
        settings: InversionSettings,
        tensors: Mapping[str, Tensor],
        convention: Literal["paper", "released"] = "paper",
    ) -> Trajectory:
        """Go on from what ``tensors`` gave; with ``ema``, or from a worker, it is made again to the same bytes."""
        inversion = Inversion(teacher.ensemble, settings, tensors)
        return cls(teacher, settings, inversion, convention, int(tensors["done"]))

    def on_worker(self, workers: Workers) -> OnWorker[Sample]:
        """The same samples, made by another process."""
        make = partial(Trajectory.from_tensors, settings=self.settings, convention=self.convention)
        return OnWorker(workers, self.teacher, make, self.tensors())

    def __iter__(self) -> Iterator[Sample]:
        return self._stored() if self.teacher.adaptation == "ema" else self._streamed()

    def _streamed(self) -> Iterator[Sample]:
        while self.done < self.settings.steps:
            while self.inversion.t < self.done:  # of a trajectory made by a worker only the start was kept
                self.inversion.step()
            loss = self.inversion.step()
            self.done += 1
            yield self._sample(self.done, self.inversion.images, loss, None)

    def _stored(self) -> Iterator[Sample]:
        images, losses = [], []
        for _ in range(self.settings.steps):
            losses.append(self.inversion.step())
            images.append(self.inversion.images)
        # Reverse order ends with the noise, so that only the first batches leave a trace (adaptation.window).
        trace = images[: window(self.teacher.momentum)] if self.teacher.momentum else images[:1]
        statistics = adapt(self.teacher.ensemble, reversed(trace), self.teacher.momentum)
        for t in range(self.done + 1, self.settings.steps + 1):
            self.done = t
            yield self._sample(t, images[t - 1], losses[t - 1], statistics)

    def _sample(self, t: int, images: Tensor, loss: InversionLoss, statistics: Statistics | None) -> Sample:
        lam = noise_level(t, self.settings.steps, self.convention)
        original, adapted, lam = self.teacher.soft_labels(images, lam, statistics)
        return Sample(t, images, original, adapted, lam, loss)
