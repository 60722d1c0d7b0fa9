"""`run`, `resume`, `report` and `demo`, from the words typed to the files left behind."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from cli.console import CONFIG, artefacts, call, config_file, console, ok, results, snapshot, timeless, write_npz
from small import later

FILES = ("config.toml", "partition.json", "events.jsonl", "results.json", "report.html", "tables/results.md")


@pytest.mark.slow
def test_run_in_a_process_of_its_own(tmp_path: Path, finished: Path) -> None:
    outcome = console("run", config_file(tmp_path), cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    out = tmp_path / "runs" / "run"  # the default place
    for name in FILES:
        assert (out / name).is_file(), name
    assert outcome.out.splitlines()[-1] == f"report: {Path('runs/run/report.html')}"
    assert "local_only" in outcome.out and "fedavg" in outcome.out and re.search(r"^verdict: \S+", outcome.out, re.M)
    assert max(map(len, outcome.out.splitlines())) <= 100
    assert timeless(results(out)) == timeless(results(finished))
    lines = outcome.err.splitlines()  # progress is plain lines on standard error
    assert "== local_only, seed 0 (method 1 of 2)" in lines and lines[-1] == "all methods: 2/2"
    assert any(line.startswith("training client-0: 1/1") for line in lines)
    assert "testing fedavg: 3/3" in lines
    assert "\x1b" not in outcome.err + outcome.out and "\r" not in outcome.err


def test_flags_override_the_file_and_set_overrides_flags(tmp_path: Path) -> None:
    data = write_npz(tmp_path / "own.npz")
    outcome = call(
        *("run", config_file(tmp_path), "--data", data, "--clients", "2", "--alpha", "5", "--epochs", "2"),
        *("--partition", "dirichlet_plain", "--methods", "majority, local_only", "--model", "resnet8", "--seed", "3"),
        *(
            "--set",
            "training.batch_size=8",
            "--set",
            "seeds=[4]",
            "--set",
            "data.train_size=20",
            "--set",
            "data.test_size=12",
            "--out",
            tmp_path / "mine",
            "--json",
        ),
    )
    assert outcome.code == 0, outcome.err
    found = outcome.json()
    config = found["config"]
    assert (config["name"], config["clients"], config["seeds"]) == ("mine", 2, [4])
    assert (config["training"]["epochs"], config["training"]["batch_size"]) == (2, 8)
    assert (config["partition"]["kind"], config["partition"]["alpha"]) == ("dirichlet_plain", 5.0)
    assert [row["method"] for row in found["rows"]] == ["majority", "local_only"]
    assert {row["seed"] for row in found["rows"]} == {4}
    assert found["dataset"]["train_images"] == 20
    assert tomllib.loads((tmp_path / "mine" / "config.toml").read_text())["clients"] == 2


@pytest.mark.slow
def test_architectures_of_clients_and_rounds_from_the_command_line(tmp_path: Path) -> None:
    args = ["run", config_file(tmp_path), "--methods", "ensemble", "--client-models", " vgg8_bn, resnet8 "]
    found = call(*args, "--out", tmp_path / "mixed", "--json").json()
    assert [entry["model"] for entry in found["clients"]["0"]] == ["vgg8", "resnet8", "vgg8"]
    args = ["run", config_file(tmp_path), "--methods", "fedavg", "--set", "method.fedavg.rounds=2"]
    said = call(*args, "--out", tmp_path / "rounds").out
    assert re.search(r"fedavg: matched accuracy in % by rounds: [\d.]+ after 1, [\d.]+ after 2\n", said), said


def test_baselines_stand_beside_every_method_unless_refused(tmp_path: Path) -> None:
    text = CONFIG.replace("baselines = []\n", "").replace('["local_only", "fedavg"]', '["fedavg"]')
    config = config_file(tmp_path, text)
    both = call("run", config, "--out", tmp_path / "with", "--json").json()
    alone = call("run", config, "--out", tmp_path / "without", "--no-baselines", "--json").json()
    assert [row["method"] for row in both["rows"]] == ["majority", "local_only", "ensemble", "centralised", "fedavg"]
    assert [row["method"] for row in alone["rows"]] == ["fedavg"]
    assert both["rows"][-1]["accuracy"] == alone["rows"][0]["accuracy"]


@pytest.mark.slow
def test_several_seeds_give_a_row_each_and_a_spread(tmp_path: Path) -> None:
    outcome = ok("run", config_file(tmp_path), "--seed", "0", "--seed", "7", "--out", tmp_path / "out")
    rows = results(tmp_path / "out")["rows"]
    found = sorted((row["method"], row["seed"]) for row in rows)
    assert found == [("fedavg", 0), ("fedavg", 7), ("local_only", 0), ("local_only", 7)]
    assert outcome.out.count("±") >= 2, "mean and standard deviation over seeds"


def test_quick_says_what_it_stands_for(tmp_path: Path) -> None:
    more = ("--set", "data.train_size=60", "--set", "data.test_size=30", "--set", "training.epochs=1")
    outcome = ok("run", config_file(tmp_path), "--quick", *more, "--out", tmp_path / "out", "--json")
    first = outcome.err.splitlines()[0]
    assert first.startswith("quick settings") and "model=resnet8, data.train_size=60, " in first
    assert "training.epochs=1" in first, "what counts in the end, in the words of --set"
    assert outcome.json()["config"]["quick"] is True
    assert any("indicative" in warning for warning in outcome.json()["warnings"])


def test_a_run_is_never_replaced_unasked(tmp_path: Path, finished: Path) -> None:
    out = shutil.copytree(finished, tmp_path / "tiny")
    before = snapshot(out)
    refused = call("run", config_file(tmp_path), "--out", out, "--seed", "1")
    assert (refused.code, refused.err.startswith("error[exists]")) == (4, True)
    assert "resume" in refused.err
    assert snapshot(out) == before
    assert call("run", config_file(tmp_path), "--out", out, "--seed", "1", "--overwrite").code == 0
    assert {row["seed"] for row in results(out)["rows"]} == {1}
    assert not list(out.rglob("seed-0")), "the earlier run is gone"


def test_an_odd_name_is_printed_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "[/b] [red]ä :smile:"
    outcome = ok("run", config_file(tmp_path), "--methods", "majority", "--out", out)
    assert outcome.out.splitlines()[0].startswith(f"{out.name}: accuracy")


@pytest.mark.slow
def test_ascii_only_output_is_no_crash(tmp_path: Path) -> None:
    outcome = console(
        *("run", config_file(tmp_path), "--methods", "majority", "--seed", "0", "--seed", "1"),
        *("--out", tmp_path / "ö"),
        env={"PYTHONIOENCODING": "ascii", "LC_ALL": "C"},
    )
    assert outcome.code == 0, outcome.err


def test_resume_continues_to_the_same_results(tmp_path: Path, finished: Path) -> None:
    out = shutil.copytree(finished, tmp_path / "tiny")
    for lost in ("rows", "models", "results.json", "report.html"):
        shutil.rmtree(out / lost) if (out / lost).is_dir() else (out / lost).unlink()
    outcome = ok("resume", out, "--json")
    assert timeless(outcome.json()) == timeless(results(finished)) == timeless(results(out))
    assert artefacts(out) == artefacts(finished)
    assert (out / "report.html").is_file()
    again = call("resume", out)
    assert again.code == 0 and "report:" in again.out
    assert "training" not in again.err, "nothing is left to train"


def test_report_is_written_anew(tmp_path: Path, finished: Path) -> None:
    out = shutil.copytree(finished, tmp_path / "tiny")
    page = (out / "report.html").read_bytes()
    (out / "report.html").unlink()
    shutil.rmtree(out / "tables")
    outcome = ok("report", out)
    paths = [Path(line) for line in outcome.out.splitlines()]
    assert out / "report.html" in paths and out / "tables" / "results.csv" in paths
    assert all(path.is_file() for path in paths)
    assert (out / "report.html").read_bytes() == page
    assert [Path(text) for text in call("report", out, "--json").json()] == paths
    assert out / "tables" / "classes.csv" in paths
    assert call("report", out, "--metric", "macro_auc").code == 0
    assert "Results: AUC under three protocols" in (out / "report.html").read_text()
    wrong = call("report", out, "--metric", "auc")
    assert wrong.code == 2 and "error[metric]" in wrong.err, wrong.err


def test_run_by_another_metric(tmp_path: Path) -> None:
    args = ("run", config_file(tmp_path), "--metric", "balanced_accuracy", "--out", tmp_path / "out")
    outcome = ok(*args)
    assert "balanced accuracy in %, mean over clients" in outcome.out
    assert re.search(r"\nBeside balanced accuracy, for own patients: accuracy .*\nverdict: ", outcome.out, re.S)
    assert results(tmp_path / "out")["config"]["metric"] == "balanced_accuracy"
    assert call(*args[:2], "--metric", "speed", "--out", tmp_path / "never").code == 2
    assert not (tmp_path / "never").exists()


def interrupt(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Ctrl-C when so many methods have a row."""
    from fedbicross.runs import runner

    made, rows = runner.make_row, []

    def make_row(*args: Any) -> dict[str, Any]:
        if len(rows) == after:
            raise KeyboardInterrupt
        rows.append(made(*args))
        return dict(rows[-1])

    monkeypatch.setattr(runner, "make_row", make_row)


def test_a_stopped_run_names_the_command_that_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: Path
) -> None:
    out = tmp_path / "my runs" / "first"
    with monkeypatch.context() as patch:
        interrupt(patch, after=1)
        stopped = call("run", config_file(tmp_path), "--out", out)
    assert (stopped.code, stopped.out) == (130, "")
    assert stopped.err.splitlines()[-1] == f"stopped; `fedbicross resume '{out}'` continues the run"
    assert call("resume", out).code == 0
    assert timeless(results(out)) == timeless(results(finished))


def test_stopped_before_anything_was_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedbicross.runs.runner.prepare", stop)
    stopped = call("run", config_file(tmp_path), "--out", tmp_path / "out")
    assert (stopped.code, stopped.err) == (130, "stopped; the same command again goes on\n")


def test_a_thousand_classes_do_not_fill_the_disk(tmp_path: Path) -> None:
    """A confusion matrix alone would be a million numbers, for each client under each protocol."""
    labels = {f"{split}_labels": 999 - np.arange(n)[:, None] % 60 for split, n in (("train", 120), ("test", 60))}
    images = {f"{split}_images": np.zeros((n, 8, 8, 3), np.uint8) for split, n in (("train", 120), ("test", 60))}
    for number, image in enumerate(images["train_images"]):
        image[:] = number  # no two of them alike
    images["test_images"][:] = 120 + np.arange(60, dtype=np.uint8)[:, None, None, None]
    many = write_npz(tmp_path / "many.npz", **labels, **images)
    config = config_file(tmp_path, CONFIG.replace("train_size = 60\ntest_size = 30\n", ""))
    chosen = ("--methods", "local_only", "--clients", "2", "--out", tmp_path / "out")
    assert "1000 classes" in ok("run", config, "--data", many, *chosen).err
    for file, most in (("results.json", 150_000), ("report.html", 150_000), ("events.jsonl", 50_000)):
        assert (tmp_path / "out" / file).stat().st_size < most, file


def test_images_of_another_size(tmp_path: Path) -> None:
    args = ("run", config_file(tmp_path), "--methods", "majority", "--image-size", "12", "--out", tmp_path / "out")
    assert call(*args, "--json").json()["dataset"]["image_size"] == 12


def tiny_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedbicross.cli import demo

    small = {"image_size": 8, "train_size": 60, "test_size": 30}
    settings: dict[str, Any] = {**demo.SETTINGS, "clients": 2, "threads": 1, "baselines": ["local_only"]}
    settings["data"] = {**settings["data"], **small}
    settings["training"] = {**settings["training"], "epochs": 1}
    settings["method"] = {"primum": {"pool": 2, "batch": 8, "steps": 2, "steps_distil": 2}}
    monkeypatch.setattr(demo, "SETTINGS", settings)


@pytest.mark.slow
def test_demo_writes_a_report_and_replaces_an_earlier_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedbicross.cli.app import app

    tiny_demo(monkeypatch)
    monkeypatch.chdir(tmp_path)
    first = CliRunner().invoke(app, ["demo"])
    assert first.exit_code == 0, first.output
    assert all(name in first.output for name in ("primum", "ensemble:consensus", "local_only:balanced", "verdict: "))
    out = tmp_path / "runs" / "demo"
    assert (out / "report.html").is_file()
    rows = timeless(results(out))
    (out / "stale.txt").write_text("from before")
    second = CliRunner().invoke(app, ["demo", "--out", str(out), "--json"])
    assert second.exit_code == 0, second.output
    assert json.loads(second.stdout)["name"] == "demo"
    assert timeless(results(out)) == rows
    assert not (out / "stale.txt").exists()


@pytest.mark.parametrize("answer", ["n", *later("y", None)])
def test_a_stopped_demo_offers_to_go_on(answer: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedbicross.cli import demo

    tiny_demo(monkeypatch)
    monkeypatch.setitem(demo.SETTINGS, "methods", ["fedavg"])
    monkeypatch.setitem(demo.SETTINGS, "method", {})
    out = tmp_path / "demo"
    with monkeypatch.context() as patch:
        interrupt(patch, after=1)
        assert call("demo", "--out", out).code == 130
    (out / "mark.txt").write_text("is it the same run?")
    if answer is not None:  # somebody sits there
        monkeypatch.setattr(demo, "somebody_is_there", lambda: True)
        monkeypatch.setattr(demo.typer, "confirm", lambda *args, **more: answer == "y")
    second = call("demo", "--out", out, "--json")
    assert second.code == 0 and second.json()["complete"]
    assert ("going on with the demo" in second.err) == (answer is None)
    assert (out / "mark.txt").exists() == (answer != "n")
    assert call("demo", "--out", out).code == 0
    assert not (out / "mark.txt").exists(), "a finished one is replaced"


def test_demo_spares_a_folder_that_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_demo(monkeypatch)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.toml").write_text("my own project")
    before = snapshot(tmp_path)
    outcome = call("demo", "--out", tmp_path / "mine")
    assert (outcome.code, outcome.err.count("\n")) == (4, 1)
    assert snapshot(tmp_path) == before


@pytest.mark.slow
def test_demo_starts_in_a_process_of_its_own(tmp_path: Path) -> None:
    code = (
        "from fedbicross.cli import demo, main\n"
        "demo.SETTINGS = {**demo.SETTINGS, 'clients': 2, 'threads': 1, 'baselines': [], 'methods': ['majority'],\n"
        "  'data': {'name': 'cells', 'image_size': 8, 'train_size': 60, 'test_size': 30}}\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "demo"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "demo" / "report.html").is_file()


def test_track(tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = call("track", finished, "--logs", tmp_path / "logs")
    assert (outcome.code, outcome.out) == (0, f"tensorboard: {tmp_path / 'logs' / 'tiny'}\n"), outcome.err
    assert list((tmp_path / "logs" / "tiny" / "fedavg").rglob("events.out.*"))
    given: list[Any] = []
    monkeypatch.setattr("fedbicross.report.track.to_mlflow", lambda *args: given.append(args) or "its id")
    logged = call("track", finished, "--to", "mlflow", "--logs", "http://127.0.0.1:5000", "--json").json()
    assert logged == {"to": "mlflow", "logged": "its id"}
    assert given == [(results(finished), "http://127.0.0.1:5000", finished / "report.html")]
    missing = call("track", tmp_path / "nowhere")
    assert (missing.code, missing.err.startswith("error[results_missing]")) == (4, True)
