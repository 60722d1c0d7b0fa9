"""Files: all written, none half written, and a plain error where results.json is not what it should be."""

from __future__ import annotations

import json
import os

import pytest

from fedbicross.errors import FedBiCrossError, RunError
from fedbicross.report import write_report
from fedbicross.report.diagnosis import image_uri
from small import refuses

PNG = b"\x89PNG\r\n\x1a\n" + b"\x00\x00\x00\rIHDR" + (28).to_bytes(4, "big") * 2 + b"rest"
NAMES = ["report.html", "tables/results.md", "tables/results.csv", "tables/results.tex", "tables/clients.csv"]
NAMES += ["tables/classes.csv"]


@pytest.fixture
def run_dir(tmp_path, make_results):
    results = {key: value for key, value in make_results().items() if key != "rows_sha256"}  # a made-up one
    (tmp_path / "results.json").write_text(json.dumps(results))
    return tmp_path


def test_writes_everything_and_again_the_same(run_dir):
    paths = write_report(run_dir)
    assert paths == [run_dir / name for name in NAMES]
    before = [path.read_bytes() for path in paths]
    assert all(before)
    assert [path.read_bytes() for path in write_report(run_dir)] == before
    assert sorted(path.name for path in run_dir.iterdir()) == ["report.html", "results.json", "tables"]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, "results_missing"),
        (b"", "results_garbled"),
        (b'{"rows": [', "results_garbled"),
        (b"\xff\xfe\x00", "results_garbled"),
        (b"[]", "results_garbled"),
        (b'{"schema": 1}', "results_garbled"),
        (b'{"schema": 1, "rows": {}}', "results_garbled"),
        (b'{"schema": 1, "rows": [3]}', "results_garbled"),
        (b'{"schema": 1, "rows": [{"seed": 0}]}', "results_garbled"),
        (b"[" * 100_000, "results_garbled"),
        (b'{"schema": 1, "rows": [], "x": ' + b"9" * 5000 + b"}", "results_garbled"),
        (b'{"schema": 2, "rows": []}', "results_schema"),
        (b'{"rows": []}', "results_schema"),
    ],
)
def test_bad_results_are_refused_by_code(tmp_path, content, code):
    if content is not None:
        (tmp_path / "results.json").write_bytes(content)
    with refuses(RunError, code):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_folder_for_a_file(tmp_path):
    (tmp_path / "results.json").mkdir()
    with refuses(RunError, "results_unreadable"):
        write_report(tmp_path)


def test_lone_surrogates_can_be_written(run_dir):
    results = json.loads((run_dir / "results.json").read_text())
    results["name"] = results["dataset"]["note"] = results["config"]["run"]["name"] = "\ud800"
    (run_dir / "results.json").write_text(json.dumps(results))
    write_report(run_dir)
    (run_dir / "report.html").read_text(encoding="utf-8")


def test_a_failed_write_keeps_the_old_file(run_dir, monkeypatch):
    (run_dir / "report.html").write_text("old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with refuses(RunError, "cannot_write", "No space left"):
        write_report(run_dir)
    assert (run_dir / "report.html").read_text() == "old"
    assert sorted(entry.name for entry in run_dir.iterdir()) == ["report.html", "results.json"]


def test_pictures_of_the_run_folder_are_embedded(run_dir):
    (run_dir / "a.png").write_bytes(PNG)
    write_report(run_dir)
    page = (run_dir / "report.html").read_text()
    assert page.count('<img src="data:image/png;base64,') == 1 and 'width="168"' in page
    (run_dir / "a.png").unlink()
    write_report(run_dir)
    assert "Picture not shown: the picture is not in the run folder" in (run_dir / "report.html").read_text()


def test_pictures_from_elsewhere_are_not(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (tmp_path / "secret.png").write_bytes(PNG)
    (run_dir / "link.png").symlink_to(tmp_path / "secret.png")
    (run_dir / "text.png").write_text("secret")
    (run_dir / "large.png").write_bytes(PNG + bytes(2_000_000))
    (run_dir / "good.png").write_bytes(PNG)
    names = ["../secret.png", str(tmp_path / "secret.png"), "link.png", "text.png", "large.png", ".", "", None, 3]
    for name in [*names, "a\x00b", "x" * 5000, "good.png/../../secret.png"]:
        assert image_uri(run_dir, name)[0] is None, name
    assert image_uri(run_dir, "good.png")[0].startswith("data:image/png;base64,")
    assert image_uri(None, "good.png")[0] is None


def test_a_report_by_another_metric(run_dir):
    write_report(run_dir, "balanced_accuracy")
    assert "Results: balanced accuracy under three protocols" in (run_dir / "report.html").read_text()
    stored = (run_dir / "tables" / "clients.csv").read_bytes()
    write_report(run_dir)
    assert "Results: accuracy under three protocols" in (run_dir / "report.html").read_text()
    assert (run_dir / "tables" / "clients.csv").read_bytes() == stored, "what was measured does not depend on it"
    with refuses(FedBiCrossError, "metric", "macro_auc"):
        write_report(run_dir, "macro_auk")
