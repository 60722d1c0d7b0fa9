"""`fedbicross.run` and `resume` as a Python program calls them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedbicross
from cli.console import call, console, timeless
from fedbicross.errors import ConfigError
from fedbicross.methods import PLUGINS
from fedbicross.methods.fedavg import FedAvg
from fedbicross.runs.config import RunConfig
from transport.sites import Said

SMALL: dict[str, Any] = {
    "model": "resnet8",
    "clients": 2,
    "baselines": ["local_only"],
    "data": {"train_size": 60, "test_size": 30, "image_size": 8},
    "training": {"recipe": "modern", "epochs": 1, "batch_size": 32},
    "device": "cpu",
    "threads": 1,
}
OWN = """
from fedbicross.methods.fedavg import FedAvg

class Mine(FedAvg):
    name = "mine"
    summary = "federated averaging under another name"
"""


class Mine(FedAvg):
    name = "mine"
    summary = "federated averaging under another name"


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PLUGINS, "given", {})


def test_every_setting_is_a_named_and_typed_argument() -> None:
    parameters = inspect.signature(fedbicross.run, eval_str=False).parameters
    assert set(RunConfig.model_fields) <= set(parameters)
    assert all(parameter.annotation is not inspect.Parameter.empty for parameter in parameters.values())
    with pytest.raises(TypeError, match="clinets"):
        fedbicross.run(clinets=3)  # type: ignore[call-arg]


@pytest.mark.slow
def test_dir_and_help_show_the_whole_interface() -> None:
    names = dir(fedbicross)
    assert {"run", "resume", "Results", "METHODS", "Method", "Client", "Dataset", "load_model", "__version__"} <= set(
        names
    )
    code = "import pydoc, fedbicross; print(pydoc.plain(pydoc.render_doc(fedbicross)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for words in ("run(source:", "resume(out:", "class Results(", "class Method(", "load_dataset(", "METHODS = "):
        assert words in shown, words


def test_progress_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    heard = Said()
    fedbicross.run(**SMALL, methods=["fedavg"], progress=heard)
    read, *methods = heard.lines
    assert read.startswith("data: cells, ") and "classes: basophil, eosinophil, " in read
    assert methods == ["== local_only, seed 0 (method 1 of 2)", "== fedavg, seed 0 (method 2 of 2)"]
    assert capsys.readouterr().err == ""
    fedbicross.run(**SMALL, methods=["majority"], progress=False)
    assert capsys.readouterr().err == ""
    fedbicross.run(**SMALL, methods=["majority"])
    assert "all methods: 2/2" in capsys.readouterr().err.splitlines()


def test_a_word_in_place_of_a_list_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\['fedavg'\]"):
        fedbicross.run(methods="fedavg")


def test_a_run_is_replaced_only_if_asked(tmp_path: Path) -> None:
    for overwrite in (False, True):
        found = fedbicross.run(**SMALL, methods=["majority"], out=tmp_path / "x", overwrite=overwrite, progress=False)
        assert found.folder == tmp_path / "x" and (tmp_path / "x" / "report.html").is_file()
    with pytest.raises(fedbicross.FedBiCrossError, match="exists already"):
        fedbicross.run(**SMALL, methods=["majority"], out=tmp_path / "x", progress=False)


def test_arrays_of_ones_own_keep_their_other_settings(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 255, (40, 8, 8, 3)).astype(np.uint8), rng.integers(0, 2, 40)
    mine = fedbicross.Dataset.from_arrays("mine", images[10:], labels[10:], images[:10], labels[:10])
    found = fedbicross.run(mine, **{**SMALL, "data": {"seed": 3}}, methods=[], progress=False)
    assert found["config"]["data"]["name"] == "python:mine" and found["config"]["data"]["seed"] == 3


def test_a_class_runs_beside_a_name_and_resumes(tmp_path: Path) -> None:
    out = tmp_path / "run"
    found = fedbicross.run(**SMALL, methods=[Mine, "fedavg"], method={"mine": {"rounds": 1}}, out=out, progress=False)
    rows = {row["method"]: row for row in found["rows"]}
    assert rows["mine"]["accuracy"] == rows["fedavg"]["accuracy"], "it is the same method"
    PLUGINS.given.clear()  # as in another process
    (out / "rows/seed-0/mine.json").unlink()
    refused = call("resume", out)
    assert refused.code == 2 and "unknown method 'mine'" in refused.err
    assert f"fedbicross.resume({str(out)!r}, methods=[...])" in refused.err
    again = fedbicross.resume(out, methods=[Mine], progress=False)
    assert timeless(again) == timeless(found) and isinstance(again, fedbicross.Results)


@pytest.mark.slow
def test_a_plug_in_of_an_installed_package_runs_is_listed_and_resumes(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "own-1.0.dist-info").mkdir(parents=True)
    (site / "own_package.py").write_text(OWN)
    (site / "own-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (site / "own-1.0.dist-info" / "entry_points.txt").write_text("[fedbicross.methods]\nmine = own_package:Mine\n")
    source = str(Path(fedbicross.__file__).parents[1])
    env = {"PYTHONPATH": f"{site}:{source}"}
    listed = console("list", "methods", "--json", env=env)
    assert listed.json()["mine"] == "federated averaging under another name"
    settings = [f"--set=data.{key}={value}" for key, value in SMALL["data"].items()]
    words = ["run", "--quick", "--methods", "mine", "--no-baselines", "--clients", "2", "--epochs", "1", *settings]
    done = console(*words, "--set", "threads=1", "--out", tmp_path / "run", env=env)
    assert done.code == 0, done.err
    (tmp_path / "run" / "rows" / "seed-0" / "mine.json").unlink()
    again = console("resume", tmp_path / "run", "--json", env=env)
    assert again.code == 0 and [row["method"] for row in again.json()["rows"]] == ["mine"]
