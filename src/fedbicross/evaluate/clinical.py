"""What a clinician asks of a classifier, one class against all others: rates, curves, reliability, thresholds.

Everything is of one method under one seed. Counts and reliability are summed over clients, curves are means over the
clients that have them. What is kept does not grow with the images: 41 points a curve, and no curves of more than 20
classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.metrics import auc, precision_recall_curve, roc_curve

from fedbicross.evaluate import metrics

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.floating]
    Ints = NDArray[np.integer]
    Bools = NDArray[np.bool_]

PROTOCOLS = ("matched", "global")
POINTS = 41  # of a curve, at equal steps of the false positive rate, or of the recall
MOST_CLASSES = 20  # with curves
LEAST = 5  # images of the class, and of the others, that a threshold is chosen on
CELLS = ("tp", "fp", "fn", "tn")


def threshold(scores: Floats, positive: Bools) -> float | None:
    """The score from which on to say yes: where sensitivity + specificity is largest (Youden's index), the highest.

    None with fewer than five images on either side, or where no threshold is better than chance.
    """
    if min(positive.sum(), (~positive).sum()) < LEAST:
        return None
    false_alarms, found, scores_at = roc_curve(positive, scores)
    best = int(np.argmax(found - false_alarms))
    return float(scores_at[best]) if found[best] > false_alarms[best] else None


def thresholds(probs: Floats, labels: Ints) -> list[float | None]:
    """A threshold for each class, from a client's validation images: never from test images."""
    metrics.check_predictions(probs, labels)
    return [threshold(probs[:, c], labels == c) for c in range(probs.shape[1])]


def roc_points(scores: Floats, positive: Bools) -> tuple[Floats, float]:
    """Sensitivity at false positive rates 0, 1/40, … 1, and the area under the whole curve."""
    false_alarms, found, _ = roc_curve(positive, scores)
    return np.interp(np.linspace(0, 1, POINTS), false_alarms, found), float(auc(false_alarms, found))


def precision_recall_points(scores: Floats, positive: Bools) -> tuple[Floats, float]:
    """Precision where recall first reaches 0, 1/40, … 1, and the average precision of the whole curve."""
    precision, recall, _ = precision_recall_curve(positive, scores)
    # What scikit-learn's average_precision_score is, which would draw the curve again.
    average = -np.sum(np.diff(recall) * precision[:-1])
    # From the highest threshold down; scikit-learn's last point stands for no threshold at all.
    precision, recall = precision[-2::-1], recall[-2::-1]
    reached = np.searchsorted(recall, np.linspace(0, 1, POINTS) - 1e-12)
    return precision[reached], float(max(0.0, average))


def curves(probs: Floats, labels: Ints) -> dict[str, Floats]:
    """``roc`` and ``pr`` [C, 41], ``auc`` and ``average_precision`` [C]; nan for a class without both sides."""
    classes = probs.shape[1]
    out: dict[str, Floats] = {"roc": np.full((classes, POINTS), np.nan), "pr": np.full((classes, POINTS), np.nan)}
    out |= {"auc": np.full(classes, np.nan), "average_precision": np.full(classes, np.nan)}
    counts = np.bincount(labels, minlength=classes)
    for c in np.flatnonzero((counts > 0) & (counts < labels.size)):
        out["roc"][c], out["auc"][c] = roc_points(probs[:, c], labels == c)
        out["pr"][c], out["average_precision"][c] = precision_recall_points(probs[:, c], labels == c)
    return out


def describe(
    predictions: Sequence[Floats], labels: Ints, owned: Sequence[Bools], chosen: Sequence[Sequence[float | None]]
) -> dict[str, dict[str, Any]]:
    """Everything about one method, by protocol and ready for JSON.

    ``predictions`` [n, C] of each client's model on all test images, ``owned`` [n] which of them are the client's own,
    and ``chosen`` its thresholds (empty: none). Under ``global`` every client's model sees every image.
    """
    everywhere = np.ones(labels.size, bool)
    seen = {"matched": owned, "global": [everywhere] * len(predictions)}
    return {protocol: _describe(predictions, labels, seen[protocol], chosen) for protocol in PROTOCOLS}


def _describe(
    predictions: Sequence[Floats], labels: Ints, masks: Sequence[Bools], chosen: Sequence[Sequence[float | None]]
) -> dict[str, Any]:
    classes = predictions[0].shape[1]
    plain, decided = np.zeros((2, 4, classes), np.int64)
    voters = np.zeros(classes, np.int64)
    bins = np.zeros((3, metrics.ECE_BINS))
    drawn: list[dict[str, Floats]] = []
    done: dict[bytes, dict[str, Floats]] = {}  # many methods give all clients one model
    for probs, mask, cuts in zip(predictions, masks, chosen, strict=True):
        answers, truth = probs[mask], labels[mask]
        found = metrics.reliability(answers, truth)
        if found is None:
            continue
        bins += found
        plain += metrics.one_against_rest(metrics.predicted(answers)[:, None] == np.arange(classes), truth)
        if cuts:
            known = np.array([cut is not None for cut in cuts])
            yes = answers >= np.array([np.inf if cut is None else cut for cut in cuts])
            decided += metrics.one_against_rest(yes, truth) * known
            voters += known
        if classes <= MOST_CLASSES:
            key = hashlib.sha256(answers.tobytes()).digest() + hashlib.sha256(truth.tobytes()).digest()
            if key not in done:
                done[key] = curves(answers, truth)
            drawn.append(done[key])
    return {
        "classes": _cells(plain),
        "at_threshold": {**_cells(decided), "clients": voters.tolist()} if voters.any() else None,
        "curves": _mean_curves(drawn),
        "reliability": _bins(bins),
    }


def _cells(counts: Ints) -> dict[str, list[int]]:
    return dict(zip(CELLS, counts.tolist(), strict=True))


def _mean_curves(drawn: Sequence[Mapping[str, Floats]]) -> dict[str, list[Any]] | None:
    """Means over the clients that have the curve of a class; None for a class that nobody has one of."""
    if not drawn:
        return None
    out: dict[str, list[Any]] = {}
    for name in drawn[0]:
        by_class = zip(*(found[name] for found in drawn), strict=True)
        known = [[value for value in values if not np.isnan(value).any()] for values in by_class]
        out[name] = [np.round(np.mean(values, axis=0), 4).tolist() if values else None for values in known]
        if name == "auc":
            out["clients"] = [len(values) for values in known]
    return out if any(out["clients"]) else None


def _bins(bins: Floats) -> dict[str, list[Any]]:
    """Images, mean confidence and accuracy of each bin; None where it is empty."""
    images, confidence, right = bins
    means = [
        [round(float(part / n), 4) if n else None for part, n in zip(sums, images, strict=True)]
        for sums in (confidence, right)
    ]
    return {"images": [int(n) for n in images], "confidence": means[0], "accuracy": means[1]}
