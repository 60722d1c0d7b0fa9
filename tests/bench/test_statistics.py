"""Against slow, obvious versions."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedbicross.bench import statistics


def slow_wilcoxon(differences: list[float]) -> float:
    """All ways to give signs: how often is the smaller sum of ranks as small as the one seen?"""
    values = [value for value in differences if value]
    order = sorted(abs(value) for value in values)
    ranks = {i: order.index(abs(v)) + (order.count(abs(v)) + 1) / 2 for i, v in enumerate(values)}  # ties share a mean

    def smaller(signs: list[bool]) -> float:
        up = sum(ranks[i] for i, sign in enumerate(signs) if sign)
        return min(up, sum(ranks.values()) - up)

    seen = smaller([value > 0 for value in values])
    ways = [smaller(list(signs)) <= seen for signs in product((True, False), repeat=len(values))]
    return sum(ways) / len(ways)


def slow_holm(values: list[float]) -> list[float]:
    """By the definition: the largest of (m - j + 1) p_(j) over all j that come no later."""
    order = sorted(values)
    steps = [min(1.0, max((len(order) - j) * order[j] for j in range(place + 1))) for place in range(len(order))]
    return [steps[order.index(value)] for value in values]


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=9, unique_by=abs))
def test_wilcoxon_counts_all_signs(values: list[int]) -> None:
    expected = slow_wilcoxon([float(value) for value in values]) if any(values) else 1.0
    assert statistics.wilcoxon([float(value) for value in values]) == pytest.approx(expected)


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=9))
def test_wilcoxon_is_exact_with_ties(values: list[int]) -> None:
    expected = slow_wilcoxon([float(value) for value in values]) if any(values) else 1.0
    assert statistics.wilcoxon([float(value) for value in values]) == pytest.approx(expected)


def test_wilcoxon_by_the_normal_approximation() -> None:
    values = [float(value) for value in np.random.default_rng(0).normal(0.2, 1, statistics.EXACT + 1)]
    exact = stats.wilcoxon(values, method="exact").pvalue
    assert statistics.wilcoxon(values) != exact and statistics.wilcoxon(values) == pytest.approx(exact, rel=0.05)
    assert statistics.wilcoxon(values[:-1]) == pytest.approx(stats.wilcoxon(values[:-1], method="exact").pvalue)


def test_wilcoxon_without_a_difference() -> None:
    assert statistics.wilcoxon([]) is None
    assert statistics.wilcoxon([0.0, 0.0]) == 1.0
    assert statistics.wilcoxon([0.0, 1.0]) == 1.0
    assert statistics.wilcoxon([1.0] * 40) == 2.0**-39


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8, unique=True))
def test_holm_by_its_definition(values: list[float]) -> None:
    found = statistics.holm(dict(enumerate(values)))
    assert list(found) == list(range(len(values)))
    assert [found[i] for i in range(len(values))] == pytest.approx(slow_holm(values))


def test_holm_by_hand() -> None:
    assert statistics.holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06})
    assert statistics.holm({}) == {}


def test_mean_sd_and_interval() -> None:
    values = [0.5, 0.7, 0.9]
    assert statistics.mean_sd(values) == pytest.approx((np.mean(values), np.std(values, ddof=1)))
    low, high = statistics.interval(values) or (0, 0)
    half = 4.302652729911275 * np.std(values, ddof=1) / math.sqrt(3)  # Student's t with two degrees of freedom
    assert (low, high) == pytest.approx((0.7 - half, 0.7 + half))
    assert statistics.mean_sd([]) == (None, None)
    assert statistics.mean_sd([1.0]) == (1.0, None)
    assert statistics.interval([1.0]) is None


def test_bold_only_where_intervals_do_not_overlap() -> None:
    assert statistics.clearly_best({"a": [1.0, 1.1], "b": [-9.0, -9.1]}) == "a"
    assert statistics.clearly_best({"a": [1.0, 1.1], "b": [0.0, 3.0]}) is None  # the higher mean is b's, and wide
    assert statistics.clearly_best({"a": [1.0, 1.1], "b": [0.9, 1.0]}) is None
    assert statistics.clearly_best({"a": [1.0], "b": [0.0, 0.0]}) is None, "one seed has no interval"
    assert statistics.clearly_best({"a": [1.0, 1.0], "b": [0.0]}) is None, "nor has the other"
    assert statistics.clearly_best({"a": [1.0, 1.0]}) is None, "nothing to compare with"
    assert statistics.clearly_best({"a": [0.0, 0.0], "b": [0.0, 0.0]}) is None, "touching is overlapping"


def test_pairwise_uses_common_pairs_and_holm() -> None:
    rng = np.random.default_rng(0)
    keys = [(seed, f"client-{i}") for seed in range(3) for i in range(5)]
    values = {
        "a": {key: float(x) for key, x in zip(keys, rng.normal(0, 1, 15), strict=True)},
        "b": {key: float(x) for key, x in zip(keys, rng.normal(3, 1, 15), strict=True)},
        "c": {key: float(x) for key, x in zip(keys[:8], rng.normal(0, 1, 8), strict=True)},
        "d": {(9, "nobody else"): 1.0},
    }
    found = statistics.pairwise(values)
    assert set(found) == {("a", "b"), ("a", "c"), ("b", "c")}
    raw = {
        (one, other): statistics.wilcoxon(
            [values[one][k] - values[other][k] for k in values[one] if k in values[other]]
        )
        for one, other in found
    }
    assert found == statistics.holm({pair: p for pair, p in raw.items() if p is not None})
    assert found["a", "b"] < 0.01 < found["a", "c"]
