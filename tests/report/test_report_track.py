"""Runs in TensorBoard and MLflow, read back by their own readers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedbicross.errors import ConfigError
from fedbicross.report import track
from small import refuses


def test_what_is_measured(make_results: Any) -> None:
    results = make_results(clients=2, epochs=3)
    found = list(track.scalars(results))
    curve = [s for s in found if s.of == ("client-0", "seed-0") and s.name == "training/train_loss"]
    assert [(s.step, s.value) for s in curve] == [
        (entry["epoch"], entry["train_loss"]) for entry in results["training"]["0"]["client-0"]["history"]
    ]
    row = next(row for row in results["rows"] if row["method"] == "fedbicross")
    (mean,) = [s for s in found if s.of == ("fedbicross", "seed-0") and s.name == "mean/accuracy/matched"]
    assert mean.value == row["accuracy"]["matched"]
    assert any(s.name == "client/client-1/macro_auc/global" for s in found)
    assert track.settings(results)["train.epochs"] == "3"
    assert track.settings(results)["versions.torch"] == "2.13.0"


def test_results_of_a_stranger_are_no_crash() -> None:
    odd = {"rows": [{"method": "x"}], "training": {"0": {"a": {"history": [3, {"epoch": "x", "loss": 1.0}]}}}}
    assert list(track.scalars(odd)) == [track.Scalar(("a", "seed-0"), "training/loss", 0, 1.0)]


def test_tensorboard(make_results: Any, tmp_path: Path) -> None:
    results = make_results(clients=2, epochs=3, name="../../up")
    folder = track.to_tensorboard(results, tmp_path / "logs")
    assert folder.parent == tmp_path / "logs", "a name is no path"
    events = EventAccumulator(str(folder / "fedbicross" / "seed-0")).Reload()
    (value,) = events.Scalars("mean/accuracy/matched")
    row = next(row for row in results["rows"] if row["method"] == "fedbicross")
    assert value.value == pytest.approx(row["accuracy"]["matched"])
    curve = EventAccumulator(str(folder / "client-0" / "seed-0")).Reload().Scalars("training/train_loss")
    assert [point.step for point in curve] == [1, 2, 3]
    assert "verdict/text_summary" in EventAccumulator(str(folder)).Reload().Tags()["tensors"]


@pytest.mark.slow
def test_mlflow(make_results: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient  # seconds

    monkeypatch.chdir(tmp_path)  # where MLflow puts pages by default
    (tmp_path / "report.html").write_text("the page")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    results = make_results(clients=2, epochs=3)
    run = MlflowClient(uri).get_run(track.to_mlflow(results, uri, tmp_path / "report.html"))
    assert Path(run.info.artifact_uri, "report.html").read_text() == "the page"
    row = next(row for row in results["rows"] if row["method"] == "ensemble:class_weighted")
    assert run.data.metrics["ensemble-class_weighted/seed-0/mean/accuracy/matched"] == row["accuracy"]["matched"]
    assert run.data.params["train.epochs"] == "3" and run.info.run_name == "demo"
    assert "aking part" in run.data.tags["verdict"] and run.info.status == "FINISHED"
    history = MlflowClient(uri).get_metric_history(run.info.run_id, "client-0/seed-0/training/train_loss")
    assert [point.step for point in history] == [1, 2, 3]
    again = track.to_mlflow(results, uri)
    assert MlflowClient(uri).get_run(again).info.experiment_id == run.info.experiment_id


@pytest.mark.slow
def test_where_mlflow_cannot_log(make_results: Any, tmp_path: Path) -> None:
    with refuses(ConfigError, "tracker", "MLflow cannot log there"):
        track.to_mlflow(make_results(), f"{tmp_path.as_uri()}/store")  # it no longer takes folders


@pytest.mark.parametrize(("to", "module"), [("tensorboard", "torch.utils.tensorboard.writer"), ("mlflow", "mlflow")])
def test_a_missing_tracker_is_named(
    to: str, module: str, make_results: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    log = {"tensorboard": track.to_tensorboard, "mlflow": track.to_mlflow}[to]
    with refuses(ConfigError, "no_tracker", f"{to} is not installed"):
        log(make_results(), tmp_path / "x")  # type: ignore[operator]
