"""What may be said of a method after a few seeds: pure functions of numbers. None where there is nothing to say."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import TypeVar

import numpy as np
from scipy import stats

Key = TypeVar("Key")
Interval = tuple[float, float]
EXACT = 50  # differences; 2 ** 50 choices of signs are still counted without rounding


def mean_sd(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean, and standard deviation with n - 1 below the line; the latter is None for fewer than two values."""
    if not values:
        return None, None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def interval(values: Sequence[float]) -> Interval | None:
    """95 % confidence interval of the mean by Student's t; None for fewer than two values."""
    mean, sd = mean_sd(values)
    if mean is None or sd is None:
        return None
    half = float(stats.t.ppf(0.975, len(values) - 1)) * sd / math.sqrt(len(values))
    return mean - half, mean + half


def overlap(one: Interval, other: Interval) -> bool:
    """Whether two intervals have a point in common."""
    return one[0] <= other[1] and other[0] <= one[1]


def clearly_best(values: Mapping[Key, Sequence[float]]) -> Key | None:
    """The key with the highest mean, if its interval overlaps no other's; what has no interval rules it out."""
    means = {key: mean for key, found in values.items() if (mean := mean_sd(found)[0]) is not None}
    if len(means) < 2:
        return None
    best = max(means, key=lambda key: means[key])
    intervals = {key: interval(values[key]) for key in means}
    own = intervals.pop(best)
    others = list(intervals.values())
    return best if own and all(other is not None and not overlap(own, other) for other in others) else None


def wilcoxon(differences: Sequence[float]) -> float | None:
    """Two-sided p of the signed-rank test that these differences lie about 0; 1 if all are 0, None if there are none.

    Differences of 0 are left out. Exact for up to ``EXACT`` others, ties included; beyond by the normal approximation.
    Up to where scipy is exact, and whether it is with ties, depends on its version: small samples are counted here.
    """
    if not differences:
        return None
    other = np.array([value for value in differences if value != 0])
    if len(other) > EXACT:
        return float(stats.wilcoxon(other, method="approx").pvalue)
    ranks = np.rint(2 * stats.rankdata(np.abs(other))).astype(int)  # doubled: ties share a rank that may be a half
    ways = np.ones(1)  # how many of all choices of signs have this sum of positive ranks
    for rank in ranks:
        ways = np.pad(ways, (0, rank)) + np.pad(ways, (rank, 0))
    up = int(ranks[other > 0].sum())
    smaller = min(up, int(ranks.sum()) - up)
    return min(1.0, 2 * float(ways[: smaller + 1].sum()) / 2.0 ** len(other))


def holm(p_values: Mapping[Key, float]) -> dict[Key, float]:
    """Adjusted p values of a family of tests (Holm, 1979): the i-th smallest of m times m - i + 1, never falling."""
    out: dict[Key, float] = {}
    highest = 0.0
    order = sorted(p_values, key=lambda key: p_values[key])
    for place, key in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - place) * p_values[key]))
        out[key] = highest
    return {key: out[key] for key in p_values}


def pairwise(values: Mapping[str, Mapping[Key, float]]) -> dict[tuple[str, str], float]:
    """Every two methods compared over the (seed, client) pairs that both have: Holm's p by Wilcoxon's test."""
    found: dict[tuple[str, str], float] = {}
    for one, other in combinations(values, 2):
        common = [key for key in values[one] if key in values[other]]
        p = wilcoxon([values[one][key] - values[other][key] for key in common])
        if p is not None:
            found[one, other] = p
    return holm(found)
