"""What may be said of a method after a few seeds: pure functions of numbers. None where there is nothing to say."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import TypeVar

from scipy import stats

Key = TypeVar("Key")
Interval = tuple[float, float]


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

    Differences of 0 are left out. Exact for up to 50 of them without ties, else by the normal approximation.
    """
    if not differences:
        return None
    other = [value for value in differences if value != 0]
    return float(stats.wilcoxon(other).pvalue) if other else 1.0


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
