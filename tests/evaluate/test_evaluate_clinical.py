"""Rates, curves, reliability and thresholds, against slow and obvious versions."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from fedbicross.evaluate import clinical, metrics

RNG = np.random.default_rng(3)


def answers(n, classes, rng=RNG, sharp=2.0):
    """Probabilities that know something, with ties."""
    labels = rng.integers(0, classes, n)
    scores = np.round(rng.normal(size=(n, classes)) + sharp * (labels[:, None] == np.arange(classes)), 1)
    probs = np.exp(scores)
    return probs / probs.sum(1, keepdims=True), labels


def test_rates_are_those_of_a_slow_count():
    probs, labels = answers(200, 4)
    guesses = probs.argmax(1)
    counts = metrics.one_against_rest(guesses[:, None] == np.arange(4), labels)
    for c in range(4):
        found = metrics.rates(*counts[:, c])
        yes, is_c = guesses == c, labels == c
        assert counts[:, c].sum() == 200
        assert found["sensitivity"] == pytest.approx(sum(yes & is_c) / sum(is_c))
        assert found["specificity"] == pytest.approx(sum(~yes & ~is_c) / sum(~is_c))
        assert found["ppv"] == pytest.approx(sum(yes & is_c) / sum(yes))
        assert found["npv"] == pytest.approx(sum(~yes & ~is_c) / sum(~yes))


def test_rates_without_anything_to_divide_by_are_undefined():
    assert metrics.rates(0, 0, 0, 5) == {"sensitivity": None, "specificity": 1.0, "ppv": None, "npv": 1.0}
    assert set(metrics.rates(0, 0, 0, 0).values()) == {None}


def slow_roc(scores, positive, rate):
    """The highest sensitivity that a line between two thresholds reaches at this false positive rate."""
    points = [(0.0, 0.0)]
    for cut in sorted(set(scores), reverse=True):
        yes = scores >= cut
        points.append((yes[~positive].mean(), yes[positive].mean()))
    best = max(y for x, y in points if x <= rate)
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 < rate <= x1:
            best = max(best, y0 + (y1 - y0) * (rate - x0) / (x1 - x0))
    return best


def slow_precision(scores, positive, recall):
    """Precision at the highest threshold that finds at least this share."""
    for cut in sorted(set(scores), reverse=True):
        yes = scores >= cut
        if yes[positive].mean() >= recall - 1e-12:
            return positive[yes].mean()
    raise AssertionError


@pytest.mark.parametrize("n", [7, 60])
def test_curves_are_the_slow_ones(n):
    probs, labels = answers(n, 3)
    found = clinical.curves(probs, labels)
    grid = np.linspace(0, 1, clinical.POINTS)
    for c in range(3):
        scores, positive = probs[:, c], labels == c
        assert found["roc"][c] == pytest.approx([slow_roc(scores, positive, rate) for rate in grid])
        assert found["pr"][c] == pytest.approx([slow_precision(scores, positive, rate) for rate in grid])
        assert found["auc"][c] == pytest.approx(roc_auc_score(positive, scores))
        assert found["average_precision"][c] == average_precision_score(positive, scores)


def test_a_class_without_both_sides_has_no_curve():
    found = clinical.curves(np.full((3, 2), 0.5), np.array([1, 1, 1]))
    assert all(np.isnan(values).all() for values in found.values())


def test_a_threshold_separates_what_can_be_separated():
    scores = np.array([0.9, 0.8, 0.7, 0.65, 0.6, 0.3, 0.2, 0.2, 0.1, 0.0])
    positive = np.arange(10) < 5
    assert clinical.threshold(scores, positive) == 0.6
    assert clinical.threshold(-scores, positive) is None, "better than chance nowhere"
    assert clinical.threshold(np.zeros(10), positive) is None
    assert clinical.threshold(scores[1:], positive[1:]) is None, "four images are too few"


def test_thresholds_maximise_sensitivity_and_specificity():
    probs, labels = answers(120, 3)
    for c, cut in enumerate(clinical.thresholds(probs, labels)):
        positive = labels == c
        gains = {t: (probs[positive, c] >= t).mean() - (probs[~positive, c] >= t).mean() for t in set(probs[:, c])}
        assert gains[cut] == pytest.approx(max(gains.values()))


def test_reliability_bins_give_the_calibration_error():
    probs, labels = answers(300, 4)
    images, confidence, right = metrics.reliability(probs, labels)
    assert images.sum() == 300 and right.sum() == (probs.argmax(1) == labels).sum()
    assert confidence.sum() == pytest.approx(probs.max(1).sum())
    expected = sum(abs(confidence - right)) / 300
    assert metrics.expected_calibration_error(probs, labels) == pytest.approx(expected)
    assert metrics.reliability(probs[:0], labels[:0]) is None


def federation(clients=3, n=240, classes=4):
    probs = [answers(n, classes, np.random.default_rng(i))[0] for i in range(clients)]
    labels = answers(n, classes, np.random.default_rng(0))[1]
    return probs, labels, [np.arange(n) % (clients + 1) == i for i in range(clients)]  # a quarter is nobody's


def test_a_method_is_described_over_all_clients():
    probs, labels, owned = federation()
    cuts = [[0.5, None, 0.4, 0.3], [], [0.2, None, None, 0.9]]
    found = clinical.describe(probs, labels, owned, cuts)
    assert json.loads(json.dumps(found, allow_nan=False)) == found and set(found) == {"matched", "global"}
    for protocol, masks in (("matched", owned), ("global", [np.ones(240, bool)] * 3)):
        part = found[protocol]
        seen = sum(int(mask.sum()) for mask in masks)
        assert {sum(cells) for cells in zip(*part["classes"].values(), strict=True)} == {seen}
        assert sum(part["reliability"]["images"]) == seen
        assert part["at_threshold"]["clients"] == [2, 0, 1, 2]
        tp = next(((p[m] >= 0.4)[:, 2] & (labels[m] == 2)).sum() for p, m in zip(probs, masks, strict=True))
        assert part["at_threshold"]["tp"][2] == tp, "of the one client that has a threshold for this class"
        assert sum(part["at_threshold"][cell][1] for cell in clinical.CELLS) == 0
        each = [clinical.curves(p[m], labels[m]) for p, m in zip(probs, masks, strict=True)]
        for name in ("roc", "pr", "auc", "average_precision"):
            mean = np.mean([one[name] for one in each], axis=0)
            assert np.array(part["curves"][name]) == pytest.approx(mean, abs=5.1e-5)
        assert part["curves"]["clients"] == [3, 3, 3, 3]


def test_one_model_for_all_is_drawn_once(monkeypatch):
    probs, labels, owned = federation()
    calls = []
    real = clinical.curves
    monkeypatch.setattr(clinical, "curves", lambda *found: calls.append(1) or real(*found))
    clinical.describe([probs[0], probs[0].copy(), probs[0].copy()], labels, owned, [[], [], []])
    assert len(calls) == 3 + 1


def test_what_is_kept_does_not_grow_with_images_or_many_classes():
    def size(classes, n):
        rng = np.random.default_rng(0)
        probs = rng.dirichlet(np.ones(classes), n)
        found = clinical.describe([probs], rng.integers(0, classes, n), [np.ones(n, bool)], [[]])
        return found, len(json.dumps(found))

    _, few = size(8, 200)
    _, many = size(8, 20_000)
    assert many < 1.1 * few < 20_000
    found, large = size(1000, 2000)
    assert found["matched"]["curves"] is None and large < 60_000
    assert size(clinical.MOST_CLASSES, 400)[1] < 40_000


def test_clients_without_own_test_images_leave_nothing():
    probs, labels, _ = federation()
    found = clinical.describe(probs, labels, [np.zeros(240, bool)] * 3, [[], [], []])["matched"]
    assert found["curves"] is None and found["at_threshold"] is None
    assert set(found["reliability"]["accuracy"]) == {None}
