from __future__ import annotations

import math

import pytest
import torch

from fedbicross.evaluate import mmd


def sequences(n: int, shift: float = 0.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, 3, 4, generator=torch.Generator().manual_seed(seed)) + shift


def test_unbiased_estimate_against_a_double_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, sigma = sequences(7), sequences(5, 0.4, seed=1), 2.3

    def k(a: torch.Tensor, b: torch.Tensor) -> float:
        return math.exp(-float((a.double() - b.double()).square().sum()) / (2 * sigma**2))

    xx = sum(k(x[i], x[j]) for i in range(7) for j in range(7) if i != j) / (7 * 6)
    yy = sum(k(y[i], y[j]) for i in range(5) for j in range(5) if i != j) / (5 * 4)
    xy = sum(k(a, b) for a in x for b in y) / (7 * 5)
    assert math.isclose(mmd.mmd_squared(x, y, sigma), xx + yy - 2 * xy, abs_tol=1e-12)
    monkeypatch.setattr(mmd, "CHUNK", 2)  # a matrix in several parts
    assert math.isclose(mmd.mmd_squared(x, y, sigma), xx + yy - 2 * xy, abs_tol=1e-12)


def test_unbiased_means_zero_on_average_and_positive_for_a_shift() -> None:
    sigma = mmd.median_distance(sequences(200))
    same = [mmd.mmd_squared(sequences(40, seed=2 * i), sequences(40, seed=2 * i + 1), sigma) for i in range(60)]
    assert abs(sum(same) / 60) < 0.002
    assert min(same) < 0 < max(same)
    shifted = [mmd.mmd_squared(sequences(40), sequences(40, s, seed=1), sigma) for s in (0.2, 0.5, 1.0)]
    assert shifted[0] < shifted[1] < shifted[2]


def test_dependence_between_tokens_counts() -> None:
    def joined(seed: int) -> torch.Tensor:
        return sequences(400, seed=seed)[:, :1].expand(-1, 3, -1)  # all tokens follow the first

    sigma = mmd.median_distance(joined(0))
    loose = sequences(400, seed=1)  # each token alone has the same distribution
    assert mmd.mmd_squared(joined(0), loose, sigma) > 10 * abs(mmd.mmd_squared(joined(0), joined(2), sigma))


def test_median_distance_against_a_loop() -> None:
    x = sequences(6)
    pairs = sorted(float((x[i].double() - x[j].double()).norm()) for i in range(6) for j in range(i))
    assert math.isclose(mmd.median_distance(x), pairs[7], rel_tol=1e-12)  # 15 pairs
    assert mmd.median_distance(torch.ones(5, 2)) == 1.0
    assert mmd.median_distance(torch.ones(1, 2)) == 1.0


def test_classes_are_measured_apart() -> None:
    x, y = sequences(45), sequences(60, 0.5, seed=1)
    x_labels, y_labels = torch.tensor([0] * 30 + [1] * 10 + [2] * 5), torch.tensor([0] * 20 + [1] * 30 + [2] * 10)
    first = mmd.mmd_squared(x[:30], y[:20], 4.0)
    second = mmd.mmd_squared(x[30:40], y[20:50], 4.0)
    found = mmd.mmd_within_classes(x, x_labels, y, y_labels, 4.0)  # class 2 has too few real sequences
    assert math.isclose(found, (30 * first + 10 * second) / 40, rel_tol=1e-12)
    assert mmd.mmd_within_classes(x, x_labels, y[:3], torch.tensor([0, 1, 2]), 4.0) is None
    mixed_up = mmd.mmd_within_classes(
        torch.where(x_labels.view(-1, 1, 1) == 0, x, x + 3), x_labels, x + 3, x_labels, 4.0
    )
    assert mixed_up > 0.1


def test_too_little_to_measure() -> None:
    with pytest.raises(ValueError, match="at least two"):
        mmd.mmd_squared(sequences(1), sequences(5), 1.0)
    with pytest.raises(ValueError, match="positive"):
        mmd.mmd_squared(sequences(3), sequences(5), 0.0)
