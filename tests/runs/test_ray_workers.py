"""However the cells of a run are spread, the results are those of a plain run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from cli.console import artefacts, call, ok
from fedbicross.errors import ConfigError, RunError
from fedbicross.runs import ray_workers, runner
from fedbicross.runs.config import PartitionSettings, RunConfig, load_config

SETTINGS: dict[str, Any] = {
    "model": "resnet8",
    "clients": 2,
    "methods": ["fedavg", "ensemble:consensus"],  # the second brings local_only:balanced along
    "baselines": ["majority", "local_only"],
    "method": {"fedavg": {"weighting": "uniform"}},
    "seeds": [0, 3],
    "device": "cpu",
    "threads": 1,
    "data": {"name": "cells", "train_size": 40, "test_size": 16, "image_size": 8},
    "training": {"recipe": "modern", "epochs": 1, "batch_size": 16},
    "partition": {"alpha": 0.5},
}
KINDS = ("uploads", "replies", "models", "rows", "client_models", "predictions")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path, dict[str, Any]]:
    config, out = load_config(flags=SETTINGS), tmp_path_factory.mktemp("plain") / "run"
    return config, out, runner.run(config, out)


def check_same(results: dict[str, Any], out: Path, plain: tuple[RunConfig, Path, dict[str, Any]]) -> None:
    _, expected_out, expected = plain
    assert results["rows_sha256"] == expected["rows_sha256"] and results["complete"]
    assert results["training"] == expected["training"] and results["config"] == expected["config"]
    assert artefacts(out, KINDS) == artefacts(expected_out, KINDS)
    assert all(row["seconds"] > 0 for row in results["rows"] if row["method"] != "majority")
    assert not out.with_name(f"{out.name}.parts").exists()


@pytest.mark.slow
def test_cell_by_cell_gives_the_same_files(plain: tuple[RunConfig, Path, dict[str, Any]], tmp_path: Path) -> None:
    results = ray_workers.run(plain[0], tmp_path / "run", "local")
    check_same(results, tmp_path / "run", plain)


@pytest.mark.slow
def test_ray_gives_the_same_files(plain: tuple[RunConfig, Path, dict[str, Any]], tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        results = ray_workers.run(plain[0], tmp_path / "run", "ray")
        check_same(results, tmp_path / "run", plain)
        broken = plain[0].model_copy(update={"partition": PartitionSettings(file=str(tmp_path / "gone.json"))})
        with pytest.raises(ConfigError, match=r"gone\.json is no partition file"):
            ray_workers.run(broken, tmp_path / "broken", "ray")
    finally:
        ray.shutdown()


@pytest.mark.slow
def test_networks_are_trained_once_for_all_methods(plain: tuple[RunConfig, Path, dict[str, Any]]) -> None:
    first, then = ray_workers.jobs(plain[0], Path("parts"))
    assert [job.config.methods for job in first] == [["local_only", "local_only:balanced"]] * 2
    assert {job.begins_with for job in then} == {job.folder for job in first}
    assert len(then) == 2 * 3
    without = plain[0].model_copy(update={"baselines": []})
    first, then = ray_workers.jobs(without, Path("parts"))
    assert [job.config.seeds for job in first] == [[0], [3]] and not then


@pytest.mark.slow
def test_a_killed_spread_goes_on(
    plain: tuple[RunConfig, Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    work = ray_workers.Job.work

    def counted(job: ray_workers.Job) -> str:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(work(job))
        return done[-1]

    with monkeypatch.context() as patch:
        patch.setattr(ray_workers.Job, "work", counted)
        with pytest.raises(KeyboardInterrupt):
            ray_workers.run(plain[0], tmp_path / "run")
    assert not (tmp_path / "run").exists()
    shutil.rmtree(Path(done[0]) / "rows")  # as if killed before the row was written
    results = ray_workers.run(plain[0], tmp_path / "run")
    check_same(results, tmp_path / "run", plain)


def test_what_cannot_be_spread(
    plain: tuple[RunConfig, Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = plain[0].model_copy(update={"data": plain[0].data.model_copy(update={"name": "python:mine"})})
    with pytest.raises(ConfigError, match="npz"):
        ray_workers.run(arrays, tmp_path / "run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(RunError, match="exists already"):
        ray_workers.run(plain[0], tmp_path / "full")
    with pytest.raises(RunError, match="cannot write"):
        ray_workers.run(plain[0], tmp_path / "full" / "mine.txt")
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"fedbicross\[ray\]"):
        ray_workers.run(plain[0], tmp_path / "run", "ray")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]


@pytest.mark.slow
def test_the_command_line_asks_for_it(
    plain: tuple[RunConfig, Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedbicross.settings import as_toml

    config, out = tmp_path / "config.toml", tmp_path / "run"
    config.write_text(as_toml(plain[0]))
    monkeypatch.setattr(ray_workers, "_ray", lambda config: ray_workers._local)
    words = ("run", config, "--engine", "ray", "--out", out)
    assert "error[engine]" in call(*words, "--overwrite").err
    done = ok(*words, "--json")
    assert done.json()["rows_sha256"] == plain[2]["rows_sha256"] and (out / "report.html").is_file()
    assert "error[exists]" in call(*words).err
