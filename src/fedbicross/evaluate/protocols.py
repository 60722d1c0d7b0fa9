"""Three honest readings of one pass over the test set.

global: every test image. matched: the images dealt to this client in its training proportions, its own patients
(the headline). label_set: all test images of the classes it has training data of (what some papers report).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fedbicross.evaluate import metrics
from fedbicross.evaluate.names import METRICS, PROTOCOLS

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "PROTOCOLS",
    "TestSet",
    "by_patient",
    "compare",
    "compare_client",
    "score_client",
    "score_patients",
    "subsets",
]

MOST_CLASSES = 64  # with a confusion matrix
_FUNCTIONS = {
    "accuracy": metrics.accuracy,
    "balanced_accuracy": metrics.balanced_accuracy,
    "macro_auc": metrics.macro_auc,
    "macro_f1": metrics.macro_f1,
    "ece": metrics.expected_calibration_error,
}


@dataclass(frozen=True, eq=False)
class TestSet:
    """Labels [n] of the test images and, for each, the index of the client it is dealt to (-1: nobody).

    ``patients`` [n] where it is known whose image it is; all images of a patient are dealt to one client.
    """

    __test__: ClassVar[bool] = False  # pytest collects classes by this name

    labels: NDArray[np.integer]
    owner: NDArray[np.integer]
    patients: NDArray[np.str_] | None = None

    def __post_init__(self) -> None:
        if self.labels.ndim != 1 or self.labels.shape != self.owner.shape:
            raise ValueError(f"labels {self.labels.shape} and owner {self.owner.shape} must both be [n]")
        if self.patients is not None and self.patients.shape != self.labels.shape:
            raise ValueError(f"labels {self.labels.shape} and patients {self.patients.shape} must both be [n]")


def subsets(test: TestSet, client_index: int, class_counts: NDArray[np.integer]) -> dict[str, NDArray[np.bool_]]:
    """A mask [n] for each protocol; ``class_counts`` [C] are the client's training images a class."""
    if client_index < 0:
        raise ValueError(f"client_index must not be negative (-1 marks images of nobody), got {client_index}")
    return {
        "global": np.ones(test.labels.shape, dtype=bool),
        "matched": test.owner == client_index,
        "label_set": (np.asarray(class_counts) > 0)[test.labels],
    }


def score_client(
    probs: NDArray[np.floating], test: TestSet, client_index: int, class_counts: NDArray[np.integer]
) -> dict[str, Any]:
    """Every metric under every protocol, ready for JSON; the caller adds the key ``client``.

    ``{metric: {protocol: float | None}, "accuracy_interval": {protocol: [low, high] | None},
    "test_images": {protocol: int}, "confusion": {protocol: C×C counts | None}}``. With many classes no confusion is
    kept: C² numbers a client would be hundreds of megabytes.
    """
    if len(class_counts) != probs.shape[-1]:
        raise ValueError(f"{len(class_counts)} class counts for predictions of {probs.shape[-1]} classes")
    metrics.check_predictions(probs, test.labels)
    masks = subsets(test, client_index, class_counts)
    parts = {protocol: (probs[masks[protocol]], test.labels[masks[protocol]]) for protocol in PROTOCOLS}
    counts = {protocol: metrics.confusion(*part) for protocol, part in parts.items()}
    keep = probs.shape[1] <= MOST_CLASSES
    scores: dict[str, Any] = {
        name: {protocol: _FUNCTIONS[name](*part) for protocol, part in parts.items()} for name in METRICS
    }
    scores["accuracy_interval"] = {protocol: _interval(count) for protocol, count in counts.items()}
    scores["test_images"] = {protocol: int(masks[protocol].sum()) for protocol in PROTOCOLS}
    scores["confusion"] = {protocol: c.tolist() if keep and c is not None else None for protocol, c in counts.items()}
    return scores


def score_patients(
    probs: NDArray[np.floating], test: TestSet, client_index: int, class_counts: NDArray[np.integer]
) -> dict[str, Any] | None:
    """``score_client`` with one answer a patient, the mean over his images; None where patients are unknown.

    ``{metric: {protocol: float | None}, "accuracy_interval": …, "test_patients": {protocol: int}}``
    """
    if test.patients is None:
        return None
    answers, patients = by_patient(probs, test)
    scores = score_client(answers, patients, client_index, class_counts)
    del scores["confusion"]
    scores["test_patients"] = scores.pop("test_images")
    return scores


def by_patient(probs: NDArray[np.floating], test: TestSet) -> tuple[NDArray[np.floating], TestSet]:
    """The mean answer for each patient, and the patients as a test set: of several labels the most frequent."""
    assert test.patients is not None
    _, first, patient = np.unique(test.patients, return_index=True, return_inverse=True)
    votes = np.zeros((len(first), probs.shape[1]), np.int64)
    np.add.at(votes, (patient, test.labels), 1)
    total = np.zeros(votes.shape)
    np.add.at(total, patient, probs.astype(np.float64))
    return total / votes.sum(1, keepdims=True), TestSet(votes.argmax(1), test.owner[first])


def compare_client(
    probs: NDArray[np.floating], alone: NDArray[np.floating], test: TestSet, client_index: int
) -> dict[str, Any] | None:
    """``compare`` on the client's own test images.

    Its ``interval`` is in accuracy; ``"intervals": {metric: [low, high] | None}`` are those of the other metrics that a
    verdict may go by.
    """
    mask = test.owner == client_index
    ours, theirs, labels = probs[mask], alone[mask], test.labels[mask]
    found = compare(ours, theirs, labels)
    if found is None:
        return None
    right, bar = metrics.predicted(ours) == labels, metrics.predicted(theirs) == labels
    others = {
        "balanced_accuracy": metrics.paired_balanced_interval(right, bar, labels),
        "macro_auc": metrics.paired_auc_interval(ours, theirs, labels),
    }
    return {**found, "intervals": {name: None if ends is None else list(ends) for name, ends in others.items()}}


def compare(
    probs: NDArray[np.floating], alone: NDArray[np.floating], labels: NDArray[np.integer]
) -> dict[str, Any] | None:
    """A model against training alone, image by image; None where there are no images.

    ``{"images": n, "lost": alone was right and this is wrong, "won": the reverse, "interval": [low, high]}``, the last
    being that of the difference in accuracy (`metrics.paired_interval`).
    """
    ours, theirs = metrics.predicted(probs) == labels, metrics.predicted(alone) == labels
    lost, won = int((theirs & ~ours).sum()), int((ours & ~theirs).sum())
    interval = metrics.paired_interval(lost, won, len(labels))
    if interval is None:
        return None
    return {"images": len(labels), "lost": lost, "won": won, "interval": list(interval)}


def _interval(counts: NDArray[np.integer] | None) -> list[float] | None:
    if counts is None:
        return None
    interval = metrics.wilson_interval(int(np.trace(counts)), int(counts.sum()))
    return None if interval is None else list(interval)
