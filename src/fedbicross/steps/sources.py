"""What FedISCA's ablations are trained on instead of a whole trajectory, and a memory of samples of earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from fedbicross.steps.distill import noise_level
from fedbicross.steps.trajectory import Sample, Teacher, Trajectory


class NoiseOnly:
    """Ablation w/o IS: a fresh N(0,1) batch at every step, with the noise levels of a trajectory."""

    def __init__(
        self,
        teacher: Teacher,
        shape: tuple[int, int, int, int],
        steps: int,
        generator_of: Callable[[int], torch.Generator],
        done: int = 0,
    ) -> None:
        self.teacher, self.shape, self.steps, self.generator_of, self.done = teacher, shape, steps, generator_of, done

    def tensors(self) -> dict[str, Tensor]:
        """State for a checkpoint: every step draws from a stream of its own, so the count is enough."""
        return {"done": torch.tensor(self.done)}

    def __iter__(self) -> Iterator[Sample]:
        while self.done < self.steps:
            self.done += 1
            generator = self.generator_of(self.done)
            images = torch.randn(self.shape, generator=generator, device=generator.device)
            original, adapted, lam = self.teacher.soft_labels(images, noise_level(self.done, self.steps))
            yield Sample(self.done, images, original, adapted, lam, None)


class Batches:
    """Finished batches of images, each kept once."""

    def __init__(self) -> None:
        self.images: list[Tensor] = []

    def add(self, images: Tensor) -> None:
        """Keep a copy: a checkpoint holds no tensor twice."""
        self.images.append(images.clone())

    def __len__(self) -> int:
        return len(self.images)

    def tensors(self) -> dict[str, Tensor]:
        """State for a checkpoint."""
        return {str(index): batch for index, batch in enumerate(self.images)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self.images = [tensors[str(index)] for index in range(len(tensors))]


class FinishedOnly:
    """Ablation w/o N (DeepInversion): only finished batches, of this and all earlier epochs, in random order."""

    def __init__(
        self,
        trajectory: Trajectory,
        pool: Batches,
        order_of: Callable[[int], list[int]],
        done: int = 0,
    ) -> None:
        self.trajectory, self.pool, self.order_of, self.done = trajectory, pool, order_of, done

    def tensors(self) -> dict[str, Tensor]:
        """State for a checkpoint, beside the pool: how many of its draws are done."""
        return {**self.trajectory.tensors(), "drawn": torch.tensor(self.done)}

    def __iter__(self) -> Iterator[Sample]:
        steps = self.trajectory.settings.steps
        if not self.done:
            while self.trajectory.inversion.t < steps:
                self.trajectory.inversion.step()
            self.pool.add(self.trajectory.inversion.images)
        for index in self.order_of(len(self.pool))[self.done :]:
            self.done += 1
            images = self.pool.images[index]
            original = self.trajectory.teacher.original(images)
            yield Sample(self.done, images, original, original, 0.0, None)


class SampleMemory:
    """Up to ``capacity`` samples of all that were seen, each as likely as any other (reservoir sampling).

    A student that learns from the newest trajectory alone forgets the earlier ones: its accuracy then hangs on the
    rounding of the last few steps.
    """

    def __init__(self, capacity: int, draws: int, rng_of: Callable[[int], np.random.Generator]) -> None:
        self.capacity, self.draws, self.rng_of = capacity, draws, rng_of  # a random stream for each sample that comes
        self.kept: list[Sample] = []
        self.seen = 0

    def replay_and_keep(self, sample: Sample) -> list[Sample]:
        """Earlier samples to learn from again, if there are any; the new one may then be kept."""
        if not self.capacity:
            return []
        rng = self.rng_of(self.seen)
        earlier = [self.kept[int(rng.integers(len(self.kept)))] for _ in range(self.draws if self.kept else 0)]
        if len(self.kept) < self.capacity:
            self.kept.append(sample._replace(loss=None))
        elif (place := int(rng.integers(self.seen + 1))) < self.capacity:
            self.kept[place] = sample._replace(loss=None)
        self.seen += 1
        return earlier

    def tensors(self) -> dict[str, Tensor]:
        """State for a checkpoint."""
        out = {"seen": torch.tensor(self.seen)}
        for index, sample in enumerate(self.kept):
            numbers = torch.tensor([float(sample.t), float(sample.lam)], dtype=torch.float64)
            parts = {
                "images": sample.images,
                "original": sample.original,
                "adapted": sample.adapted,
                "numbers": numbers,
            }
            out |= {f"{index}/{name}": value.clone() for name, value in parts.items()}  # no tensor twice in a file
        return out

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self.seen, self.kept = int(tensors["seen"]), []
        while f"{len(self.kept)}/images" in tensors:
            images, original, adapted, numbers = (
                tensors[f"{len(self.kept)}/{name}"] for name in ("images", "original", "adapted", "numbers")
            )
            self.kept.append(Sample(int(numbers[0]), images, original, adapted, float(numbers[1]), None))
