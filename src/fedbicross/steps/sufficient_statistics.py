"""FedCGS: sums over feature vectors that add up over clients, and the Gaussian classifier that they determine.

Everything is in float64 and additive, so how images are dealt out to clients cannot matter beyond rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, assert_never

import torch
from torch import Tensor

from fedbicross.errors import MethodError

ABSENT = -1e30  # logit of a class that nobody has: finite, so that it can be stored and checked; its softmax is 0


@dataclass(frozen=True)
class Statistics:
    """Counts n_c [C], sums Σf by class [C,D] (whose total is the paper's A), and B = Σ f fᵀ [D,D], all float64."""

    counts: Tensor
    class_sums: Tensor
    gram: Tensor


class GaussianHead(NamedTuple):
    """Logits x·weightᵀ + bias, float64."""

    weight: Tensor  # [C,D]
    bias: Tensor  # [C]


def statistics(features: Tensor, labels: Tensor, classes: int) -> Statistics:
    """The sums of one client from features [n,D] and labels [n]."""
    x = features.double()
    one_hot = torch.nn.functional.one_hot(labels.long(), classes).double()
    return Statistics(one_hot.sum(0), one_hot.T @ x, x.T @ x)


def add(parts: Sequence[Statistics]) -> Statistics:
    """Sums over clients."""
    return Statistics(
        torch.stack([part.counts for part in parts]).sum(0),
        torch.stack([part.class_sums for part in parts]).sum(0),
        torch.stack([part.gram for part in parts]).sum(0),
    )


def pack_triangle(matrix: Tensor) -> Tensor:
    """The lower triangle of a symmetric matrix [D,D] as a vector [D(D+1)/2]."""
    rows, columns = torch.tril_indices(*matrix.shape, device=matrix.device)
    return matrix[rows, columns]


def unpack_triangle(packed: Tensor, width: int) -> Tensor:
    """The inverse of ``pack_triangle``."""
    rows, columns = torch.tril_indices(width, width, device=packed.device)
    matrix = packed.new_zeros(width, width)
    matrix[rows, columns] = packed
    matrix[columns, rows] = packed
    return matrix


def scatter_within(given: Statistics) -> Tensor:
    """Σ_c Σ_x (x−μ_c)(x−μ_c)ᵀ [D,D]: of any images at all it has no negative eigenvalue."""
    present = given.counts > 0
    sums, counts = given.class_sums[present], given.counts[present]
    return given.gram - (sums / counts[:, None]).T @ sums


def covariance(given: Statistics, kind: Literal["total", "within"]) -> Tensor:
    """Σ [D,D]: about the mean of everything, divisor N−1 (the paper), or about the class means, divisor N−C."""
    n = given.counts.sum()
    if kind == "total":
        total = given.class_sums.sum(0)  # A
        mean = total / n
        # (B − μAᵀ − Aμᵀ + Nμμᵀ)/(N−1); as A = Nμ the last three terms are one.
        scatter, divisor = given.gram - torch.outer(mean, total), n - 1
    elif kind == "within":
        scatter, divisor = scatter_within(given), n - (given.counts > 0).sum()
    else:
        assert_never(kind)
    return scatter / divisor.clamp_min(1)


def gaussian_head(
    given: Statistics,
    *,
    kind: Literal["total", "within"],
    ridge: float,
    prior: Literal["counts", "uniform"],
) -> GaussianHead:
    """w_c = Σ⁻¹m_c, b_c = −½ m_cᵀΣ⁻¹m_c + log π_c, with Σ + ridge·(tr Σ/D)·I in place of Σ.

    Means are taken about the overall mean, which changes no posterior probability (the distance (x−m)ᵀΣ⁻¹(x−m) does
    not see a common shift) and keeps the numbers small. A class that nobody has gets weight 0 and probability 0.
    """
    present = given.counts > 0
    n = given.counts.sum()
    centre = given.class_sums.sum(0) / n
    means = given.class_sums / given.counts.clamp_min(1)[:, None] - centre
    sigma = covariance(given, kind)
    width = len(sigma)
    spread = sigma.diagonal().mean()
    # Identical features everywhere: no direction tells anything, and any positive ridge gives the prior.
    jitter = ridge * spread if float(spread) > 0 else torch.ones_like(spread)
    factor, failed = torch.linalg.cholesky_ex(sigma + jitter * torch.eye(width, dtype=sigma.dtype, device=sigma.device))
    if bool(failed):
        few = f"{int(n)} images and {width} features"
        raise MethodError("singular", f"the covariance cannot be inverted ({few}); set a larger ridge")
    weight = torch.cholesky_solve(means.T, factor).T
    if not bool(torch.isfinite(weight).all()):
        raise MethodError("overflow", "the added-up statistics are too large to compute with; is an encoder broken?")
    share = given.counts / n if prior == "counts" else present.double() / present.sum()
    bias = -0.5 * (means * weight).sum(1) - weight @ centre + share.clamp_min(1e-300).log()
    weight = torch.where(present[:, None], weight, 0)
    return GaussianHead(weight, torch.where(present, bias, ABSENT))
