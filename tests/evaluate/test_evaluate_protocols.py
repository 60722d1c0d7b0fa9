"""Which images count for which client, and what is reported on them."""

import json
import subprocess
import sys

import numpy as np
import pytest

from fedbicross.errors import MethodError
from fedbicross.evaluate import METRICS, PROTOCOLS, metrics, protocols
from fedbicross.evaluate.protocols import TestSet, by_patient, compare_client, score_client, score_patients, subsets

LABELS = np.array([0, 1, 2, 0, 1, 2, 0])
OWNER = np.array([0, 0, 1, 1, -1, -1, 0])
TEST = TestSet(LABELS, OWNER)


def random_probs(n, classes, seed=0):
    return np.random.default_rng(seed).dirichlet(np.ones(classes), size=n)


def test_submodules_load_without_torch_and_the_names_without_numpy():
    code = (
        "import sys, fedbicross.evaluate as e; assert 'numpy' not in sys.modules; e.PROTOCOLS; e.summary;"
        "assert 'numpy' not in sys.modules; e.protocols; sys.exit('torch' in sys.modules or 'sklearn' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert protocols.PROTOCOLS == PROTOCOLS == ("global", "matched", "label_set")


def test_a_thousand_classes_do_not_fill_the_disk():
    """With confusion matrices every client of a row would take megabytes, and a run hundreds of them."""

    def scores(classes):
        rng = np.random.default_rng(0)
        labels = rng.integers(0, classes, 2 * classes)
        test = TestSet(labels, np.zeros(len(labels), int))
        return score_client(rng.dirichlet(np.ones(classes), len(labels)), test, 0, np.ones(classes, int))

    found = scores(1000)
    assert len(json.dumps(found)) < 5_000
    assert set(found["confusion"].values()) == {None}
    assert found["accuracy"]["matched"] is not None
    assert np.shape(scores(protocols.MOST_CLASSES)["confusion"]["global"]) == (protocols.MOST_CLASSES,) * 2


def test_masks_by_hand():
    masks = subsets(TEST, 0, np.array([5, 0, 1]))
    assert list(masks) == list(PROTOCOLS)
    assert masks["global"].all()
    assert masks["matched"].tolist() == [True, True, False, False, False, False, True]
    assert masks["label_set"].tolist() == [True, False, True, True, False, True, True]
    assert all(mask.dtype == bool for mask in masks.values())


def test_images_of_nobody_are_matched_to_no_client():
    owned = sum(subsets(TEST, i, np.ones(3))["matched"].sum() for i in range(3))
    assert owned == (OWNER >= 0).sum()
    with pytest.raises(ValueError, match="nobody"):
        subsets(TEST, -1, np.ones(3))


@pytest.mark.parametrize("client", [0, 1, 2])
def test_scores_are_the_metrics_of_the_selected_images(client):
    counts = np.array([[3, 0, 1], [0, 2, 2], [1, 0, 0]])[client]
    probs = random_probs(7, 3)
    scores = score_client(probs, TEST, client, counts)
    selected = {
        "global": list(range(7)),
        "matched": [j for j in range(7) if OWNER[j] == client],
        "label_set": [j for j in range(7) if counts[LABELS[j]] > 0],
    }
    functions = {
        "accuracy": metrics.accuracy,
        "balanced_accuracy": metrics.balanced_accuracy,
        "macro_auc": metrics.macro_auc,
        "macro_f1": metrics.macro_f1,
        "ece": metrics.expected_calibration_error,
    }
    assert tuple(functions) == METRICS
    for protocol, rows in selected.items():
        for name, function in functions.items():
            assert scores[name][protocol] == function(probs[rows], LABELS[rows]), (name, protocol)
        assert scores["test_images"][protocol] == len(rows)
        if rows:
            assert np.array(scores["confusion"][protocol]).shape == (3, 3)
            assert np.sum(scores["confusion"][protocol]) == len(rows)
            low, high = scores["accuracy_interval"][protocol]
            assert low <= scores["accuracy"][protocol] <= high


def test_a_client_without_test_images_or_training_classes_gets_none():
    scores = score_client(random_probs(7, 3), TEST, 9, np.zeros(3, dtype=int))
    for field in (*METRICS, "accuracy_interval", "confusion"):
        assert scores[field]["matched"] is None and scores[field]["label_set"] is None
        assert scores[field]["global"] is not None
    assert scores["test_images"] == {"global": 7, "matched": 0, "label_set": 0}


def test_a_single_class_client_has_accuracy_but_no_auc():
    scores = score_client(random_probs(7, 3), TEST, 0, np.array([9, 0, 0]))
    assert scores["macro_auc"]["label_set"] is None
    assert scores["accuracy"]["label_set"] is not None


def test_scores_survive_strict_json():
    probs = random_probs(7, 3).astype(np.float32)
    scores = score_client(probs, TEST, 2, np.array([1, 0, 0]))
    assert json.loads(json.dumps(scores, allow_nan=False)) == scores


def test_bad_predictions_are_found_even_where_no_protocol_but_global_sees_them():
    probs = random_probs(7, 3)
    probs[4] = np.nan
    with pytest.raises(MethodError) as caught:
        score_client(probs, TEST, 0, np.array([1, 0, 0]))
    assert caught.value.code == "nan_predictions"


def test_mismatched_shapes_are_refused():
    with pytest.raises(ValueError, match="class counts"):
        score_client(random_probs(7, 3), TEST, 0, np.ones(4))
    with pytest.raises(ValueError, match="both be"):
        TestSet(LABELS, OWNER[:-1])
    with pytest.raises(ValueError, match="labels"):
        score_client(random_probs(6, 3), TEST, 0, np.ones(3))


def test_two_models_image_by_image():
    """Client 0 has images 0, 1 and 6; only those count."""
    alone, ours = np.eye(3)[[0, 1, 2, 0, 1, 2, 1]], np.eye(3)[[1, 1, 0, 1, 0, 0, 0]]
    found = compare_client(ours, alone, TEST, 0)
    assert (found["images"], found["lost"], found["won"]) == (3, 1, 1)
    assert found["interval"] == list(metrics.paired_interval(1, 1, 3))
    assert compare_client(alone, alone, TEST, 1)["lost"] == 0
    assert compare_client(ours, alone, TEST, 2) is None, "a client without test images"
    assert json.loads(json.dumps(found)) == found
    mine = np.array([0, 1, 6])
    right = [probs.argmax(1)[mine] == LABELS[mine] for probs in (ours, alone)]
    assert found["intervals"] == {
        "balanced_accuracy": list(metrics.paired_balanced_interval(*right, LABELS[mine])),
        "macro_auc": list(metrics.paired_auc_interval(ours[mine], alone[mine], LABELS[mine])),
    }


def test_a_patient_is_answered_by_the_mean_of_the_images():
    test = TestSet(LABELS, np.array([0, 0, 1, 1, 1, 1, 0]), np.array(["b", "b", "a", "a", "a", "c", "b"]))
    probs = random_probs(7, 3)
    answers, patients = by_patient(probs, test)
    rows = {"a": [2, 3, 4], "b": [0, 1, 6], "c": [5]}
    assert answers == pytest.approx(np.stack([probs[rows[name]].mean(0) for name in "abc"]))
    assert patients.labels.tolist() == [0, 0, 2], "of several labels the most frequent, of equals the lowest"
    assert patients.owner.tolist() == [1, 0, 1]
    found = score_patients(probs, test, 1, np.array([1, 0, 0]))
    expected = score_client(answers, patients, 1, np.array([1, 0, 0]))
    assert found["test_patients"] == {"global": 3, "matched": 2, "label_set": 2}
    assert "confusion" not in found and "test_images" not in found
    assert all(found[metric] == expected[metric] for metric in METRICS)
    assert score_patients(probs, TEST, 1, np.array([1, 0, 0])) is None, "nobody knows whose images these are"
    with pytest.raises(ValueError, match="patients"):
        TestSet(LABELS, OWNER, np.array(["a"]))


def test_many_classes_leave_no_confusion():
    labels = np.arange(65)
    test = TestSet(labels, np.zeros(65, int))
    found = score_client(random_probs(65, 65), test, 0, np.ones(65))
    assert set(found["confusion"].values()) == {None} and found["accuracy"]["matched"] is not None
    assert len(json.dumps(found)) < 2000
