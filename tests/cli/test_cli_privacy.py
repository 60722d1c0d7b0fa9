"""`client privacy`, and where (ε, δ) is told on the way from a site to its model."""

from __future__ import annotations

import json
from contextlib import chdir
from pathlib import Path

import pytest

from cli.console import call
from cli.test_cli_exchange import SITES, finish, ok, set_up, train
from fedbicross.errors import ConfigError, MethodError
from fedbicross.privacy import ledger
from fedbicross.runs.config import load_config

SETTINGS = ("settings.encoder='tiny'", "settings.epsilon=60.0")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = set_up(tmp_path_factory.mktemp("private"), "analytic", SITES, *SETTINGS)
    for name in SITES:
        train(root, name)
    finish(root)
    return root


@pytest.mark.slow
def test_a_site_sees_what_it_gave_away(finished: Path) -> None:
    with chdir(finished / "north"):
        shown = ok("client", "privacy").out
        assert "analytic" in shown and "together ε = 60" in shown
        found = json.loads(ok("client", "privacy", "--json").out)
        assert found["total"]["private"] == 1 and found["total"]["epsilon"] == pytest.approx(60.0, rel=1e-6)
        assert len(found["entries"]) == 1 and found["entries"][0]["client"] == "north"
        assert "Gaussian mechanism" in ok("client", "show", "north.safetensors").out
        again = ok("client", "train", "--data", "images", "--key", "north.key", "--out", "north.safetensors")
        assert "together ε = 60" in again.out + again.err
        assert len(ledger.read(Path("fedbicross-work") / ledger.NAME)) == 1
        card = Path("model/MODEL_CARD.md").read_text(encoding="utf-8")
        assert "The upload: ε = 60" in card and "Everything that the site ever sent: 1 upload" in card


def test_nothing_was_sent_yet(tmp_path: Path) -> None:
    with chdir(tmp_path):
        assert "nothing was sent" in ok("client", "privacy").out
        Path("fedbicross-work").mkdir()
        (Path("fedbicross-work") / ledger.NAME).write_text("{}")
        outcome = call("client", "privacy")
        assert outcome.code == 4 and "error[ledger]" in outcome.err


@pytest.mark.slow
def test_a_run_with_dp_sgd_says_so_in_its_report(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    options = [
        *("run", "--data", "cells", "--clients", "2", "--model", "resnet8_gn", "--methods", "fedavg"),
        *("--set", "data.train_size=120", "--set", "data.test_size=40", "--set", "data.image_size=12"),
        *("--set", "training.recipe=modern", "--set", "training.epochs=1", "--set", "training.batch_size=16"),
        *("--set", "training.dp.epsilon=4.0", "--set", "baselines=['local_only']", "--set", "seeds=[0]"),
    ]
    with chdir(tmp_path):
        ok(*options, "--out", "run")
        rows = json.loads(Path("run/results.json").read_text())["rows"]
        said = {row["method"]: row["leaves_the_hospital"] for row in rows}
        assert "DP-SGD" in said["fedavg"] and "ε = 4" in said["fedavg"] and said["local_only"] == "Nothing."
        assert "DP-SGD" in Path("run/report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("kind", "code", "flags"),
    [
        (ConfigError, "dp_batchnorm", {"model": "resnet8", "methods": ["fedavg"]}),
        (MethodError, "not_private", {"model": "resnet8", "methods": ["fedisca"]}),
        (MethodError, "not_private", {"model": "resnet8_gn", "methods": ["fedavg:multi_round"]}),
    ],
)
def test_runs_that_could_not_be_private(kind: type[Exception], code: str, flags: dict[str, object]) -> None:
    training = {"recipe": "modern", "dp": {"epsilon": 1.0}}
    with pytest.raises(kind) as error:
        load_config(None, {"training": training, "baselines": ["local_only"], **flags})
    assert error.value.code == code
