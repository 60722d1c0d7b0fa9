"""The two models that a site has, on the same images: did taking part help, and which one is to be kept?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedbicross.evaluate import metrics
from fedbicross.evaluate.protocols import compare as pair

if TYPE_CHECKING:
    import numpy as np

FEDERATED, ALONE = "federated", "alone"
NAMES = {FEDERATED: "the federated model", ALONE: "the model trained alone"}


def score(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Every metric of one set of predictions, ready for JSON; None where a metric is undefined."""
    counts = metrics.confusion(probabilities, labels)
    right = 0 if counts is None else int(counts.trace())
    interval = metrics.wilson_interval(right, len(labels))
    return {
        "images": len(labels),
        "accuracy": metrics.accuracy(probabilities, labels),
        "accuracy_interval": None if interval is None else list(interval),
        "balanced_accuracy": metrics.balanced_accuracy(probabilities, labels),
        "macro_auc": metrics.macro_auc(probabilities, labels),
        "macro_f1": metrics.macro_f1(probabilities, labels),
        "ece": metrics.expected_calibration_error(probabilities, labels),
        "confusion": None if counts is None else counts.tolist(),
    }


def both(federated: np.ndarray, alone: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """The scores of both models on the same images, and what follows: ``{"test", "alone", "comparison"}``."""
    if not len(labels):
        return dict.fromkeys(("test", "alone", "comparison"))
    test, own = score(federated, labels), score(alone, labels)
    return {"test": test, "alone": own, "comparison": judge(pair(federated, alone, labels), test, own)}


def judge(
    paired: Mapping[str, Any] | None, test: Mapping[str, Any] | None, alone: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Which of two models to keep, by their paired comparison and the scores of each; None where one is missing.

    The federated one has to be better beyond chance: nothing else would be a reason to trust what others made.
    ``learned`` is whether the kept one is right more often than the most frequent class, ``same`` whether all scores
    are equal, as where a method left the site its own model.
    """
    if paired is None or test is None or alone is None:
        return None
    keep = FEDERATED if paired["interval"][0] > 0 else ALONE
    counts = (test if keep == FEDERATED else alone)["confusion"]
    right = sum(row[place] for place, row in enumerate(counts))
    return {**paired, "keep": keep, "learned": right > max(map(sum, counts)), "same": dict(test) == dict(alone)}


def advice(found: Mapping[str, Any] | None) -> list[str]:
    """Which model to keep and why, and what the site itself can do about it. What all sites agreed on is not named."""
    if found is None:
        return [
            "Not known: no images were held out.",
            "Put some of your images into a folder `test/` beside `train/`, or measure on new ones: "
            "`fedbicross client evaluate --which all`.",
        ]
    low, high = found["interval"]
    images, won, lost = found["images"], found["won"], found["lost"]
    difference = (won - lost) / images
    numbers = (
        f"of {images:,} images {won:,} are named rightly by the federated model alone and {lost:,} by the other alone "
        f"({_points(difference)} points of accuracy, 95 % interval {_points(low)} to {_points(high)})"
    )
    if found["same"]:
        said = [f"Taking part changed nothing: both models score alike on {images:,} images. Keep either."]
    elif found["keep"] == FEDERATED:
        said = [f"Taking part helped. Keep {NAMES[FEDERATED]}: {numbers}."]
    elif high < 0:
        said = [f"Taking part harmed. Keep {NAMES[ALONE]}: {numbers}."]
    else:
        said = [
            f"It cannot be told whether taking part helped. Keep {NAMES[ALONE]} until it can: {numbers}.",
            "More images tell more: put more of yours into the test set, or measure both models on new ones with "
            "`fedbicross client evaluate --which all`.",
        ]
    if not found["learned"]:
        said.append(
            "Neither is of use yet: always answering the most frequent class would be right as often. Look at your "
            "images and labels with `fedbicross check`, and add images of the rarer classes."
        )
    return said


def _points(value: float) -> str:
    return f"{100 * value:+.1f}"
