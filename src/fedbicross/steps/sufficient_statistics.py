"""FedCGS: sums over feature vectors that add up over clients, and the Gaussian classifier that they determine.

Everything is in float64 and additive, so how images are dealt out to clients cannot matter beyond rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, assert_never

import numpy as np
import torch
from torch import Tensor

from fedbicross.errors import MethodError

ABSENT = -1e30  # logit of a class that nobody has: finite, so that it can be stored and checked; its softmax is 0
NOISE_SHARE = 0.3  # of the noise's size that is added to λ: chosen on training images of chest X-rays (docs)
LEAST_WITHIN = 0.05  # variance of a score within classes, as a share of its whole: noise could leave less, or none
LEAST_VARIANCE = 1e-3  # of ridge scores about one-hot labels: logits stay within some thousands


@dataclass(frozen=True)
class Statistics:
    """Counts n_c [C], sums Σf by class [C,D] (whose total is the paper's A), and B = Σ f fᵀ [D,D], all float64."""

    counts: Tensor
    class_sums: Tensor
    gram: Tensor


class LinearHead(NamedTuple):
    """Logits x·weightᵀ + bias, float64."""

    weight: Tensor  # [C,D]
    bias: Tensor  # [C]


def shortened(features: Tensor, longest: float) -> Tensor:
    """Features [n,D] of which none has a norm over ``longest``; directions stay. In float64."""
    x = features.double()
    norms: Tensor = x.norm(dim=1, keepdim=True)
    return x * (longest / norms.clamp_min(longest))


def signs(width: int, inputs: int) -> Tensor:
    """A matrix [width, inputs] of ±1/√width that keeps lengths on average (Achlioptas 2003): everywhere the same."""
    drawn = np.random.default_rng(0).integers(0, 2, (width, inputs))  # no site's data, so that it costs no privacy
    return torch.from_numpy(2.0 * drawn - 1) / math.sqrt(width)


def statistics(features: Tensor, labels: Tensor, classes: int, weights: Tensor | None = None) -> Statistics:
    """The sums of one client from features [n,D] and labels [n]; ``weights`` [n] are what each image counts as."""
    x = features.double()
    one_hot = torch.nn.functional.one_hot(labels.long(), classes).double()
    if weights is None:
        return Statistics(one_hot.sum(0), one_hot.T @ x, x.T @ x)
    counted = weights.double()[:, None]
    return Statistics((counted * one_hot).sum(0), (counted * one_hot).T @ x, (counted * x).T @ x)


def add(parts: Sequence[Statistics]) -> Statistics:
    """Sums over clients."""
    return Statistics(
        torch.stack([part.counts for part in parts]).sum(0),
        torch.stack([part.class_sums for part in parts]).sum(0),
        torch.stack([part.gram for part in parts]).sum(0),
    )


def scaled(given: Statistics, counts: Tensor, share: float) -> Statistics:
    """Sums of so many images [C] with the same class means, and ``share`` of the scatter about them.

    Counts are whole, so that the share of a small class may be larger: scaled sums and products would then be those of
    no images at all.
    """
    factors = torch.where(given.counts > 0, counts / given.counts.clamp_min(1), share)
    means = given.class_sums / given.counts.clamp_min(1)[:, None]
    between = ((factors - share) * given.counts)[:, None] * means
    return Statistics(counts, factors[:, None] * given.class_sums, share * given.gram + between.T @ means)


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
) -> LinearHead:
    """w_c = Σ⁻¹m_c, b_c = −½ m_cᵀΣ⁻¹m_c + log π_c, with Σ + ridge·(tr Σ/D)·I in place of Σ.

    Means are taken about the overall mean, which changes no posterior probability (the distance (x−m)ᵀΣ⁻¹(x−m) does
    not see a common shift) and keeps the numbers small. A class that nobody has gets weight 0 and probability 0.
    """
    present = given.counts > 0
    n = given.counts.sum()
    centre = given.class_sums.sum(0) / n
    means = given.class_sums / given.counts.clamp_min(1)[:, None] - centre
    sigma = covariance(given, kind)
    spread = sigma.diagonal().mean()
    # Identical features everywhere: no direction tells anything, and any positive ridge gives the prior.
    jitter = ridge * spread if float(spread) > 0 else torch.ones_like(spread)
    weight = _solve(sigma, float(jitter), means.T, f"{int(n)} images").T
    share = given.counts / n if prior == "counts" else present.double() / present.sum()
    bias = -0.5 * (means * weight).sum(1) - weight @ centre + share.clamp_min(1e-300).log()
    weight = torch.where(present[:, None], weight, 0)
    return LinearHead(weight, torch.where(present, bias, ABSENT))


def ridge_head(given: Statistics, *, ridge: float) -> LinearHead:
    """Least squares of one-hot labels on features with a free intercept, W = (S + λI)⁻¹T, as logits.

    S = Σ (x−μ)(x−μ)ᵀ and T = Σ (x−μ)(y−ȳ)ᵀ follow from the sums; λ = ridge·tr S/D. Scores become logits by one factor,
    one over their mean squared error, as if they lay about the one-hot vectors with that variance; which class has the
    highest score stays.
    """
    present = given.counts > 0
    n = given.counts.sum()
    centre = given.class_sums.sum(0) / n
    scatter = given.gram - n * torch.outer(centre, centre)
    cross = given.class_sums - torch.outer(given.counts, centre)  # Tᵀ [C,D]
    spread = scatter.diagonal().mean()
    penalty = ridge * float(spread) if float(spread) > 0 else 1.0
    weight = _solve(scatter, penalty, cross.T, f"{int(n)} images").T
    bias = given.counts / n - weight @ centre
    labels = n - (given.counts**2).sum() / n  # Σ ‖y−ȳ‖²
    missed = labels - 2 * (weight * cross).sum() + ((weight @ scatter) * weight).sum()
    # No worse than the mean of all labels; noise or a perfect fit could make it 0 or less.
    variance = float((missed / (n * present.sum())).clamp(min=LEAST_VARIANCE, max=1.0))
    weight = torch.where(present[:, None], weight / variance, 0)
    return LinearHead(weight, torch.where(present, bias / variance, ABSENT))


def noisy_head(given: Statistics, *, ridge: float, noise: float) -> LinearHead:
    """The head from sums behind noise of the size ``noise`` in Σ f fᵀ (``noise_size``).

    Scores by ridge regression, with what noise has put below 0 taken out of S and λ raised by a share of the noise.
    Such a λ shrinks scores until the larger class wins everywhere, so that they are not used as they are: a Gaussian
    classifier on the C scores of an image, from their class means and their covariance within classes, puts them back
    to scale. Without noise and ridge it is linear discriminant analysis (Hastie et al., The Elements of Statistical
    Learning, 4.3 and 12.5).
    """
    present = given.counts > 0
    counts, n = given.counts[present], given.counts.sum()
    centre = given.class_sums[present].sum(0) / n
    values, vectors = torch.linalg.eigh(given.gram - n * torch.outer(centre, centre))
    values = values.clamp_min(0)
    cross = given.class_sums[present] - torch.outer(counts, centre)
    penalty = ridge * float(values.mean()) + NOISE_SHARE * noise
    scores = (cross @ vectors / (values + max(penalty, 1e-300))) @ vectors.T  # [C,D]
    means = (cross / counts[:, None]) @ scores.T  # class by class the mean scores, [C,C]
    turned = scores @ vectors
    total = (turned * values) @ turned.T / n
    spreads, axes = torch.linalg.eigh(total - (means.T * counts) @ means / n)
    within = (axes * spreads.clamp_min(LEAST_WITHIN * float(total.diagonal().mean()) + 1e-300)) @ axes.T
    inner = torch.linalg.solve(within, means.T).T
    weight = given.class_sums.new_zeros(given.class_sums.shape)
    bias = torch.full_like(given.counts, ABSENT)
    weight[present] = _finite(inner @ scores)
    bias[present] = -0.5 * (means * inner).sum(1) - inner @ scores @ centre + (counts / n).log()
    return LinearHead(weight, bias)


def noise_size(scale: float, width: int) -> float:
    """How far noise of σ = ``scale``, as in ``triangle_scales``, moves eigenvalues of [D,D], hardly ever more: σ√2D."""
    return math.sqrt(2 * width) * scale


def triangle_scales(width: int) -> Tensor:
    """The noise of each entry of a packed triangle as a share of σ, [D(D+1)/2]: 1 on the diagonal, 1/√2 elsewhere.

    With √2 on all others, the packed f fᵀ has the length ‖f‖², no more than without: half their noise power is saved.
    """
    rows, columns = torch.tril_indices(width, width)
    scales = torch.full((len(rows),), math.sqrt(0.5), dtype=torch.float64)
    scales[rows == columns] = 1.0
    return scales


def _solve(matrix: Tensor, penalty: float, right: Tensor, what: str) -> Tensor:
    """(matrix + penalty·I)⁻¹ right, by Cholesky's factors."""
    width = len(matrix)
    factor, failed = torch.linalg.cholesky_ex(
        matrix + penalty * torch.eye(width, dtype=matrix.dtype, device=matrix.device)
    )
    if bool(failed):
        few = f"{what} and {width} features"
        raise MethodError("singular", f"the covariance cannot be inverted ({few}); set a larger ridge")
    return _finite(torch.cholesky_solve(right, factor))


def _finite(found: Tensor) -> Tensor:
    if not bool(torch.isfinite(found).all()):
        raise MethodError("overflow", "the added-up statistics are too large to compute with; is an encoder broken?")
    return found
