"""Stage 2 of FedBiCross: cluster models step on all clusters' images (Eq. 7), cross-cluster weights follow (Eq. 8)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from fedbicross.engine.fast import recorded, scalar, side_by_side
from fedbicross.engine.student import Student
from fedbicross.steps.bilevel import hypergradient, weight_step, weighted_gradient
from fedbicross.steps.trajectory import Sample


class CrossCluster:
    """All K students and their weights w [K,K], both changed in place, one t after another."""

    def __init__(
        self,
        students: Sequence[Student],
        weights: Tensor,
        loss: Callable[..., Tensor],  # (logits, sample) -> L_KD of Eq. 5
        train: Tensor,  # I_train
        validation: Tensor | None,  # I_val; none: the weights stay as they are
        *,
        momentum: float,
        weight_decay: float,
        lr_weights: float,
        weight_step: Literal["projected", "mirror"],
        unit_hypergradient: bool,
        own_only: bool,  # weights of other clusters are 0 and stay so: their gradients are not made
    ) -> None:
        self.students, self.weights, self.loss = students, weights, loss
        self.train, self.validation, self.own_only = train, validation, own_only
        self.momentum, self.weight_decay = momentum, weight_decay
        self.lr_weights, self.weight_step, self.unit_hypergradient = lr_weights, weight_step, unit_hypergradient
        in_place = [weights, *(value for student in students for value in student.in_place)]
        self._in_place, self._kept = in_place, dict[str, Any]()

    def step(self, samples: Sequence[Sample], lr: float) -> list[Tensor]:
        """Eqs. 7 and 8 for every cluster on all clusters' samples of one t; returns the students' losses."""
        device = self.students[0].device
        inputs = [value for sample in samples for value in (sample.images, sample.original, sample.adapted)]
        numbers = [scalar(samples[0].lam, device), scalar(lr, device)]
        run = recorded(self._kept, "step", self._all, self._in_place, self.students[0].fast)
        return list(run(*inputs, *numbers))

    def _all(self, *tensors: Tensor) -> list[Tensor]:
        *labelled, lam, lr = tensors
        triples = zip(labelled[::3], labelled[1::3], labelled[2::3], strict=True)
        samples = [Sample(0, images, original, adapted, lam, None) for images, original, adapted in triples]

        def advance(k: int) -> Tensor:
            loss, gradient = self.inner(k, self.students[k], samples, lr)
            if gradient is not None:
                self.weights[k] = self.outer(self.weights[k], gradient)
            return loss

        device = self.students[0].device if self.students[0].fast else "cpu"
        return side_by_side([partial(advance, k) for k in range(len(self.students))], device)

    def inner(self, k: int, student: Student, samples: Sequence[Sample], lr: Tensor) -> tuple[Tensor, Tensor | None]:
        """Eq. 7: one step of G_k on the weighted mixture; then, where w is learned, the gradient of Eq. 8."""
        losses, gradients = [], []
        for j, sample in enumerate(samples):
            if self.own_only and j != k:
                continue
            part = take_rows(sample, self.train)
            # Only the own cluster's batch moves G_k's running statistics: they describe the data it is meant for.
            loss, gradient = student.gradient(part.images, partial(self.loss, sample=part), track=j == k)
            losses.append(loss)
            gradients.append(gradient)
        weights = self.weights[k, k : k + 1] if self.own_only else self.weights[k]
        stacked = [torch.stack(parts) for parts in zip(*gradients, strict=True)]
        student.update(weighted_gradient(weights, stacked), lr, self.momentum, self.weight_decay)
        mixed = (weights * torch.stack(losses)).sum()
        if self.validation is None:
            return mixed, None
        part = take_rows(samples[k], self.validation)
        _, gradient = student.gradient(part.images, partial(self.loss, sample=part), track=False)
        return mixed, hypergradient(gradient, stacked, 1.0)  # relative to η_G

    def outer(self, weights: Tensor, gradient: Tensor) -> Tensor:
        """Eq. 8: a step of w_k on the simplex."""
        if self.unit_hypergradient:
            gradient = gradient - gradient.mean()  # what all share moves nothing on the simplex
            gradient = gradient / gradient.abs().max().clamp_min(1e-12)
        return weight_step(weights, gradient, self.lr_weights, self.weight_step)


class WeightsOverTime:
    """w [K,K], changed in place elsewhere, and what it was at the beginning and at a hundred moments of T steps."""

    def __init__(self, now: Tensor, steps: int) -> None:
        self.now, self.steps, self.done = now, steps, 0
        self.at, self.past = [0], [now.clone()]

    def note(self) -> None:
        """After each step."""
        self.done += 1
        if self.done % max(1, self.steps // 100) == 0 or self.done == self.steps:
            self.at.append(self.done)
            self.past.append(self.now.clone())

    def tensors(self) -> dict[str, Tensor]:
        """State for a checkpoint."""
        numbers = {"done": torch.tensor(self.done), "at": torch.tensor(self.at)}
        return {"now": self.now, "past": torch.stack(self.past), **numbers}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self.now.copy_(tensors["now"])
        self.done, self.at, self.past = int(tensors["done"]), tensors["at"].tolist(), list(tensors["past"])


def split_rows(batch: int, classes: int, share: float) -> tuple[list[int], list[int]]:
    """The fixed split I_train, I_val of a batch whose labels run 0..C-1 again and again: ``share`` of each class.

    Row i is the (i // C)-th of its class; it is held out whenever the running total of ``share`` passes a whole number.
    """
    if share == 0:
        return list(range(batch)), []
    held = [i for i in range(batch) if int((i // classes + 1) * share + 1e-9) > int((i // classes) * share + 1e-9)]
    held = held or list(range(batch - min(classes, batch // 2), batch))  # a batch too small to spare one of each class
    chosen = set(held)
    return [i for i in range(batch) if i not in chosen], held


def take_rows(sample: Sample, rows: Tensor) -> Sample:
    """Some images of a sample, with their soft labels."""
    return sample._replace(
        images=sample.images.index_select(0, rows),
        original=sample.original.index_select(0, rows),
        adapted=sample.adapted.index_select(0, rows),
    )
