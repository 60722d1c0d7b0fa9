"""Each rule of the verdict on a stored results file where the rule before it was wrong.

The rules before: rows whose role is not "method" were passed over, accuracy alone counted, whoever was lower at all was
harmed, patients from elsewhere did not count, and a run in which nothing was learned was "level with training alone".
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedbicross.report.html import render
from fedbicross.report.metric import judged_by
from fedbicross.report.summary import LEVEL, summarise
from fedbicross.report.verdict import judge

HERE = Path(__file__).parent / "stored"
RESULTS = Path(__file__).parents[2] / "results"


def load(folder, name):
    return json.loads((folder / name).read_text(encoding="utf-8"))


def verdict(results, metric=None):
    results = judged_by(results, metric)
    return judge(results, summarise(results))


def by_role(results):
    """The gain at home, in accuracy, that the old verdict went by: the largest of the rows whose role is "method"."""
    gains = {item.method: item.gain.mean for item in summarise(results) if item.role == "method" and not item.is_local}
    return max(gains.values())


def test_baselines_that_share_count_too():
    results = load(RESULTS, "blood-iid/results.json")
    assert by_role(results) <= -LEVEL, "so it was not worth it"
    found = verdict(results)
    assert (found.kind, found.best.method, found.best.role) == ("good", "ensemble", "baseline")


def test_a_large_difference_in_auc_is_not_level():
    results = load(HERE, "same-accuracy.json")
    rows = {item.method: item for item in summarise(results)}
    assert {round(item.score["matched"].mean, 3) for item in rows.values()} == {0.75}, "so everything was level"
    areas = {name: item.scores["macro_auc"]["matched"].mean for name, item in rows.items()}
    assert areas["local_only"] < 0.4 and areas["fedavg"] > 0.9
    found = verdict(results)
    assert found.badge == "Train longer" and "but in AUC fedavg gains 60.8 points (to 95.2" in found.headline
    assert found.headline.startswith("In accuracy no model learned more than the most frequent class")
    assert found.beside == (
        "Beside accuracy, for own patients: balanced accuracy 50.0\u00a0% alone, 50.0\u00a0% with fedavg; "
        "AUC 34.5\u00a0% alone, 95.2\u00a0% with fedavg.",
    )
    found = verdict(results, "macro_auc")
    assert (found.kind, found.best.method) == ("good", "fedavg")
    assert "fedavg gains 60.8 points of AUC for a hospital’s own patients" in found.headline
    assert "harms no hospital" in found.headline


def test_a_method_that_is_level_in_accuracy_may_gain_in_auc():
    results = load(RESULTS, "cxr-dirichlet-0.1/results.json")
    assert abs(by_role(results)) < LEVEL, "so it brought nothing"
    found = verdict(results)
    assert any("AUC 73.7\u00a0% alone, 97.0\u00a0% with falcon:personal" in line for line in found.beside)
    by_area = verdict(results, "macro_auc")
    assert by_area.kind == "good" and "falcon:personal gains 23.3 points of AUC" in by_area.headline


def test_a_gain_in_auc_is_not_told_without_the_loss_in_accuracy():
    found = verdict(load(RESULTS, "cxr-calibrated/results.json"), "macro_auc")
    assert found.kind == "good" and "though it loses 10.8 points of accuracy and 1.1 points of" in found.headline


def test_nothing_learned_is_not_level():
    results = load(HERE, "nothing-learned.json")
    assert abs(by_role(results)) < LEVEL, "so it brought nothing"
    for metric in ("accuracy", "balanced_accuracy"):
        found = verdict(results, metric)
        assert found.badge == "Nothing learned" and "train longer" in found.headline
    floor = next(row for row in results["rows"] if row["method"] == "majority")
    lucky = [row for row in results["rows"] if row["accuracy"]["global"] > floor["accuracy"]["global"] + 0.01]
    assert lucky, "one constant answer is better than another for patients from elsewhere; that is no learning"


def test_patients_from_elsewhere_count():
    results = load(RESULTS, "demo/results.json")
    assert by_role(results) < LEVEL, "so it brought nothing"
    found = verdict(results)
    assert found.kind == "good" and "costs nobody anything at home" in found.headline
    assert "points for patients from elsewhere" in found.headline


def test_lower_by_chance_is_not_harmed():
    results = load(RESULTS, "demo/results.json")
    told = [item for item in summarise(results) if item.shares and item.lower > item.clearly_harmed]
    assert told, "a row that the raw count calls more harmful than the interval does"
    words = [f"{item.harmed} of {item.judged}" for item in told]
    page = render(results)
    assert "lower by chance" in page and all(word in page for word in words)


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*/results.json")), ids=lambda file: file.parent.name)
def test_every_stored_file_is_judged_by_every_metric(file):
    """Whatever an older version stored."""
    results = json.loads(file.read_text(encoding="utf-8"))
    for metric in ("accuracy", "balanced_accuracy", "macro_auc"):
        found = verdict(results, metric)
        assert found.best is not None and found.best.metric == metric and found.beside
    assert "</html>" in render(results)
