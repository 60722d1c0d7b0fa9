"""Accuracy after each round: charts, numbers and lines, from one seed or several, and nothing from one-shot methods."""

from __future__ import annotations

import pytest

from fedbicross.report import rounds
from fedbicross.report.html import render


def with_rounds(results, method, *by_seed):
    rows = [row for row in results["rows"] if row["method"] == method]
    for row, values in zip(rows, by_seed, strict=True):
        row["accuracy_by_round"] = [
            {"round": at, "accuracy": {"global": value / 2, "matched": value, "label_set": None}}
            for at, value in enumerate(values, start=1)
        ]
    return results


def test_means_over_seeds(make_results):
    results = with_rounds(make_results(seeds=2), "fedisca", [0.5, 0.6], [0.7, 0.8])
    assert rounds.curves(results) == {
        "fedisca": {
            1: {"global": pytest.approx(0.3), "matched": pytest.approx(0.6), "label_set": None},
            2: {"global": pytest.approx(0.35), "matched": pytest.approx(0.7), "label_set": None},
        }
    }
    assert rounds.lines(results) == ["fedisca: matched accuracy in % by rounds: 60.0 after 1, 70.0 after 2"]


def test_many_rounds_name_landmarks_and_the_last_in_words_and_all_in_the_chart(make_results):
    results = with_rounds(make_results(), "fedisca", [at / 200 for at in range(1, 74)])
    results = with_rounds(results, "fedbicross", [0.5, 0.6, 0.7])
    found = rounds.section(results)
    assert found["columns"] == [1, 2, 3, 5, 10, 20, 30, 50, 73]
    matched = dict(found["tables"])["matched"]
    assert matched[0] == ["fedisca", "0.5", "1.0", "1.5", "2.5", "5.0", "10.0", "15.0", "25.0", "36.5"]
    assert matched[1] == ["fedbicross", "50.0", "60.0", "70.0", "", "", "", "", "", ""]
    assert len(found["charts"]) == 2, "a protocol without a number has no chart"
    page = render(results)
    assert "After each round" in page and "none was chosen by its accuracy" in page


def test_one_shot_runs_have_no_such_part(make_results):
    results = make_results()
    assert rounds.curves(results) == {} and rounds.lines(results) == [] and not rounds.section(results)["charts"]
    assert "After each round" not in render(results)


@pytest.mark.parametrize("broken", [None, "x", [1], [{}], [{"round": "one"}], [{"round": 1, "accuracy": "high"}]])
def test_damaged_entries_do_not_break_the_page(make_results, broken):
    results = make_results()
    results["rows"][4]["accuracy_by_round"] = broken
    assert "<h1>" in render(results)


def test_architectures_are_named_where_they_differ(make_results):
    results = make_results(clients=3)
    for entry, model in zip(results["clients"]["0"], ["resnet18", "vgg8", "<b>"], strict=True):
        entry["model"] = model
    results["config"]["model"] = "resnet18"
    results["training"]["0"]["client-1"]["model"] = "vgg8"
    page = render(results)
    assert "Architectures differ. resnet18: client-0; vgg8: client-1; &lt;b&gt;: client-2." in page
    assert "resnet18; clients also &lt;b&gt;, vgg8" in page and 'data-label="architecture">vgg8</td>' in page
    for entry in results["clients"]["0"]:
        entry["model"] = "resnet18"
    page = render(results)
    assert "Architectures differ" not in page and "clients also" not in page
