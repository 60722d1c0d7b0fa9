"""Each rule of the verdict on a stored results file where the rule before it was wrong.

The rules before: rows whose role is not "method" were passed over, accuracy alone counted, whoever was lower at all was
harmed, patients from elsewhere did not count, and a run in which nothing was learned was "level with training alone".
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedbicross.report import terminal
from fedbicross.report.html import render
from fedbicross.report.metric import judged_by
from fedbicross.report.summary import LEVEL, summarise
from fedbicross.report.verdict import judge, row_verdict

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
    results = load(HERE, "lower-by-chance.json")
    assert by_role(results) < LEVEL, "so it brought nothing"
    found = verdict(results)
    assert (found.kind, found.best.method) == ("good", "primum")
    assert "costs nobody anything at home" in found.headline
    assert "gains 7.3 points for patients from elsewhere" in found.headline


def raw_count(results):
    """The same rows without their intervals: whoever is lower at all is harmed."""
    left_out = ("clearly_harmed_clients", "clearly_helped_clients")
    rows = [{key: value for key, value in row.items() if key not in left_out} for row in results["rows"]]
    return {**results, "rows": rows}


def test_lower_by_chance_is_not_harmed():
    results = load(HERE, "lower-by-chance.json")
    before = verdict(raw_count(results))
    assert before.kind == "bad" and before.best.method == "primum" and before.best.harmed == 2
    found = verdict(results)
    assert found.kind == "good" and found.best.harmed == 0
    assert "(2 of 5 lower by chance)" in found.headline, "the raw count is told"
    words = {item.method: row_verdict(item)[-1] for item in summarise(results)}
    assert words["primum"] == "0 of 5 clients harmed, 2 lower by chance"
    assert words["ensemble:consensus"] == "harms 4 of 5 clients", "beyond chance"


STORED = sorted([*RESULTS.glob("*/results.json"), *HERE.glob("*.json")])


@pytest.mark.parametrize("file", STORED, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_stored_file_is_judged_by_every_metric(file):
    """Whatever an older version stored; and the terminal ends with the sentence, which it once did not have."""
    results = json.loads(file.read_text(encoding="utf-8"))
    for metric in ("accuracy", "balanced_accuracy", "macro_auc"):
        found = verdict(results, metric)
        assert found.best is not None and found.best.metric == metric and found.beside
        said = " ".join(terminal.text(judged_by(results, metric)).split())
        assert said.endswith(f"verdict: {' '.join(found.headline.split())}")
    assert "</html>" in render(results)
