from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fedbicross.steps.mixtures import (
    Covariance,
    FeatureMixture,
    _triangles,
    component_count,
    fit_mixture,
    from_sums,
    sample,
    sampling_flops,
    scale_shape,
)

KINDS: tuple[Covariance, ...] = ("diag", "spherical", "full")


def covariance_matrices(mixture: FeatureMixture, covariance: str) -> Tensor:
    """Σ of every component, [K,D,D]."""
    width = mixture.means.shape[1]
    if covariance == "full":
        lower = _triangles(mixture.scales, width)
        return lower @ lower.transpose(1, 2)
    scales = mixture.scales if covariance == "diag" else mixture.scales[:, None].expand(-1, width)
    return torch.diag_embed(scales.square())


def fit(x: np.ndarray, components: int = 3, covariance: Covariance = "diag", **options: float) -> FeatureMixture:
    values = {"floor": 1e-6, "per_component": 5, "smallest_group": 2, "tolerance": 1e-6, "iterations": 500, "seed": 0}
    return fit_mixture(x, components, covariance, **{**values, **options})


def blobs(per_blob: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Three well separated Gaussians in four dimensions, sizes 1:2:3."""
    rng = np.random.default_rng(seed)
    centres = np.array([[0.0, 0, 0, 0], [8, 0, 0, 4], [0, 8, -8, 0]])
    spread = np.array([0.5, 1.0, 1.5, 0.8])
    parts = [rng.normal(c, spread, (per_blob * (i + 1), 4)) for i, c in enumerate(centres)]
    return np.concatenate(parts), centres


@pytest.mark.parametrize("kind", KINDS)
def test_known_mixture_is_recovered(kind: Covariance) -> None:
    x, centres = blobs(400)
    found = fit(x, 3, kind)
    order = np.argsort(found.weights.numpy())
    assert np.allclose(found.weights.numpy()[order], [1 / 6, 2 / 6, 3 / 6], atol=0.01)
    assert np.allclose(found.means.numpy()[order], centres, atol=0.15)
    assert found.scales.shape == scale_shape(kind, 3, 4)
    matrices = covariance_matrices(found, kind).numpy()
    expected = np.diag(np.square([0.5, 1.0, 1.5, 0.8]))
    if kind == "spherical":
        assert np.allclose(matrices, np.eye(4) * np.trace(expected) / 4, atol=0.12)
    else:
        assert np.allclose(matrices, expected, atol=0.3)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_have_the_moments_of_the_mixture(kind: Covariance) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(0, 1, (300, 3)) @ np.array([[1, 0.5, 0], [0, 1, 0.7], [0, 0, 1]]) + [3, -2, 0]
    mixture = fit(x, 2, kind)
    drawn = sample(mixture, kind, 60_000, torch.Generator().manual_seed(0)).double().numpy()
    weights, means = mixture.weights.numpy(), mixture.means.numpy()
    mean = weights @ means
    second = sum(
        w * (s + np.outer(m, m))
        for w, m, s in zip(weights, means, covariance_matrices(mixture, kind).numpy(), strict=True)
    )
    assert np.allclose(drawn.mean(0), mean, atol=0.03)
    assert np.allclose(np.cov(drawn.T), second - np.outer(mean, mean), atol=0.06)


@pytest.mark.parametrize("kind", KINDS)
def test_one_gaussian_is_the_mean_and_the_covariance(kind: Covariance) -> None:
    x, _ = blobs(20)
    mixture = fit(x, 1, kind, floor=0.01)
    expected = np.cov(x.T, bias=True) + 0.01 * np.eye(4)
    if kind == "diag":
        expected = np.diag(np.diag(expected))
    if kind == "spherical":
        expected = np.eye(4) * np.trace(expected) / 4
    assert np.allclose(mixture.means.numpy()[0], x.mean(0))
    assert np.allclose(covariance_matrices(mixture, kind).numpy()[0], expected)


@pytest.mark.parametrize(
    ("samples", "distinct", "components", "expected"),
    [(1, 1, 20, 1), (4, 4, 20, 1), (10, 10, 20, 2), (1000, 1000, 20, 20), (100, 3, 20, 3)],
)
def test_components_are_capped_by_what_there_is(samples: int, distinct: int, components: int, expected: int) -> None:
    assert component_count(samples, distinct, components, 5) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_one_sample_and_identical_samples_have_the_floor_as_variance(kind: Covariance) -> None:
    for x in (np.full((1, 3), 2.0), np.full((50, 3), 2.0)):
        mixture = fit(x, 20, kind, floor=0.04)
        assert len(mixture) == 1
        assert np.allclose(covariance_matrices(mixture, kind).numpy()[0], 0.04 * np.eye(3))
        drawn = sample(mixture, kind, 5, torch.Generator().manual_seed(0))
        assert bool(torch.isfinite(drawn).all())


def test_no_component_rests_on_a_single_sample() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(0, 1, (60, 2)), [[500.0, 500.0]]])  # an outlier that EM gives its own component
    alone = fit(x, 3, smallest_group=1)
    assert float((alone.means - torch.from_numpy(x[-1])).abs().sum(1).min()) < 1e-6  # the danger is real
    safe = fit(x, 3, smallest_group=2)
    assert float((safe.weights * len(x)).min()) >= 2 - 1e-6
    assert float((safe.means - torch.from_numpy(x[-1])).abs().sum(1).min()) > 1


def test_the_same_seed_gives_the_same_mixture_and_samples() -> None:
    x, _ = blobs(50)
    first, second = fit(x, 5), fit(x, 5)
    assert torch.equal(first.means, second.means)
    draws = [sample(m, "diag", 10, torch.Generator().manual_seed(3)) for m in (first, second)]
    assert torch.equal(*draws)
    assert sample(first, "diag", 0, torch.Generator()).shape == (0, 4)


def test_sampling_flops_count_products_and_sums() -> None:
    assert sampling_flops("diag", 10) == sampling_flops("spherical", 10) == 20
    assert sampling_flops("full", 3) == sum(2 * (i + 1) for i in range(3)) + 3


@pytest.mark.parametrize("covariance", ["diag", "spherical"])
def test_a_gaussian_from_sums_is_that_of_the_samples(covariance: str) -> None:
    x = np.random.default_rng(0).normal(2.0, [0.5, 1.0, 3.0], (50, 3))
    squares = np.square(x) if covariance == "diag" else np.square(x).sum(1, keepdims=True)
    given = (torch.from_numpy(x.sum(0)), torch.from_numpy(squares.sum(0)))
    found = from_sums(50, *given, covariance, 1e-6)
    variance = x.var(0) if covariance == "diag" else x.var(0).mean(keepdims=True)
    assert np.allclose(found.means[0].numpy(), x.mean(0))
    assert np.allclose(found.scales.numpy().ravel(), np.sqrt(variance + 1e-6))
    assert tuple(found.scales.shape) == scale_shape(covariance, 1, 3)
    noise = from_sums(50, given[0], -given[1], covariance, 1e-4)  # a variance below 0
    assert np.allclose(noise.scales.numpy(), 1e-2)
