"""What Python gets from a run: a dict that shows itself."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import sys
from pathlib import Path

import pandas
import pytest

from cli.console import results as stored
from fedbicross import Results
from fedbicross.errors import ConfigError, RunError
from small import refuses


@pytest.fixture
def found(finished: Path) -> Results:
    return Results.load(finished)


def test_it_is_the_dict_that_it_always_was(found: Results, finished: Path) -> None:
    assert isinstance(found, dict) and found == stored(finished)
    assert json.loads(json.dumps(found)) == stored(finished)
    assert {**found}["rows"] is found["rows"] and list(found) == list(stored(finished))
    for same in (copy.copy(found), pickle.loads(pickle.dumps(found))):
        assert type(same) is Results and same == found and same.folder == finished


def test_it_shows_a_table_and_a_verdict(found: Results) -> None:
    text = repr(found)
    assert "local_only" in text and " ".join(text.split()).endswith(f"verdict: {found.verdict}")
    page = found._repr_html_()
    assert found.verdict.replace("'", "&#39;") in page and "<td>fedavg</td>" in page
    assert page.count("<tr>") == 1 + len(found["rows"])


def test_what_a_stranger_wrote_is_text(found: Results) -> None:
    hostile = "<script>alert(1)</script>"
    found["rows"] = [{**row, "method": hostile} for row in found["rows"]]
    assert "<script>" not in found._repr_html_() and "&lt;script&gt;" in found._repr_html_()


def test_tables_are_data_frames_of_numbers(found: Results) -> None:
    table = found.table()
    assert isinstance(table, pandas.DataFrame) and list(table["method"]) == ["local_only", "fedavg"]
    accuracy = {row["method"]: 100 * row["accuracy"]["matched"] for row in found["rows"]}
    assert dict(zip(table["method"], table["matched_percent"], strict=True)) == pytest.approx(accuracy)
    clients = found.table("clients")
    assert set(clients["client"]) == {"client-0", "client-1", "client-2"}
    assert clients[clients["metric"] == "accuracy"]["value"].between(0, 1).all()


def test_without_pandas_only_the_table_is_refused(found: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with refuses(ConfigError, "no_pandas", "pip install pandas"):
        found.table()
    assert found._repr_html_() and repr(found)


def test_the_page_goes_where_it_is_asked_for(found: Results, finished: Path, tmp_path: Path) -> None:
    kept = Results(found, shutil.copytree(finished, tmp_path / "run"))
    (tmp_path / "run" / "report.html").unlink()
    assert kept.report() == tmp_path / "run" / "report.html" and kept.report().is_file()
    loose = Results(found)
    assert loose.report(tmp_path / "page.html").read_bytes().startswith(b"<!DOCTYPE html>")
    with refuses(ConfigError, "no_folder", "say where"):
        loose.report()
    with refuses(RunError, "cannot_write"):
        loose.report(tmp_path / "page.html" / "x.html")
    with refuses(RunError, "results_missing"):
        Results.load(tmp_path / "nowhere")


def test_it_can_be_logged(found: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Path(found.track("tensorboard", tmp_path)).parent == tmp_path
    monkeypatch.setattr("fedbicross.report.track.to_mlflow", lambda results, uri: (results is found, uri))
    assert found.track("mlflow", "sqlite:///runs.db") == (True, "sqlite:///runs.db")
    assert found.track("mlflow") == (True, None)
