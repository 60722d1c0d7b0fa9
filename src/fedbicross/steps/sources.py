"""What FedISCA's ablations are trained on instead of a whole trajectory. Same shape: an iterable of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

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
            original, adapted, lam = self.teacher.speak(images, noise_level(self.done, self.steps))
            yield Sample(self.done, images, original, adapted, lam, None)


class FinishedOnly:
    """Ablation w/o N (DeepInversion): only finished batches, of this and all earlier epochs, in random order."""

    def __init__(
        self,
        trajectory: Trajectory,
        pool: list[Tensor],
        order_of: Callable[[int], list[int]],
        done: int = 0,
    ) -> None:
        self.trajectory, self.pool, self.order_of, self.done = trajectory, pool, order_of, done

    def tensors(self) -> dict[str, Tensor]:
        """State for a checkpoint: the pool, and how many of its draws are done."""
        pool = {f"pool/{index}": batch for index, batch in enumerate(self.pool)}
        return {**self.trajectory.tensors(), **pool, "drawn": torch.tensor(self.done)}

    @staticmethod
    def pool_of(tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """The pool of a checkpoint."""
        count = sum(name.startswith("pool/") for name in tensors)
        return [tensors[f"pool/{index}"] for index in range(count)]

    def __iter__(self) -> Iterator[Sample]:
        steps = self.trajectory.settings.steps
        if not self.done:
            while self.trajectory.inversion.t < steps:
                self.trajectory.inversion.step()
            self.pool.append(self.trajectory.inversion.images.clone())  # a checkpoint holds both, and no tensor twice
        for index in self.order_of(len(self.pool))[self.done :]:
            self.done += 1
            original = self.trajectory.teacher.original(self.pool[index])
            yield Sample(self.done, self.pool[index], original, original, 0.0, None)
