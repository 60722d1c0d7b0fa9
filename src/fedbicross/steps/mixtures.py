"""Class-conditional Gaussian mixtures of feature vectors: what FedPFT's clients send, its G(K).

A mixture is kept as (weights, means, scales) with Σ = scale·scaleᵀ: standard deviations ("diag", "spherical") or the
lower triangle of the Cholesky factor ("full"). So a covariance rounded for travel is still one, and sampling is one
line: x = μ + scale·z.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal, assert_never

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture
from torch import Tensor

Covariance = Literal["diag", "spherical", "full"]


@dataclass(frozen=True)
class FeatureMixture:
    """Components of one class, or of several one after the other."""

    weights: Tensor  # [K], of each class a sum of 1
    means: Tensor  # [K,D]
    scales: Tensor  # [K,D], [K] or [K,D(D+1)/2]

    def __len__(self) -> int:
        return len(self.weights)


def scale_shape(covariance: Covariance, components: int, width: int) -> tuple[int, ...]:
    """The shape of ``FeatureMixture.scales``."""
    if covariance == "diag":
        return components, width
    if covariance == "spherical":
        return (components,)
    if covariance == "full":
        return components, width * (width + 1) // 2
    assert_never(covariance)


def component_count(samples: int, distinct: int, components: int, per_component: int) -> int:
    """K, or as many components as the samples carry: at least ``per_component`` each, never more than distinct ones."""
    return max(1, min(components, samples // per_component, distinct))


def fit_mixture(
    features: np.ndarray,
    components: int,
    covariance: Covariance,
    *,
    floor: float,
    per_component: int,
    smallest_group: int,
    tolerance: float,
    iterations: int,
    seed: int,
) -> FeatureMixture:
    """EM (scikit-learn, float64) on features [n,D] of one class.

    ``floor`` is added to every variance. A component that came to rest on fewer than ``smallest_group`` samples would
    publish their mean, in the extreme one patient's feature: then the fit is made again with fewer components.
    """
    x = np.ascontiguousarray(features, dtype=np.float64)
    count = component_count(len(x), len(np.unique(x, axis=0)), components, per_component)
    while True:
        if count == 1:  # EM has nothing to decide, and scikit-learn refuses a single sample
            return _single(x, covariance, floor)
        model = GaussianMixture(
            count, covariance_type=covariance, tol=tolerance, max_iter=iterations, reg_covar=floor, random_state=seed
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a cap on the iterations is a setting, no fault
            model.fit(x)
        held = int((model.weights_ * len(x) >= smallest_group - 1e-6).sum())
        if held == count:
            break
        count = max(1, held)
    weights = torch.from_numpy(model.weights_ / model.weights_.sum())
    return FeatureMixture(weights, torch.from_numpy(model.means_), _scales(model.covariances_, covariance))


def _single(x: np.ndarray, covariance: Covariance, floor: float) -> FeatureMixture:
    """One Gaussian by moments: the maximum-likelihood covariance (1/n) plus the floor."""
    centred = x - x.mean(0)
    found: np.ndarray
    if covariance == "full":
        found = (centred.T @ centred / len(x) + floor * np.eye(x.shape[1]))[None]
    else:
        found = np.square(centred).mean(0)[None] + floor
        found = found.mean(1) if covariance == "spherical" else found
    means = torch.from_numpy(x.mean(0)[None])
    return FeatureMixture(torch.ones(1, dtype=torch.float64), means, _scales(found, covariance))


def from_sums(
    count: float, total: Tensor, squares: Tensor, covariance: Literal["diag", "spherical"], floor: float
) -> FeatureMixture:
    """One Gaussian from Σ 1, Σ f [D] and Σ f² [D] (spherical: Σ ‖f‖² [1]), all of which may be noisy, in float64."""
    mean = total.double() / count
    if covariance == "diag":
        variance = squares.double() / count - mean.square()
    else:
        variance = (squares.double() / count - mean.square().sum()) / len(mean)
    scales = (variance.clamp_min(0) + floor).sqrt()
    return FeatureMixture(
        torch.ones(1, dtype=torch.float64), mean[None], scales[None] if covariance == "diag" else scales
    )


def _scales(covariances: np.ndarray, covariance: Covariance) -> Tensor:
    if covariance != "full":
        return torch.from_numpy(np.sqrt(covariances))
    width = covariances.shape[-1]
    lower: Tensor = torch.linalg.cholesky(torch.from_numpy(covariances))
    rows, columns = torch.tril_indices(width, width)
    return lower[:, rows, columns]


def _triangles(packed: Tensor, width: int) -> Tensor:
    rows, columns = torch.tril_indices(width, width, device=packed.device)
    lower = packed.new_zeros(len(packed), width, width)
    lower[:, rows, columns] = packed
    return lower


def sample(mixture: FeatureMixture, covariance: Covariance, count: int, generator: torch.Generator) -> Tensor:
    """``count`` features [count,D] from the mixture of one class: components by weight, then x = μ + scale·z."""
    device = generator.device
    weights, means = mixture.weights.double().to(device), mixture.means.float().to(device)
    if not count:
        return means.new_zeros(0, means.shape[1])
    chosen = torch.multinomial(weights, count, replacement=True, generator=generator).sort().values
    z = torch.randn(count, means.shape[1], generator=generator, device=device)
    scales = mixture.scales.float().to(device)
    if covariance == "full":
        parts = torch.split(z, torch.bincount(chosen, minlength=len(weights)).tolist())
        # One component's factor at a time: all of them at once would be count × D × D numbers.
        z = torch.cat([part @ _triangles(s[None], z.shape[1])[0].T for part, s in zip(parts, scales, strict=True)])
    else:
        z = z * (scales[chosen] if covariance == "diag" else scales[chosen, None])
    return means[chosen] + z


def sampling_flops(covariance: Covariance, width: int) -> int:
    """Operations for one feature: a product and a sum per number, or a triangular product and a sum."""
    return 2 * width if covariance != "full" else width * (width + 1) + width
