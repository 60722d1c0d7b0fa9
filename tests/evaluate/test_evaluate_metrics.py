"""Metrics against slow, obvious loops and against scikit-learn."""

import math
import warnings
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import confusion_matrix, f1_score, recall_score, roc_auc_score

from fedbicross.errors import MethodError
from fedbicross.evaluate import metrics

ALL = [
    metrics.accuracy,
    metrics.balanced_accuracy,
    metrics.macro_auc,
    metrics.macro_f1,
    metrics.expected_calibration_error,
    metrics.confusion,
]


@st.composite
def predictions(draw):
    """Small sets with ties (coarse grid) and absent classes, the two things that go wrong."""
    n, classes = draw(st.integers(1, 25)), draw(st.integers(2, 5))
    cells = st.lists(st.integers(0, 4), min_size=classes, max_size=classes).filter(any)
    rows = np.array(draw(st.lists(cells, min_size=n, max_size=n)), dtype=np.float64)
    labels = np.array(draw(st.lists(st.integers(0, classes - 1), min_size=n, max_size=n)))
    return rows / rows.sum(axis=1, keepdims=True), labels


def top(row):
    best = 0
    for c in range(len(row)):
        if row[c] > row[best]:
            best = c
    return best


def slow_accuracy(probs, labels):
    return sum(top(p) == y for p, y in zip(probs, labels, strict=True)) / len(labels)


def slow_recalls(probs, labels):
    recalls = []
    for c in sorted(set(labels.tolist())):
        mine = [top(p) for p, y in zip(probs, labels, strict=True) if y == c]
        recalls.append(sum(t == c for t in mine) / len(mine))
    return recalls


def slow_macro_f1(probs, labels):
    scores = []
    for c in sorted(set(labels.tolist())):
        guesses = [top(p) for p in probs]
        tp = sum(g == c and y == c for g, y in zip(guesses, labels, strict=True))
        fp = sum(g == c and y != c for g, y in zip(guesses, labels, strict=True))
        fn = sum(g != c and y == c for g, y in zip(guesses, labels, strict=True))
        precision = tp / (tp + fp) if tp + fp else 0
        recall = tp / (tp + fn)
        scores.append(2 * precision * recall / (precision + recall) if precision + recall else 0)
    return sum(scores) / len(scores)


def slow_macro_auc(probs, labels):
    areas = []
    for c in range(probs.shape[1]):
        positives, negatives = probs[labels == c, c], probs[labels != c, c]
        if len(positives) and len(negatives):
            wins = sum((p > q) + 0.5 * (p == q) for p in positives for q in negatives)
            areas.append(wins / (len(positives) * len(negatives)))
    return sum(areas) / len(areas) if areas else None


def slow_ece(probs, labels):
    edges = np.linspace(0, 1, 16)
    total = 0.0
    for low, high in pairwise(edges):
        inside = [(max(p), top(p) == y) for p, y in zip(probs, labels, strict=True) if low < max(p) <= high]
        if inside:
            confidence = sum(c for c, _ in inside) / len(inside)
            correct = sum(ok for _, ok in inside) / len(inside)
            total += len(inside) / len(labels) * abs(confidence - correct)
    return total


@settings(max_examples=150)
@given(predictions())
def test_every_metric_equals_its_slow_loop(case):
    probs, labels = case
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert metrics.accuracy(probs, labels) == pytest.approx(slow_accuracy(probs, labels))
        recalls = slow_recalls(probs, labels)
        assert metrics.balanced_accuracy(probs, labels) == pytest.approx(sum(recalls) / len(recalls))
        assert metrics.macro_f1(probs, labels) == pytest.approx(slow_macro_f1(probs, labels))
        assert metrics.macro_auc(probs, labels) == pytest.approx(slow_macro_auc(probs, labels))
        assert metrics.expected_calibration_error(probs, labels) == pytest.approx(slow_ece(probs, labels))
    slow = [[sum(y == i and top(p) == j for p, y in zip(probs, labels, strict=True)) for j in range(probs.shape[1])]
            for i in range(probs.shape[1])]  # fmt: skip
    assert metrics.confusion(probs, labels).tolist() == slow


@pytest.mark.parametrize(("classes", "absent"), [(2, ()), (8, ()), (8, (0, 5))])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_metric_equals_scikit_learn(classes, absent, dtype):
    rng = np.random.default_rng(classes)
    labels = rng.choice([c for c in range(classes) if c not in absent], size=500)
    logits = rng.normal(size=(500, classes)) + 1.5 * np.eye(classes)[labels]
    probs = (np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)).astype(dtype)
    guesses, present = probs.argmax(axis=1), np.unique(labels)
    assert metrics.accuracy(probs, labels) == pytest.approx((guesses == labels).mean())
    balanced = recall_score(labels, guesses, labels=present, average="macro")
    assert metrics.balanced_accuracy(probs, labels) == pytest.approx(balanced)
    f1 = f1_score(labels, guesses, labels=present, average="macro")
    assert metrics.macro_f1(probs, labels) == pytest.approx(f1)
    auc = np.mean([roc_auc_score(labels == c, probs[:, c]) for c in present])
    assert metrics.macro_auc(probs, labels) == pytest.approx(auc)
    expected = confusion_matrix(labels, guesses, labels=range(classes))
    assert (metrics.confusion(probs, labels) == expected).all()


@pytest.mark.parametrize("metric", ALL)
def test_no_images_means_none(metric):
    assert metric(np.zeros((0, 3)), np.zeros(0, dtype=np.int64)) is None


def test_a_single_class_has_no_auc_but_has_the_rest():
    probs, labels = np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([0, 0])
    assert metrics.macro_auc(probs, labels) is None
    assert metrics.accuracy(probs, labels) == 0.5
    assert metrics.balanced_accuracy(probs, labels) == 0.5
    assert metrics.macro_f1(probs, labels) == pytest.approx(2 / 3)


def test_ties_go_to_the_lowest_index():
    probs = np.full((2, 3), 1 / 3)
    assert metrics.predicted(probs).tolist() == [0, 0]
    assert metrics.accuracy(probs, np.array([0, 1])) == 0.5
    assert metrics.macro_auc(probs, np.array([0, 1])) == 0.5


def test_perfect_and_confident_predictions():
    labels = np.array([0, 1, 2, 1])
    probs = np.eye(3)[labels]
    for metric in (metrics.accuracy, metrics.balanced_accuracy, metrics.macro_auc, metrics.macro_f1):
        assert metric(probs, labels) == 1
    assert metrics.expected_calibration_error(probs, labels) == 0
    assert metrics.expected_calibration_error(probs, (labels + 1) % 3) == 1


def test_confidence_just_above_one_still_has_a_bin():
    probs = np.array([[1.0 + 1e-6, 0.0]], dtype=np.float32)
    assert metrics.expected_calibration_error(probs, np.array([0])) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("metric", ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_predictions_that_are_not_numbers_are_the_methods_fault(metric, bad):
    probs = np.array([[0.5, 0.5], [bad, 0.5]])
    with pytest.raises(MethodError, match="1 of 2 predictions") as caught:
        metric(probs, np.array([0, 1]))
    assert caught.value.code == "nan_predictions"


def test_logits_are_not_taken_for_probabilities():
    with pytest.raises(MethodError) as caught:
        metrics.expected_calibration_error(np.array([[4.0, -2.0]]), np.array([0]))
    assert caught.value.code == "not_probabilities"


@pytest.mark.parametrize("metric", ALL)
@pytest.mark.parametrize(
    ("probs", "labels"),
    [
        (np.ones((2, 2)) / 2, np.array([0])),
        (np.ones(2), np.array([0, 1])),
        (np.ones((2, 2)) / 2, np.array([0, 2])),
        (np.ones((2, 2)) / 2, np.array([-1, 0])),
    ],
)
def test_mismatched_shapes_and_labels_are_refused(metric, probs, labels):
    with pytest.raises(ValueError):
        metric(probs, labels)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_any_integer_labels_will_do(dtype):
    classes = 20  # 19 × 20 does not fit into uint8
    labels = np.arange(classes).astype(dtype)
    counts = metrics.confusion(np.eye(classes), labels)
    assert (counts == np.eye(classes)).all()


def test_wilson_interval_of_a_textbook_case():
    low, high = metrics.wilson_interval(8, 10)
    assert (low, high) == (pytest.approx(0.4901625, abs=1e-6), pytest.approx(0.9433178, abs=1e-6))
    assert metrics.wilson_interval(0, 0) is None
    assert metrics.wilson_interval(0, 10)[0] == 0
    assert metrics.wilson_interval(10, 10)[1] == 1
    with pytest.raises(ValueError):
        metrics.wilson_interval(3, 2)


@given(st.integers(1, 10_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_bounds_solve_the_score_equation(case):
    k, n = case
    low, high = metrics.wilson_interval(k, n)
    assert 0 <= low <= k / n <= high <= 1
    for bound in (low, high):  # |k/n - p| = z √(p (1-p) / n) defines the interval
        assert abs(k / n - bound) == pytest.approx(metrics.Z_95 * math.sqrt(bound * (1 - bound) / n), abs=1e-9)


def slow_paired_interval(lost, won, n):
    """The four cells with half an image more in each; mean and variance of the difference, image by image."""
    cells = {(1, 0): lost + 0.5, (0, 1): won + 0.5, (1, 1): n - lost - won + 0.5, (0, 0): 0.5}
    total = sum(cells.values())
    mean = sum(weight * (second - first) for (first, second), weight in cells.items()) / total
    square = sum(weight * (second - first - mean) ** 2 for (first, second), weight in cells.items()) / total
    half = metrics.Z_95 * math.sqrt(square / total)
    return max(mean - half, -1), min(mean + half, 1)


@given(st.tuples(st.integers(0, 500), st.integers(0, 500), st.integers(0, 5000)))
def test_the_paired_interval_is_the_slow_one(case):
    lost, won, same = case
    found = metrics.paired_interval(lost, won, lost + won + same)
    if lost + won + same == 0:
        assert found is None
        return
    assert found == pytest.approx(slow_paired_interval(lost, won, lost + won + same), abs=1e-12)
    low, high = metrics.paired_interval(won, lost, lost + won + same)
    assert found == pytest.approx((-high, -low), abs=1e-12), "the two models change places"
    assert -1 <= found[0] < found[1] <= 1


def test_the_paired_interval_of_few_images():
    assert metrics.paired_interval(0, 0, 50)[0] < 0 < metrics.paired_interval(0, 0, 50)[1]
    assert metrics.paired_interval(4, 0, 100)[1] > 0 > metrics.paired_interval(5, 0, 100)[1]
    for lost, won, n in ((-1, 0, 5), (0, -1, 5), (3, 3, 5)):
        with pytest.raises(ValueError):
            metrics.paired_interval(lost, won, n)


def test_the_paired_interval_covers_the_truth_as_often_as_it_says():
    """Simulated in float64. Where few images differ it is too wide, with very few images in all a little too narrow."""
    rng, draws, covered = np.random.default_rng(0), 20_000, []
    for n in (20, 50, 200):
        for lost, won in ((0.01, 0.01), (0.05, 0.05), (0.1, 0.02), (0.02, 0.2), (0.2, 0.2), (0.4, 0.4)):
            pairs, counts = np.unique(
                rng.multinomial(n, [lost, won, 1 - lost - won], size=draws)[:, :2], axis=0, return_counts=True
            )
            intervals = [metrics.paired_interval(*pair, n) for pair in pairs.tolist()]
            inside = [low <= won - lost <= high for low, high in intervals]
            covered.append(float(counts @ inside) / draws)
            if lost == won:  # nobody is harmed: so often would it be said all the same, instead of 2.5 %
                assert counts @ [high < 0 for _, high in intervals] / draws < 0.035
    assert min(covered) > 0.92 and sum(covered) / len(covered) > 0.95


# --- the same for balanced accuracy and AUC --------------------------------------------------------------


def slow_gains(ours, theirs, labels, c):
    """For each image the share of pairs with the other side that one model orders better than the other, class c."""

    def share(scores, i):
        positive = labels[i] == c
        others = scores[labels != c] if positive else scores[labels == c]
        wins = [(scores[i] > o) + (scores[i] == o) / 2 for o in others]
        return np.mean(wins) if positive else 1 - np.mean(wins)

    return np.array([share(ours[:, c], i) - share(theirs[:, c], i) for i in range(len(labels))])


def test_one_class_of_each_is_the_paired_interval():
    """With one class present balanced accuracy is accuracy."""
    ours, theirs = np.array([1, 1, 0, 0, 1, 1]) > 0, np.array([1, 0, 1, 1, 1, 1]) > 0
    found = metrics.paired_balanced_interval(ours, theirs, np.full(6, 2))
    assert found == pytest.approx(metrics.paired_interval(2, 1, 6))
    assert metrics.paired_balanced_interval(ours[:0], theirs[:0], np.zeros(0, int)) is None


def test_the_interval_of_the_auc_is_around_the_difference():
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 3, 400)
    truth = labels[:, None] == np.arange(3)
    ours, theirs = (rng.dirichlet(np.ones(3), 400) + strength * truth for strength in (0.5, 0.2))
    low, high = metrics.paired_auc_interval(ours, theirs, labels)
    difference = metrics.macro_auc(ours, labels) - metrics.macro_auc(theirs, labels)
    assert low < difference < high and low > 0 and high - low < 0.2
    assert metrics.paired_auc_interval(theirs, ours, labels) == pytest.approx((-high, -low))
    gains = slow_gains(ours, theirs, labels, 1)
    placed = metrics._placements(ours[:, 1], labels == 1) - metrics._placements(theirs[:, 1], labels == 1)
    assert placed == pytest.approx(gains)
    assert metrics.paired_auc_interval(ours, theirs, np.zeros(400, int)) is None, "one class has no AUC"


def test_one_image_of_a_class_proves_nothing():
    labels = np.array([0] + [1] * 60)
    ours = np.where(labels[:, None] == np.arange(2), 0.1, 0.9)[: len(labels)].astype(float)
    ours[1:] = ours[1:, ::-1]  # wrong about the only image of class 0, right about all others
    theirs = (labels[:, None] == np.arange(2)).astype(float)
    right = [probs.argmax(1) == labels for probs in (ours, theirs)]
    assert metrics.paired_balanced_interval(*right, labels)[1] > 0
    assert metrics.paired_auc_interval(ours, theirs, labels)[1] > 0


@pytest.mark.parametrize("strengths", [(1.5, 1.2), (1.5, 1.5)])
def test_intervals_of_other_metrics_cover_the_truth_as_often_as_they_say(strengths):
    """Two models of known quality on the same images, whose scores go together; three classes, one of them rare."""
    rng, draws = np.random.default_rng(0), 300

    def models(n):
        labels = rng.choice(3, n, p=[0.6, 0.3, 0.1])
        shared, truth = rng.normal(size=(n, 3)), labels[:, None] == np.arange(3)
        return *(shared + 0.7 * rng.normal(size=(n, 3)) + strength * truth for strength in strengths), labels

    def intervals(ours, theirs, labels):
        right = [scores.argmax(1) == labels for scores in (ours, theirs)]
        return metrics.paired_balanced_interval(*right, labels), metrics.paired_auc_interval(ours, theirs, labels)

    ours, theirs, labels = models(100_000)
    truth = [score(ours, labels) - score(theirs, labels) for score in (metrics.balanced_accuracy, metrics.macro_auc)]
    drawn = [intervals(*models(120)) for _ in range(draws)]
    for metric in range(2):
        covered = np.mean([found[metric][0] <= truth[metric] <= found[metric][1] for found in drawn])
        harmed = np.mean([found[metric][1] < 0 for found in drawn])
        assert 0.9 <= covered <= 0.995 and harmed <= 0.05, (metric, covered, harmed)
