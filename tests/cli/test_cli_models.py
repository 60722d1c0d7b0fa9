"""`predict` and `export` with the models of a run; those of a federation are in test_cli_exchange.py."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cli.console import CONFIG, call, config_file, ok
from data.scans import dicom, nifti
from fedbicross.context import Context
from fedbicross.data import load_dataset
from fedbicross.data.pictures import Reader
from fedbicross.deploy import run_models
from fedbicross.deploy.folder import load_model
from fedbicross.messages import Predictor
from fedbicross.parts.calibration import calibrate
from fedbicross.runs import runner
from fedbicross.runs.config import RunConfig
from fedbicross.runs.store import DiskStore
from fedbicross.settings import read_toml
from fedbicross.transport.site_data import read_files

METHODS = '["local_only", "fedavg", "majority", "centralised"]'


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two clients with more than ten validation images each."""
    folder = tmp_path_factory.mktemp("models")
    text = CONFIG.replace('["local_only", "fedavg"]', METHODS).replace("clients = 3", "clients = 2")
    text = text.replace("train_size = 60", "train_size = 300").replace("alpha = 0.5", "alpha = 50.0")
    ok("run", config_file(folder, text), "--out", folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two PNG files and a DICOM."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for name in ("a.png", "b.png"):
        Image.fromarray(rng.integers(256, size=(9, 9, 3), dtype=np.uint8)).save(folder / name)
    dicom(folder / "c.dcm", rng.integers(4096, size=(12, 12), dtype=np.uint16))
    return folder


def expected(run: Path, method: str, client: str) -> Predictor:
    """The model with a temperature fitted on what the client's training held back, step by step."""
    stored = Predictor.unpack((run / "models" / "seed-0" / method / f"{client}.safetensors").read_bytes())
    config = RunConfig(**read_toml(run / "config.toml"))
    prepared = runner.prepare(config)
    clients, _ = runner.make_clients(prepared.dataset, prepared.partitions[0])
    own = next(c for c in clients if c.name == client)
    rows = Context(stored.task, config.training).validation_rows(own)
    assert len(rows) >= 10
    return calibrate(stored, own.images[rows], own.labels[rows])


def test_predictions_of_a_run_s_model(run: Path, images: Path, tmp_path: Path) -> None:
    client = json.loads((run / "partition.json").read_text())["partitions"]["0"]["clients"][0]
    words = ("predict", images, "--model", run, "--method", "fedavg", "--client", client, "--out", tmp_path / "a.csv")
    outcome = call(*words)
    assert outcome.code == 0 and "not calibrated" not in outcome.err, outcome.err
    rows = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    files = sorted(images.iterdir())
    assert [row["image"] for row in rows] == [str(path) for path in files], "PNG and DICOM alike"
    model = expected(run, "fedavg", client)
    pixels = read_files(files, model.task)
    found = np.array([[float(row[name]) for name in model.task.classes] for row in rows])
    assert model.temperature != 1 and np.allclose(found, model.probabilities(pixels), atol=2e-6)
    ok(*words[:-1], tmp_path / "raw.csv", "--raw")
    rows = list(csv.DictReader((tmp_path / "raw.csv").read_text().splitlines()))
    found = np.array([[float(row[name]) for name in model.task.classes] for row in rows])
    assert np.allclose(found, replace(model, temperature=1.0).probabilities(pixels), atol=2e-6)


def test_a_volume_is_answered_slice_by_slice(run: Path, images: Path, tmp_path: Path) -> None:
    client = json.loads((run / "partition.json").read_text())["partitions"]["0"]["clients"][0]
    volume = nifti(tmp_path / "scan.nii.gz", np.random.default_rng(0).normal(100, 20, (16, 16, 12)).astype(np.float32))
    png = next(path for path in images.iterdir() if path.suffix == ".png")
    outcome = ok("predict", png, volume, "--model", run, "--method", "fedavg", "--client", client, "--raw")
    rows = list(csv.DictReader(outcome.out.splitlines()))
    slices = [header.slice for header in Reader().look(volume)]
    assert len(slices) == 3
    assert [row["image"] for row in rows] == [str(png), *(f"{volume} (slice {index})" for index in slices)]
    model = replace(expected(run, "fedavg", client), temperature=1.0)
    pixels = read_files([png, *((volume, index) for index in slices)], model.task)
    found = np.array([[float(row[name]) for name in model.task.classes] for row in rows])
    assert np.allclose(found, model.probabilities(pixels), atol=2e-6)


def test_a_file_of_a_run_is_no_stranger_s_link(run: Path, images: Path) -> None:
    file = next((run / "models" / "seed-0" / "fedavg").iterdir())
    assert file.stat().st_nlink > 1
    assert call("predict", images, "--model", file).code == 0
    shared = run / "models" / "seed-0" / "centralised" / "all-sites-pooled.safetensors"
    assert call("predict", images, "--model", shared).code == 0
    assert "error[hard_link]" in call("predict", images, "--model", run / "client_models" / file_in(run)).err


def file_in(run: Path) -> str:
    return next(path.name for path in (run / "client_models").iterdir() if path.stat().st_nlink > 1)


def test_which_model_is_asked_for(run: Path, images: Path, tmp_path: Path) -> None:
    base = ("predict", images, "--model", run)
    for words, code, said in (
        ((), "which_model", "--method (one of: centralised, fedavg, local_only, majority)"),
        (("--method", "fedavg"), "which_model", "--client"),
        (("--method", "fedav"), "no_method", "did you mean 'fedavg'"),
        (("--method", "fedavg", "--client", "nobody"), "no_client", "nobody"),
        (("--method", "fedavg", "--seed", "7"), "no_seed", "known: 0"),
        (("--method", "fedavg", "--client", "client-0", "--alone"), "no_model_alone", "local_only"),
    ):
        outcome = call(*base, *words)
        assert f"error[{code}]" in outcome.err and said in outcome.err, outcome.err
    for name in ("config.toml", "partition.json", "SHA256SUMS"):
        shutil.copy(run / name, tmp_path / name)
    assert "error[no_models]" in call("predict", images, "--model", tmp_path).err
    (tmp_path / "models" / "seed-0" / "fedavg").mkdir(parents=True)
    words = ("--method", "fedavg", "--client", "client-0")
    assert "error[no_models]" in call("predict", images, "--model", tmp_path, *words).err
    for broken in ("{}", "[", '{"partitions": [1]}', '{"partitions": {"x": {"clients": []}}}'):
        DiskStore(tmp_path).write("partition.json", broken.encode())
        assert "error[not_a_run]" in call("predict", images, "--model", tmp_path, *words).err


def test_a_constant_answer_and_a_pooled_model(run: Path, images: Path, tmp_path: Path) -> None:
    base = ("predict", images, "--model", run, "--client", "client-0", "--method")
    outcome = call(*base, "majority")
    assert outcome.code == 0 and "not calibrated: a constant answer" in outcome.err
    assert call(*base, "centralised").code == 0
    outcome = call("export", run, "--client", "client-0", "--method", "majority", "--torch", "--out", tmp_path / "m")
    assert "error[no_network]" in outcome.err and not (tmp_path / "m").exists()


def test_an_export_of_a_run(run: Path, images: Path, tmp_path: Path) -> None:
    words = ("export", run, "--method", "fedavg", "--client", "client-0", "--out", tmp_path / "hub")
    assert call(*words, "--json").json()["files"] == [
        "README.md", "config.json", "model.safetensors", "preprocessor_config.json",
    ]  # fmt: skip
    settings = json.loads((tmp_path / "hub" / "config.json").read_text())
    model = expected(run, "fedavg", "client-0")
    assert load_model(tmp_path / "hub").pack() == model.pack()
    assert settings["temperature"] == model.temperature and settings["calibration_images"] >= 10
    results = json.loads((run / "results.json").read_text())
    row = next(row for row in results["rows"] if row["method"] == "fedavg")
    own = next(client for client in row["clients"] if client["client"] == "client-0")
    assert settings["test"]["accuracy"] == own["accuracy"]["matched"]
    assert {key: settings["comparison"][key] for key in own["against_alone"]} == own["against_alone"]
    card = (tmp_path / "hub" / "README.md").read_text()
    assert "a simulation, the run run" in card and f"(temperature {model.temperature:g})" in card
    assert "trained alone" in card and "Did taking part help?" in card
    assert call("predict", images, "--model", tmp_path / "hub").code == 0
    again = call("export", tmp_path / "hub", "--out", tmp_path / "again")
    assert again.code == 0 and (tmp_path / "again" / "README.md").read_text() == card
    assert "error[empty]" in call("client", "evaluate", "--model", tmp_path / "hub", "--data", run_npz(tmp_path)).err
    call("export", run, "--method", "local_only", "--client", "client-0", "--out", tmp_path / "own")
    assert json.loads((tmp_path / "own" / "config.json").read_text())["comparison"] is None, "nothing to compare with"


def run_npz(folder: Path) -> Path:
    """Images of all eight classes in a folder, none held out."""
    cells = load_dataset("cells", image_size=8, train_size=40, test_size=8)
    for number, (image, label) in enumerate(zip(cells.train.images, cells.train.labels, strict=True)):
        target = folder / "cells" / cells.classes[label]
        target.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(target / f"{number}.png")
    return folder / "cells"


def test_without_its_data_a_model_is_used_uncalibrated(run: Path, images: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(run, tmp_path / "run"))
    text, store = (moved / "config.toml").read_text(), DiskStore(moved)
    store.write("config.toml", text.replace('name = "cells"', 'name = "nowhere/at/all"').encode())
    words = ("--method", "fedavg", "--client", "client-0")
    outcome = call("predict", images, "--model", moved, *words)
    assert outcome.code == 0 and "note: the probabilities are not calibrated: " in outcome.err
    store.write("config.toml", text.replace("train_size = 300", "train_size = 200").encode())
    assert "not those that" in call("predict", images, "--model", moved, *words).err
    (moved / "results.json").unlink()
    outcome = call("export", moved, *words, "--out", tmp_path / "x")
    assert "error[no_results]" in outcome.err and not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "name", ["config.toml", "partition.json", "results.json", "models/seed-0/fedavg/client-0.safetensors"]
)
def test_a_run_that_was_edited_or_damaged_is_refused_by_name(
    name: str, run: Path, images: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(run, tmp_path / "run"))
    whole = (other / name).read_bytes()
    # Text stays readable, so that nothing but the digest can tell.
    changed = whole.replace(b"0.", b"1.", 1) if not name.startswith("models") else whole[:-1] + bytes([whole[-1] ^ 1])
    (other / name).unlink()
    (other / name).write_bytes(changed)
    assert changed != whole
    words = (other, "--method", "fedavg", "--client", "client-0", "--out", tmp_path / "x")
    outcome = call("export", *words)
    assert f"error[damaged]: {name}" in outcome.err and outcome.code == 4 and not (tmp_path / "x").exists()
    predicted = call("predict", images, "--model", other, "--method", "fedavg", "--client", "client-0")
    assert predicted.code == (0 if name == "results.json" else 4)  # which it does not read
    (other / name).write_bytes(whole)
    (other / "SHA256SUMS").unlink()
    assert "error[no_digests]" in call("export", *words).err


def test_too_few_validation_images(finished: Path, images: Path) -> None:
    client = run_models._partitions(finished)["0"][0]
    outcome = call("predict", images, "--model", finished, "--method", "fedavg", "--client", client)
    assert outcome.code == 0 and "validation images are too few" in outcome.err
