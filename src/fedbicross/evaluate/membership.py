"""Was an image trained on? The likelihood-ratio attack (LiRA: Carlini et al., 2022), and how well its guesses do.

A score is a network's confidence in an image's label on a logit scale, where it is roughly Gaussian. Shadow networks,
trained by the same recipe with and without the image, say what the score is for networks that saw it and for networks
that did not. Members are images that the network under audit was trained on; controls are images that it never saw.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.stats import beta, rankdata

Array = np.ndarray
SMALLEST = 1e-30  # probability; below it float32 holds nothing to take a logarithm of
REPEATS = 1000  # of the bootstrap


class Interval(NamedTuple):
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float


def confidence(probabilities: Array, labels: Array) -> Array:
    """φ = log p(y) - log Σ p(c), c ≠ y, for probabilities [..., n, C] and labels [n]."""
    each = probabilities.astype(np.float64)
    own = np.zeros(each.shape[-2:], bool)
    own[np.arange(len(labels)), labels] = True
    right = np.where(own, each, 0).sum(-1)
    others = np.where(own, 0, each).sum(-1)
    found: Array = np.log(right.clip(SMALLEST)) - np.log(others.clip(SMALLEST))
    return found


class Expected(NamedTuple):
    """What shadow networks say of each image's score: halfway between with and without it, the gain by it, a spread."""

    level: Array  # [n]
    gain: Array  # [n]
    variance: float
    without: Array  # [n], the mean of those that never saw it


def expected(shadows: Array, inside: Array) -> Expected:
    """From the scores of K shadow networks [K,n] and whether each was trained on the image [K,n].

    With few shadows a mean of two or three is mostly noise, so that levels and gains are drawn towards their averages
    by as much as their noise demands (empirical Bayes), and all images share one spread, as the authors advise for few
    shadows. An image that was never inside, or never outside, has the usual gain.
    """
    count_in, count_out = inside.sum(0), (~inside).sum(0)
    known = (count_in > 0) & (count_out > 0)
    if not known.any():
        raise ValueError("no image was both inside and outside of shadow networks")
    mean_in = np.where(inside, shadows, 0).sum(0) / count_in.clip(1)
    mean_out = np.where(inside, 0, shadows).sum(0) / count_out.clip(1)
    residual = shadows - np.where(inside, mean_in, mean_out)
    freedom = max((count_in - 1).clip(0).sum() + (count_out - 1).clip(0).sum(), 1)
    variance = max(float((residual**2).sum() / freedom), 1e-12)
    noise = variance * float((1 / count_in[known] + 1 / count_out[known]).mean())
    gain = mean_in - mean_out
    usual = float(gain[known].mean())
    mean_in, mean_out = (
        np.where(count_in > 0, mean_in, mean_out + usual),
        np.where(count_out > 0, mean_out, mean_in - usual),
    )
    level = (mean_in + mean_out) / 2
    return Expected(
        _drawn(level, noise / 4, known), np.where(known, _drawn(gain, noise, known), usual), variance, mean_out
    )


def _drawn(values: Array, noise: float, known: Array) -> Array:
    """Values drawn towards their mean: the share of their spread that is no noise is what is believed of them."""
    mean, spread = float(values[known].mean()), float(values[known].var())
    trust = max(0.0, 1 - noise / spread) if spread > 0 else 0.0
    return mean + trust * (values - mean)


def likelihood_ratio(scores: Array, shadows: Expected) -> Array:
    """Λ = log N(φ; μ + g/2, σ²) - log N(φ; μ - g/2, σ²) = g (φ - μ) / σ², for scores [n], levels μ and gains g.

    One spread for both keeps Λ growing with φ wherever seeing an image helps. Scores are first moved as a whole to the
    level of the shadows: a network trained on more images, or longer, is surer of everything.
    """
    moved = scores - scores.mean() + shadows.level.mean()
    ratio: Array = shadows.gain * (moved - shadows.level) / shadows.variance
    return ratio


def auc(members: Array, controls: Array) -> float:
    """The chance that a member scores above a control; ties count half."""
    ranks = rankdata(np.concatenate([members, controls]))
    wins = ranks[: len(members)].sum() - len(members) * (len(members) + 1) / 2
    return float(wins / (len(members) * len(controls)))


def auc_interval(
    members: Array,
    controls: Array,
    rng: np.random.Generator,
    groups: tuple[Array, Array] | None = None,
    repeats: int = REPEATS,
) -> Interval:
    """AUC with a bootstrap interval; ``groups`` are patients of both, whose images are drawn together."""
    sides = (members, controls)
    rows = [None if groups is None else _rows_of_groups(groups[i]) for i in range(2)]
    drawn = [
        auc(*(values[_draw(len(values), own, rng)] for values, own in zip(sides, rows, strict=True)))
        for _ in range(repeats)
    ]
    low, high = np.quantile(drawn, [0.025, 0.975])
    value = auc(members, controls)
    return Interval(value, min(float(low), value), max(float(high), value))


def _rows_of_groups(groups: Array) -> list[Array]:
    order = np.argsort(groups, kind="stable")
    _, starts = np.unique(groups[order], return_index=True)
    return np.split(order, starts[1:])


def _draw(count: int, groups: list[Array] | None, rng: np.random.Generator) -> Array:
    """Rows with replacement: single ones, or all of a group."""
    if groups is None:
        return rng.integers(0, count, count)
    return np.concatenate([groups[i] for i in rng.integers(0, len(groups), len(groups))])


def binomial_interval(successes: int, trials: int) -> Interval:
    """A share with its exact 95 % interval (Clopper-Pearson)."""
    low = beta.ppf(0.025, successes, trials - successes + 1) if successes else 0.0
    high = beta.ppf(0.975, successes + 1, trials - successes) if successes < trials else 1.0
    return Interval(successes / trials, float(low), float(high))


def tpr_at(fpr: float, members: Array, controls: Array) -> Interval | None:
    """Share of members found where at most ``fpr`` of the controls are taken for one; None with too few controls.

    The interval is that of a share at this threshold; that the threshold is itself estimated is not in it.
    """
    allowed = int(np.floor(fpr * len(controls) + 1e-9))
    if allowed < 1:
        return None
    threshold = np.sort(controls)[::-1][allowed]
    return binomial_interval(int((members > threshold).sum()), len(members))


def advantage(members: Array, controls: Array, rng: np.random.Generator) -> float:
    """TPR - FPR of one threshold, chosen on one half of the images and counted on the other, both ways round.

    Zero for a guess that knows nothing, on average: a threshold chosen where it is counted would flatter itself.
    """
    halves = [np.array_split(values[rng.permutation(len(values))], 2) for values in (members, controls)]
    found = []
    for choose, count in ((0, 1), (1, 0)):
        threshold = _best_threshold(halves[0][choose], halves[1][choose])
        found.append(float((halves[0][count] >= threshold).mean() - (halves[1][count] >= threshold).mean()))
    return sum(found) / 2


def _best_threshold(members: Array, controls: Array) -> float:
    candidates = np.unique(np.concatenate([members, controls]))
    above_m = len(members) - np.searchsorted(np.sort(members), candidates)
    above_c = len(controls) - np.searchsorted(np.sort(controls), candidates)
    best = int(np.argmax(above_m / len(members) - above_c / len(controls)))
    return float(candidates[max(best - 1, 0)] + candidates[best]) / 2  # midway: other images fall on either side


def found_members(scores: Array, is_member: Array, fpr: float) -> Array:
    """Rows of members that score above all but ``fpr`` of the controls (above all of them if these are few)."""
    controls = np.sort(scores[~is_member])[::-1]
    threshold = controls[int(np.floor(fpr * len(controls) + 1e-9))]
    return np.flatnonzero(is_member & (scores > threshold))


def roc(members: Array, controls: Array) -> tuple[Array, Array]:
    """False and true positive rates at every threshold, from 0 to 1."""
    thresholds = np.unique(np.concatenate([members, controls]))[::-1]
    rates = [
        1 - np.searchsorted(np.sort(values), thresholds) / len(values)  # values at or above the threshold
        for values in (controls, members)
    ]
    return np.concatenate([[0.0], rates[0]]), np.concatenate([[0.0], rates[1]])
