from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from fedbicross.errors import ConfigError, RunError
from fedbicross.methods import create
from fedbicross.parts.sequences import empty_generator
from fedbicross.runs import runner
from fedbicross.runs.audit import HEADER, AuditSettings, audit, table
from fedbicross.runs.config import RunConfig, load_config
from fedbicross.runs.store import DiskStore
from small import refuses

FAST = AuditSettings(images=10, pixels=16, epochs=2)
TINY = {
    "fedpft": {"encoder": "tiny", "components": 2, "epochs": 1},
    "falcon": {
        "encoder": "tiny", "width": 16, "layers": 1, "heads": 2, "feedforward": 16, "components": 2,
        "epochs_generator": 1, "epochs_classifier": 1, "epochs_global": 1,
    },
}  # fmt: skip


def config(**values: object) -> RunConfig:
    flags = {
        "data": {"train_size": 150, "test_size": 40},
        "model": "resnet8",
        "clients": 2,
        "partition": {"alpha": 1.0},
        "methods": ["fedpft", "fedpft:hierarchy", "falcon", "fedcgs"],
        "baselines": [],
        "method": {**TINY, "fedcgs": {"encoder": "tiny"}},
        "threads": 1,
    }
    return load_config(None, {**flags, **values})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit") / "run"
    runner.run(config(), folder)
    return folder


@pytest.fixture(scope="module")
def results(run: Path) -> dict:
    return audit(run, settings=FAST)


@pytest.mark.slow
def test_what_is_measured_and_where_it_lies(run: Path, results: dict) -> None:
    stored = json.loads((run / "audit.json").read_text())
    assert stored == json.loads(json.dumps(results))
    assert [row["method"] for row in stored["rows"]] == ["fedpft", "fedpft:hierarchy", "falcon"]  # fedcgs sends sums
    assert len({row["client"] for row in stored["rows"]}) == 1
    for row in stored["rows"]:
        assert row["mmd"]["bandwidth"] > 0
        assert row["attack"]["images"] == 10
        assert set(row["attack"]) >= {"real", "synthetic", "others", "mean_image", "shuffled"}
        assert row["copies"]["above_0.999"] == 0
        name = row["method"].replace(":", "+")
        assert (run / "audit" / f"{name}-{row['client']}.png").read_bytes().startswith(b"\x89PNG")
        upload = run / "uploads" / "seed-0" / name / f"{row['client']}.safetensors"
        assert row["upload_bytes"] == upload.stat().st_size
    assert len((run / "tables" / "audit.md").read_text().splitlines()) == 2 + 3
    assert all(len(cells) == len(HEADER) for cells in table(results))


def test_costs_of_a_generator_are_those_of_the_one_that_runs(run: Path, results: dict) -> None:
    cost = next(row["cost"] for row in results["rows"] if row["method"] == "falcon")
    generator = empty_generator(create("falcon", TINY).config, 128, 5, 8)
    parameters = sum(p.numel() for p in generator.state_dict().values())
    assert cost["generator_bytes"] == 4 * parameters
    assert cost["break_even_sequences"] == 4 * parameters // (5 * 128 * 4)
    assert cost["cheaper"] == cost["sent"]
    assert cost["flops_per_sample"] > 0
    mixture = next(row["cost"] for row in results["rows"] if row["method"] == "fedpft")
    assert mixture["flops_per_sample"] == 2 * 128


def test_the_same_numbers_again(run: Path, results: dict) -> None:
    before = torch.random.get_rng_state()
    again = audit(run, ["fedpft"], settings=FAST)
    assert again["rows"] == [row for row in results["rows"] if row["method"] == "fedpft"]
    assert torch.equal(torch.random.get_rng_state(), before)


def test_names_that_are_not_there(run: Path) -> None:
    for names, clients, code in [
        (["fedcgs"], [], "audit_method"),
        (["fedavg"], [], "audit_method"),
        ([], ["client-9"], "audit_client"),
    ]:
        with refuses(ConfigError, code):
            audit(run, names, clients, FAST)


def test_folders_that_hold_no_finished_run(run: Path, tmp_path: Path) -> None:
    with refuses(RunError, "not_a_run"):
        audit(tmp_path, settings=FAST)
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "uploads")
    with refuses(RunError, "no_upload"):
        audit(copy, settings=FAST)
    DiskStore(copy).write("partition.json", b"{}")
    with refuses(RunError, "changed"):
        audit(copy, settings=FAST)


def test_a_run_without_synthetic_features(tmp_path: Path) -> None:
    runner.run(config(methods=["fedcgs"], method={"fedcgs": {"encoder": "tiny"}}), tmp_path / "run")
    with pytest.raises(ConfigError, match="no method of this run sends synthetic features"):
        audit(tmp_path / "run", settings=FAST)
