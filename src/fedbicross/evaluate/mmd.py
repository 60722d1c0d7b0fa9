"""Maximum mean discrepancy: how far synthetic token sequences are from real ones (FALCON's Table 4).

A sequence of L tokens of D numbers is one point with L·D coordinates, so that the dependence between its tokens counts.
The paper names neither kernel nor bandwidth; here k(a,b) = exp(−‖a−b‖²/2σ²) with σ the median distance between real
sequences. σ does not look at the synthetic ones, so that several generators are measured with one ruler.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 2048  # rows of a kernel matrix held at once
MOST_FOR_MEDIAN = 2000
LEAST_OF_A_CLASS = 10


def flatten(sequences: Tensor) -> Tensor:
    """[n,L,D] or [n,D] to [n,L·D] in float64."""
    return sequences.reshape(len(sequences), -1).double()


def median_distance(sequences: Tensor) -> float:
    """σ: the median Euclidean distance of two different sequences (of the first 2,000); 1 where all are equal."""
    x = flatten(sequences[:MOST_FOR_MEDIAN])
    if len(x) < 2:
        return 1.0
    found = float(torch.nn.functional.pdist(x).median())
    return found if found > 0 else 1.0


def mmd_squared(real: Tensor, synthetic: Tensor, bandwidth: float) -> float:
    """The unbiased estimate of MMD² (Gretton et al. 2012, Eq. 3); around 0, at times below, for equal distributions.

    Σ_{i≠j} k(x_i,x_j)/(n(n−1)) + Σ_{i≠j} k(y_i,y_j)/(m(m−1)) − 2 Σ_{ij} k(x_i,y_j)/(nm)
    """
    x, y = flatten(real), flatten(synthetic)
    n, m = len(x), len(y)
    if n < 2 or m < 2:
        raise ValueError(f"MMD needs at least two sequences on each side, got {n} and {m}")
    if not bandwidth > 0:
        raise ValueError(f"the bandwidth must be positive, got {bandwidth}")
    within_x = (_kernel_sum(x, x, bandwidth) - n) / (n * (n - 1))  # k(x,x) = 1
    within_y = (_kernel_sum(y, y, bandwidth) - m) / (m * (m - 1))
    return within_x + within_y - 2 * _kernel_sum(x, y, bandwidth) / (n * m)


def _kernel_sum(x: Tensor, y: Tensor, bandwidth: float) -> float:
    total = 0.0
    for part in torch.split(x, CHUNK):
        # Products instead of differences: [n,m,L·D] would not fit. In float64 the cancellation is harmless.
        squared = part.square().sum(1)[:, None] + y.square().sum(1) - 2 * part @ y.T
        total += float(torch.exp(-squared.clamp_min(0) / (2 * bandwidth**2)).sum())
    return total


def mmd_within_classes(
    real: Tensor, real_labels: Tensor, synthetic: Tensor, synthetic_labels: Tensor, bandwidth: float
) -> float | None:
    """Mean of the classes' MMD², weighted by their real sequences: a generator must not mix up its classes.

    A class with fewer than ten sequences on either side is left out, since its estimate is nearly all noise; None where
    no class is left.
    """
    total, weight = 0.0, 0
    for c in sorted(set(real_labels.tolist()) & set(synthetic_labels.tolist())):
        ours, theirs = real[real_labels == c], synthetic[synthetic_labels == c]
        if min(len(ours), len(theirs)) >= LEAST_OF_A_CLASS:
            total += len(ours) * mmd_squared(ours, theirs, bandwidth)
            weight += len(ours)
    return total / weight if weight else None
