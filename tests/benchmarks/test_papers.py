"""Runs of the papers' settings: what is stored of them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from benchmarks import papers
from fedbicross.runs.progress import PlainProgress

CONFIG = """
clients = 2
model = "resnet8"
quick = true
methods = ["local_only"]
baselines = ["majority"]

[data]
name = "cells"
dir = "{folder}"
image_size = 16
train_size = 60
test_size = 30

[training]
recipe = "modern"
epochs = 2
"""


def test_a_run_is_stored_without_weights_and_without_the_place_of_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.toml").write_text(CONFIG.format(folder=tmp_path.as_posix()))
    given = [str(tmp_path / "small.toml"), "--out", str(tmp_path / "out"), "--models", str(tmp_path / "models")]
    monkeypatch.setattr("sys.argv", ["papers", *given, "--set", "device=cpu"])
    papers.main()
    text = (tmp_path / "out/small.json").read_text()
    results = json.loads(text)
    assert results["complete"] and [row["method"] for row in results["rows"]] == ["majority", "local_only"]
    assert results["config"]["data"]["dir"] is None
    assert tmp_path.as_posix() not in text
    assert sorted(file.suffix for file in (tmp_path / "out").iterdir()) == [".csv", ".json"]
    assert "local_only" in capsys.readouterr().out
    papers.main()  # nothing is trained again
    assert json.loads((tmp_path / "out/small.json").read_text())["rows_sha256"] == results["rows_sha256"]


def test_every_case_of_a_file_is_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int]] = []
    monkeypatch.setattr(papers, "run", lambda name, config, models, out: made.append((name, config.clients)))
    file = tmp_path / "several.toml"
    cases = "[case.a]\n[case.b]\nclients = 3\n[case.c]\nclients = 4\n"
    file.write_text(CONFIG.format(folder=tmp_path.as_posix()) + cases)
    monkeypatch.setattr("sys.argv", ["papers", str(file), "--out", str(tmp_path)])
    papers.main()
    assert made == [("a", 2), ("b", 3), ("c", 4)]
    monkeypatch.setattr("sys.argv", ["papers", str(file), "--out", str(tmp_path), "--case", "c"])
    papers.main()
    assert made[3:] == [("c", 4)]


def test_progress_is_kept_with_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(PlainProgress, "say", lambda self, message: said.append(message))
    monkeypatch.setattr(papers.time, "perf_counter", iter([10.0, 11.0, 12.5, 17.0, 17.5, 30.0, 32.0]).__next__)
    update = papers.Stamped(tmp_path / "run.csv").start("stage, with a comma", 40)
    for done in (1, 2, 30, 40):
        update(done, "a note")
    papers.Stamped(tmp_path / "run.csv").start("again", 1)(1, "")  # a second call adds to the file
    with (tmp_path / "run.csv").open(newline="") as file:
        stamps = [tuple(line.values()) for line in csv.DictReader(file)]
    # The first, then one after five seconds, then the last.
    assert stamps == [
        ("1", "1.0", "stage, with a comma", "1", "40"),
        ("1", "7.0", "stage, with a comma", "30", "40"),
        ("1", "7.5", "stage, with a comma", "40", "40"),
        ("2", "2.0", "again", "1", "1"),
    ]
    assert said[-2] == "stage, with a comma: 40/40  a note"
