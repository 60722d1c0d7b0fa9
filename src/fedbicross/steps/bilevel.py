"""Stage 2 of FedBiCross, Eqs. 6–8: cluster models step on all clusters' images, cross-cluster weights w_k follow.

Why no second-order derivative is needed: the inner step (Eq. 7), with momentum m and weight decay d, is

    b' = m b + Σ_j w_j g_j + d θ,    θ' = θ − η_G b',

where g_j = ∇L_KD of cluster j at θ. None of b, θ, g_j depends on w, so ∂θ'/∂w_j = −η_G g_j and exactly

    ∂L_val(θ')/∂w_j = −η_G ⟨∇L_val(θ'), g_j⟩.

It scales with η_G: pass lr=1 where η_w is meant relative to it. Nesterov momentum would change the factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, assert_never

import torch
from torch import Tensor

from fedbicross.engine.fast import recorded, run_on_streams, scalar
from fedbicross.engine.student import Student
from fedbicross.steps.trajectory import Sample, sample_loss


class CrossCluster:
    """All K students and their weights w [K,K], both changed in place, one t after another."""

    def __init__(
        self,
        students: Sequence[Student],
        weights: Tensor,
        train: Tensor,  # I_train
        validation: Tensor | None,  # I_val; none: the weights stay as they are
        *,
        temperature: float,
        momentum: float,
        weight_decay: float,
        lr_weights: float,
        weight_step: Literal["projected", "mirror"],
        unit_hypergradient: bool,
        own_only: bool,  # weights of other clusters are 0 and stay so: their gradients are not made
    ) -> None:
        self.students, self.weights, self.temperature = students, weights, temperature
        self.train, self.validation, self.own_only = train, validation, own_only
        self.momentum, self.weight_decay = momentum, weight_decay
        self.lr_weights, self.weight_step, self.unit_hypergradient = lr_weights, weight_step, unit_hypergradient
        in_place = [weights, *(value for student in students for value in student.in_place)]
        self._in_place, self._kept = in_place, dict[str, Any]()

    def step(self, samples: Sequence[Sample], lr: float, held_out: Sequence[Sample] = ()) -> list[Tensor]:
        """Eqs. 7 and 8 for every cluster on all clusters' samples of one t; returns the students' losses.

        Validation rows are taken from the same samples, or from those of ``held_out`` where it gives one a cluster.
        """
        device = self.students[0].device
        every = (*samples, *held_out)
        inputs = [value for sample in every for value in (sample.images, sample.original, sample.adapted)]
        numbers = [scalar(samples[0].lam, device), scalar(lr, device)]
        run = recorded(self._kept, "step", self._all, self._in_place, self.students[0].fast)
        return list(run(*inputs, *numbers))

    def _all(self, *tensors: Tensor) -> list[Tensor]:
        *labelled, lam, lr = tensors
        triples = zip(labelled[::3], labelled[1::3], labelled[2::3], strict=True)
        every = [Sample(0, images, original, adapted, lam, None) for images, original, adapted in triples]
        count = len(self.students)
        samples, held_out = every[:count], every[-count:]  # the same where there is one batch

        def advance(k: int) -> Tensor:
            loss, gradients = self.inner(k, samples, lr)
            if self.validation is not None:
                self.outer(k, take_rows(held_out[k], self.validation), gradients)
            return loss

        device = self.students[0].device if self.students[0].fast else "cpu"
        return run_on_streams([partial(advance, k) for k in range(len(self.students))], device)

    def inner(self, k: int, samples: Sequence[Sample], lr: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Eq. 7: one step of G_k on the weighted mixture; its loss, and the g_j at the old G_k, stacked."""
        weights, losses, gradients = self.weights[k], [], []
        if self.own_only:
            weights = weights[k : k + 1]
        for j, sample in enumerate(samples):
            if self.own_only and j != k:
                continue
            # Only the own cluster's batch moves G_k's running statistics: they describe the data it is meant for.
            loss, gradient = self._gradient(k, take_rows(sample, self.train), track=j == k)
            losses.append(loss)
            gradients.append(gradient)
        stacked = [torch.stack(parts) for parts in zip(*gradients, strict=True)]
        self.students[k].update(weighted_gradient(weights, stacked), lr, self.momentum, self.weight_decay)
        return (weights * torch.stack(losses)).sum(), stacked

    def outer(self, k: int, held_out: Sample, gradients: Sequence[Tensor]) -> None:
        """Eq. 8: a step of w_k on the simplex, by what the updated G_k makes of its own held-out images."""
        _, gradient = self._gradient(k, held_out, track=False)
        slope = hypergradient(gradient, gradients, 1.0)  # relative to η_G
        if self.unit_hypergradient:
            slope = slope - slope.mean()  # what all share moves nothing on the simplex
            slope = slope / slope.abs().max().clamp_min(1e-12)
        self.weights[k] = weight_step(self.weights[k], slope, self.lr_weights, self.weight_step)

    def _gradient(self, k: int, sample: Sample, track: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        """L_KD of G_k on a sample (Eq. 5) and its gradient."""
        loss_of = partial(sample_loss, sample=sample, temperature=self.temperature)
        return self.students[k].gradient(sample.images, loss_of, track)


class WeightsOverTime:
    """w [K,K], which the steps change in place, and its values at the start and at a hundred of the T steps."""

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


def split_batch(batch: int, classes: int, share: float) -> tuple[list[int], list[int]]:
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


def weighted_gradient(weights: Tensor, source_gradients: Sequence[Tensor]) -> list[Tensor]:
    """Σ_j w_j g_j for each parameter (the gradient in Eq. 7); `source_gradients[p]` is [J, *shape of parameter p]."""
    return [torch.tensordot(weights.to(gradient.dtype), gradient, dims=1) for gradient in source_gradients]


def hypergradient(
    validation_gradient: Sequence[Tensor], source_gradients: Sequence[Tensor], lr: float | Tensor
) -> Tensor:
    """∂L_val(θ')/∂w [J] of Eq. 8 for one inner SGD step, exact with momentum and weight decay.

    `validation_gradient[p]` is ∇L_val at the updated θ', `source_gradients[p]` is [J, *shape], the g_j at the old θ.
    For all K students at once: ``torch.vmap(hypergradient, in_dims=(0, 0, None))``.
    """
    products = [
        _wide(source).flatten(1) @ _wide(validation).flatten()
        for validation, source in zip(validation_gradient, source_gradients, strict=True)
    ]
    return -lr * torch.stack(products).sum(0)


def project_to_simplex(v: Tensor) -> Tensor:
    """The nearest point (Euclidean) with non-negative entries and sum 1, for each row of the last axis.

    Sort-based: entries are lowered by one threshold and cut at 0; the threshold is the one of the largest support for
    which the smallest kept entry stays positive.
    """
    descending = v.sort(dim=-1, descending=True).values
    size = torch.arange(1, v.shape[-1] + 1, device=v.device, dtype=v.dtype)
    thresholds = (descending.cumsum(-1) - 1) / size
    support = (descending > thresholds).sum(-1, keepdim=True).clamp_min(1)
    return (v - thresholds.gather(-1, support - 1)).clamp_min(0)


def weight_step(
    weights: Tensor,
    gradient: Tensor,
    eta_w: float,
    kind: Literal["projected", "mirror"] = "projected",
) -> Tensor:
    """Eq. 8 for one row [J] or all rows [K,J], from the `hypergradient`.

    ``projected``: w − η_w ∇, then onto the simplex (as the paper says). ``mirror``: w · exp(−η_w ∇), renormalised; it
    never makes a weight exactly 0, and leaves a weight that is 0 at 0.
    """
    if kind == "projected":
        return project_to_simplex(weights - eta_w * gradient)
    if kind == "mirror":
        return torch.softmax(weights.log() - eta_w * gradient, dim=-1)
    assert_never(kind)


def cross_cluster_weights(
    kind: Literal["uniform", "intra", "similarity"],
    clusters: int,
    centroids: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Rows w_k [K,K] that are not learnt: the paper's ablations, and the start of the learnt ones (``uniform``).

    ``uniform``: 1/K. ``intra``: only the own cluster. ``similarity``: softmax over j of −d(k,j)/d̄, with d the Euclidean
    distance of the centroids [K,F] and d̄ its mean over pairs k ≠ j (the paper defines no similarity; this one has no
    scale to choose). Coinciding centroids give uniform rows.
    """
    if kind == "uniform":
        return torch.full((clusters, clusters), 1 / clusters, device=device)
    if kind == "intra":
        return torch.eye(clusters, device=device)
    if kind == "similarity":
        if centroids is None or len(centroids) != clusters:
            raise ValueError(f"similarity weights need one centroid for each of the {clusters} clusters")
        flat = _wide(centroids).flatten(1)
        # Not the matrix-product formula: its rounding turns coinciding centroids into small positive distances.
        distance = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")
        mean = distance.sum() / max(clusters * (clusters - 1), 1)
        return torch.softmax(-distance / mean.clamp_min(torch.finfo(flat.dtype).tiny), dim=-1).to(device)
    assert_never(kind)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
