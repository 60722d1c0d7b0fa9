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


def expected_calibration_error(probs: Floats, labels: Ints) -> float | None:
    """Mean gap of top-1 confidence and accuracy over 15 bins of equal width (Guo et al. 2017), weighted by images."""
    check_predictions(probs, labels)
    if not labels.size:
        return None
    confidence = probs.max(axis=1).astype(np.float64)
    if confidence.min() < 0 or confidence.max() > 1.01:  # a little above 1 is half precision, more is logits
        raise MethodError("not_probabilities", "predictions outside 0..1; apply a softmax before scoring")
    inner_edges = np.linspace(0, 1, ECE_BINS + 1)[1:-1]
    bins = np.digitize(confidence, inner_edges, right=True)  # bin m holds (m/15, (m+1)/15]
    correct = predicted(probs) == labels
    gap = np.bincount(bins, confidence, ECE_BINS) - np.bincount(bins, correct, ECE_BINS)
    return float(np.abs(gap).sum() / labels.size)


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
