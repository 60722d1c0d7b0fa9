from __future__ import annotations

from pathlib import Path

import pytest

from cli.console import call
from fedbicross.runs import runner
from fedbicross.runs.config import load_config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli-audit") / "run"
    flags = {
        "data": {"train_size": 80, "test_size": 30},
        "model": "resnet8",
        "clients": 2,
        "partition": {"alpha": 1.0},
        "methods": ["fedpft"],
        "baselines": [],
        "method": {"fedpft": {"encoder": "tiny", "components": 1, "epochs": 1}},
    }
    runner.run(load_config(None, flags), folder)
    return folder


def test_table_and_json(run: Path) -> None:
    done = call("audit", run, "--epochs", "1", "--images", "5", "--json")
    assert done.json()["rows"][0]["method"] == "fedpft"
    done = call("audit", run, "--epochs", "1", "--images", "5", "--clients", "client-1")
    assert "best of other people" in done.out
    assert "client-1" in done.out


def test_errors_are_one_line(run: Path) -> None:
    done = call("audit", run, "--methods", "falcon")
    assert done.code == 2
    assert done.err.strip().startswith("error[audit_method]")
