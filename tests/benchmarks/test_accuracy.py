"""Both paths over seeds, on tiny data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import accuracy

TINY = """
quick = true
model = "resnet8"
clients = 2
seeds = [0, 1]
methods = ["ensemble:class_weighted"]
baselines = ["local_only"]
[data]
name = "cells"
train_size = 80
test_size = 40
[training]
recipe = "modern"
epochs = 1
"""


@pytest.mark.slow
def test_every_seed_is_run_every_way_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "tiny.toml", tmp_path / "deep" / "accuracy.json"
    file.write_text(TINY)
    monkeypatch.setattr("sys.argv", ["accuracy", str(file), "--out", str(out)])
    accuracy.main()
    found = json.loads(out.read_text())
    assert [(r["seed"], r["way"], r["method"]) for r in found["rows"]] == [
        (seed, way, method)
        for seed in (0, 1)
        for way in (accuracy.PLAIN, accuracy.AGAIN, accuracy.FAST)
        for method in ("local_only", "ensemble:class_weighted")
    ]
    assert all(0 <= value <= 1 for row in found["rows"] for value in row["accuracy"].values())
    capsys.readouterr()
    accuracy.main()
    assert capsys.readouterr().out.startswith("stored") and json.loads(out.read_text()) == found  # nothing to do
    file.write_text(TINY.replace("seeds = [0, 1]", "seeds = [1, 2]"))
    accuracy.main()
    rows = json.loads(out.read_text())["rows"]
    assert rows[:12] == found["rows"] and {row["seed"] for row in rows[12:]} == {2}  # only what was missing
    file.write_text(TINY.replace("train_size = 80", "train_size = 60"))
    accuracy.main()
    assert {row["seed"] for row in json.loads(out.read_text())["rows"]} == {0, 1}  # of other settings: begun anew
