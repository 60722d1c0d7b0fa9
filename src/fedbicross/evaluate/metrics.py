"""Metrics of one set of predictions: pure functions of probabilities [n, C] and labels [n].

All return None where the number does not exist (no images, no class with both positives and negatives), never nan:
a reader must be able to tell "undefined" from "zero". Counting is done here rather than by scikit-learn, whose
warnings and renormalisations on absent classes would have to be undone; the tests compare with it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from fedbicross.errors import MethodError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.floating]
    Ints = NDArray[np.integer]
    Bools = NDArray[np.bool_]

ECE_BINS = 15
Z_95 = 1.959963984540054  # 97.5 % quantile of the normal distribution


def check_predictions(probs: Floats, labels: Ints) -> None:
    """Refuse shapes that do not match, labels outside the classes, and predictions that are not numbers."""
    if probs.ndim != 2 or labels.shape != probs.shape[:1]:
        raise ValueError(f"expected probabilities [n, C] and labels [n], got {probs.shape} and {labels.shape}")
    if labels.size and not (labels.min() >= 0 and labels.max() < probs.shape[1]):
        raise ValueError(f"labels must lie in 0..{probs.shape[1] - 1}, got {labels.min()}..{labels.max()}")
    bad = int((~np.isfinite(probs).all(axis=1)).sum())
    if bad:
        raise MethodError(
            "nan_predictions",
            f"{bad} of {len(probs)} predictions are not finite; training diverged: lower the learning rate",
        )


def predicted(probs: Floats) -> Ints:
    """Most probable class; of equals the lowest index."""
    top: Ints = probs.argmax(axis=1)
    return top


def confusion(probs: Floats, labels: Ints) -> Ints | None:
    """Counts [C, C]: rows are true classes, columns predicted ones."""
    check_predictions(probs, labels)
    if not labels.size:
        return None
    classes = probs.shape[1]
    pairs = labels.astype(np.int64) * classes + predicted(probs)
    counts: Ints = np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)
    return counts


def accuracy(probs: Floats, labels: Ints) -> float | None:
    """Share of images whose most probable class is the true one."""
    counts = confusion(probs, labels)
    return None if counts is None else float(np.trace(counts) / counts.sum())


def balanced_accuracy(probs: Floats, labels: Ints) -> float | None:
    """Mean recall over the classes present in ``labels``."""
    counts = confusion(probs, labels)
    if counts is None:
        return None
    images = counts.sum(axis=1)
    present = images > 0
    return float((counts.diagonal()[present] / images[present]).mean())


def macro_f1(probs: Floats, labels: Ints) -> float | None:
    """Mean F1 over the classes present in ``labels``; a class never predicted counts as 0."""
    counts = confusion(probs, labels)
    if counts is None:
        return None
    images, predictions = counts.sum(axis=1), counts.sum(axis=0)
    present = images > 0
    # F1 = 2 TP / (2 TP + FP + FN), and TP + FN = images, TP + FP = predictions: never 0 / 0 for a present class.
    return float((2 * counts.diagonal()[present] / (images + predictions)[present]).mean())


def macro_auc(probs: Floats, labels: Ints) -> float | None:
    """One-versus-rest area under the ROC curve, mean over the classes with both positives and negatives here."""
    check_predictions(probs, labels)
    counts = np.bincount(labels, minlength=probs.shape[1])
    defined = np.flatnonzero((counts > 0) & (counts < labels.size))
    if not defined.size:
        return None
    return float(np.mean([_auc(probs[:, c], labels == c) for c in defined]))


def _auc(scores: Floats, positive: Bools) -> float:
    """Mann-Whitney: share of (positive, negative) pairs in the right order, ties counting half."""
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    midranks = np.cumsum(counts) - (counts - 1) / 2
    p = int(positive.sum())
    wins = midranks[place][positive].sum() - p * (p + 1) / 2
    return float(wins / (p * (positive.size - p)))


def reliability(probs: Floats, labels: Ints) -> Floats | None:
    """Images, sum of confidence and right answers [3, 15] by top-1 confidence, in 15 bins of equal width."""
    check_predictions(probs, labels)
    if not labels.size:
        return None
    confidence = probs.max(axis=1).astype(np.float64)
    if confidence.min() < 0 or confidence.max() > 1.01:  # a little above 1 is half precision, more is logits
        raise MethodError("not_probabilities", "predictions outside 0..1; apply a softmax before scoring")
    inner_edges = np.linspace(0, 1, ECE_BINS + 1)[1:-1]
    bins = np.digitize(confidence, inner_edges, right=True)  # bin m holds (m/15, (m+1)/15]
    columns = (None, confidence, predicted(probs) == labels)
    return np.stack([np.bincount(bins, weights, ECE_BINS).astype(np.float64) for weights in columns])


def expected_calibration_error(probs: Floats, labels: Ints) -> float | None:
    """Mean gap of top-1 confidence and accuracy over 15 bins of equal width (Guo et al. 2017), weighted by images."""
    bins = reliability(probs, labels)
    return None if bins is None else float(np.abs(bins[1] - bins[2]).sum() / labels.size)


def one_against_rest(decided: Bools, labels: Ints) -> Ints:
    """True positives, false positives, false negatives and true negatives [4, C] of yes-or-no answers [n, C]."""
    truth = labels[:, None] == np.arange(decided.shape[1])
    cells: Ints = np.stack([decided & truth, decided & ~truth, ~decided & truth, ~decided & ~truth]).sum(1)
    return cells


def rates(tp: float, fp: float, fn: float, tn: float) -> dict[str, float | None]:
    """Sensitivity, specificity, positive and negative predictive value; None where nothing is divided by."""

    def share(part: float, of: float) -> float | None:
        return part / of if of > 0 else None

    return {
        "sensitivity": share(tp, tp + fn),
        "specificity": share(tn, tn + fp),
        "ppv": share(tp, tp + fp),
        "npv": share(tn, tn + fn),
    }


def wilson_interval(k: int, n: int) -> tuple[float, float] | None:
    """95 % confidence interval of a proportion k of n; unlike k/n ± 1.96 sd it stays in 0..1 and works for small n."""
    if n == 0:
        return None
    if not 0 <= k <= n:
        raise ValueError(f"need 0 <= k <= n, got k={k}, n={n}")
    p, z2 = k / n, Z_95**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    # At the ends the bound is exactly 0 or 1; floating point would miss it by an ulp.
    return (0.0 if k == 0 else centre - half, 1.0 if k == n else centre + half)


def paired_interval(lost: int, won: int, n: int) -> tuple[float, float] | None:
    """95 % confidence interval of the difference of two accuracies on the same n images (Agresti and Min, 2005).

    ``lost``: images that the first model got right and the second wrong; ``won``: the reverse. Wald's interval after
    adding 0.5 to each of the four cells, so b = lost + 0.5, c = won + 0.5 and m = n + 2:
    ``(c - b)/m ± 1.96 sqrt(b + c - (c - b)²/m)/m``. Wald's own is too narrow where few images
    differ, which is the common case here.
    """
    if n == 0:
        return None
    if lost < 0 or won < 0 or lost + won > n:
        raise ValueError(f"need counts with lost + won <= n, got lost={lost}, won={won}, n={n}")
    b, c, m = lost + 0.5, won + 0.5, n + 2
    centre = (c - b) / m
    half = Z_95 * math.sqrt(b + c - (c - b) ** 2 / m) / m
    return (max(centre - half, -1.0), min(centre + half, 1.0))


def paired_balanced_interval(ours: Bools, theirs: Bools, labels: Ints) -> tuple[float, float] | None:
    """``paired_interval`` for balanced accuracy: the mean over the classes present. Arrays [n] say who is right."""
    gains = ours.astype(np.float64) - theirs
    classes = [_smoothed(gains[labels == c]) for c in np.unique(labels)]
    if not classes:
        return None
    centre = float(np.mean([mean for mean, _ in classes]))
    return _around(centre, sum(squares for _, squares in classes) / len(classes) ** 2)


def paired_auc_interval(ours: Floats, theirs: Floats, labels: Ints) -> tuple[float, float] | None:
    """``paired_interval`` for the macro AUC of two models, with probabilities [n, C] on the same images.

    DeLong, DeLong and Clarke-Pearson (1988): the AUC of a class is the mean over its images of the share of others
    ranked below, and likewise over the others. What an image adds to all classes is summed before it is squared, since
    it is a positive of one class and a negative of the rest. Few images are smoothed as in ``paired_interval``.
    """
    counts = np.bincount(labels, minlength=ours.shape[1])
    defined = np.flatnonzero((counts > 0) & (counts < labels.size))
    if not defined.size:
        return None
    sides = [labels == c for c in defined]
    gains = [
        _placements(ours[:, c], positive) - _placements(theirs[:, c], positive)
        for c, positive in zip(defined, sides, strict=True)
    ]
    # Agresti and Min add half an image at +1, half at -1 and one at 0. Ranks change by less: here at +s, -s and 0.
    squared = (sum(float(d @ d) for d in gains) + 1) / (labels.size * defined.size + 2)
    centre, added, pseudo = 0.0, np.zeros(labels.size), 0.0
    for positive, d in zip(sides, gains, strict=True):
        for group in (positive, ~positive):
            m = int(group.sum()) + 2
            mean = float(d[group].sum()) / m
            added[group] += (d[group] - mean) / m
            pseudo += (squared + 2 * mean**2) / m**2
            centre += mean / 2
    return _around(centre / defined.size, (float(added @ added) + pseudo) / defined.size**2)


def _placements(scores: Floats, positive: Bools) -> Floats:
    """For a positive the share of negatives below it, for a negative the share of positives above; ties count half."""
    out = np.empty(scores.size)
    for group in (positive, ~positive):
        others = np.sort(scores[~group])
        below = (others.searchsorted(scores[group]) + others.searchsorted(scores[group], "right")) / (2 * others.size)
        out[group] = below if group is positive else 1 - below
    return out


def _smoothed(gains: Floats) -> tuple[float, float]:
    """Mean of differences in -1..1 and its variance, with half an image at +1, half at -1 and one at 0 added."""
    m = gains.size + 2
    mean = float(gains.sum() / m)
    return mean, (float(gains @ gains) + 1 - m * mean**2) / m**2


def _around(centre: float, variance: float) -> tuple[float, float]:
    half = Z_95 * math.sqrt(variance)
    return (max(centre - half, -1.0), min(centre + half, 1.0))
