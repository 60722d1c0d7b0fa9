"""Which of a site's two models is to be kept, and what it is told."""

from __future__ import annotations

import numpy as np
import pytest

from fedbicross.deploy import card, compare
from fedbicross.evaluate.metrics import paired_interval

CLASSES = 3


def answers(labels: np.ndarray, right: int) -> np.ndarray:
    """Probabilities that name the first so many images rightly and the others wrongly."""
    named = np.where(np.arange(len(labels)) < right, labels, (labels + 1) % CLASSES)
    return 0.7 * np.eye(CLASSES)[named] + 0.1


def both(federated: int, alone: int, images: int = 90) -> dict[str, object]:
    labels = np.arange(images) % CLASSES
    return compare.both(answers(labels, federated), answers(labels, alone), labels)


@pytest.mark.parametrize(
    ("federated", "alone", "keep", "said"),
    [
        (80, 50, "federated", "Taking part helped. Keep the federated model"),
        (50, 80, "alone", "Taking part harmed. Keep the model trained alone"),
        (62, 60, "alone", "It cannot be told whether taking part helped. Keep the model trained alone"),
        (60, 62, "alone", "It cannot be told"),
    ],
)
def test_the_federated_model_has_to_be_better_beyond_chance(federated: int, alone: int, keep: str, said: str) -> None:
    found = both(federated, alone)["comparison"]
    won, lost = max(federated - alone, 0), max(alone - federated, 0)
    assert found == {
        "images": 90, "won": won, "lost": lost, "interval": list(paired_interval(lost, won, 90)), "keep": keep,
        "learned": True, "same": False,
    }  # fmt: skip
    words = " ".join(compare.advice(found))
    assert said in words and f"{100 * (federated - alone) / 90:+.1f} points" in words


def test_a_method_that_left_the_site_its_own_model() -> None:
    found = both(60, 60)["comparison"]
    assert found["same"] and compare.advice(found) == [
        "Taking part changed nothing: both models score alike on 90 images. Keep either."
    ]
    labels = np.arange(90) % CLASSES
    sure = answers(labels, 60)
    unsure = np.sqrt(sure) / np.sqrt(sure).sum(1, keepdims=True)
    assert not compare.both(sure, unsure, labels)["comparison"]["same"], "as often right, but not as sure"


def test_nothing_was_learned() -> None:
    words = " ".join(compare.advice(both(30, 30)["comparison"]))
    assert "Neither is of use yet" in words and "fedbicross check" in words
    assert "Neither" not in " ".join(compare.advice(both(31, 31)["comparison"]))


def test_no_images_no_verdict() -> None:
    nothing = compare.both(np.zeros((0, 3)), np.zeros((0, 3)), np.zeros(0, np.int64))
    assert nothing == {"test": None, "alone": None, "comparison": None}
    assert "Not known: no images were held out." in compare.advice(None)[0]


def test_the_advice_names_only_what_a_site_can_change() -> None:
    """Method, training and the held-out share are agreed on by all; no site can change them."""
    every = [compare.advice(None)]
    every += [compare.advice(both(f, a)["comparison"]) for f, a in ((80, 50), (50, 80), (60, 60), (30, 30))]
    words = " ".join(line for lines in every for line in lines).lower()
    for agreed in ("epoch", "hold_out", "method", "learning rate", "quorum", "settings", "alpha", "seed", "model size"):
        assert agreed not in words


def test_the_scores_are_those_of_each_model() -> None:
    found = both(80, 50)
    assert (found["test"]["accuracy"], found["alone"]["accuracy"]) == (80 / 90, 50 / 90)
    rows = {name: tuple(values) for name, *values in card.metric_rows(found["test"], found["alone"])}
    assert rows["accuracy"][0].startswith("88.9 % (95 % interval ") and rows["accuracy"][1].startswith("55.6 %")
