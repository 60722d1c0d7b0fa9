"""`fedbicross check`, and what `run` and a site do with its findings."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from cli.console import CONFIG, call, config_file, console, ok, results, write_npz
from data.scans import NAME, dicom
from data.test_check import brain, noise
from fedbicross.context import Task
from fedbicross.data import Split
from fedbicross.errors import DataError
from fedbicross.messages import Client
from fedbicross.transport.site_data import check_site, image_files, load_site, read_files
from small import refuses

OWN = CONFIG.replace("train_size = 60\ntest_size = 30\n", "")


def test_the_brain_case(tmp_path: Path) -> None:
    brain(tmp_path / "brain")
    os.mkfifo(tmp_path / "brain" / "Training" / "no_tumor" / "pipe.png")
    outcome = console("check", tmp_path / "brain", "--grid", tmp_path / "grid.png")
    assert outcome.code == 1, outcome.err
    assert "a folder for each set, in it one for each class" in outcome.out
    assert "refused[same_image_in_both]: 6 test images (20.0%)" in outcome.out
    assert "pipe.png: a pipe, socket or device: never opened [not_a_file]" in outcome.out
    assert "looking at images: 90/90" in outcome.err, "progress"
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")
    accepted = call("check", tmp_path / "brain", "--accept", "same_image_in_both", "--json")
    assert accepted.code == 0 and accepted.json()["refused"] is False
    assert accepted.json()["images"]["train"] == {"glioma_tumor": 30, "no_tumor": 30}


def test_fine_data_end_with_0_and_list_warnings(tmp_path: Path) -> None:
    brain(tmp_path / "brain", copies=0)
    assert call("check", tmp_path / "brain").code == 0
    noise(tmp_path / "brain" / "Training" / "no_tumor" / "long.png", 5000, (90, 20))
    outcome = call("check", tmp_path / "brain")
    assert outcome.code == 0 and "warning[long_images]: 1 image " in outcome.out
    assert outcome.out.splitlines()[-1] == "fine: `fedbicross run` would go on"


def test_refused_words(tmp_path: Path) -> None:
    outcome = call("check", tmp_path / "no.csv")
    assert outcome.code == 3 and outcome.err.startswith("error[missing_file]")
    outcome = call("check", tmp_path, "--accept", "everything")
    assert outcome.code == 2 and outcome.err.startswith("error[unknown_accept]")
    brain(tmp_path / "brain")
    outcome = call("check", tmp_path / "brain", "--grid", tmp_path / "brain" / "Training")
    assert outcome.code == 3 and "error[cannot_write]" in outcome.err


def test_run_refuses_and_can_be_told_to_go_on(tmp_path: Path) -> None:
    brain(tmp_path / "brain")
    args = ("run", config_file(tmp_path, OWN), "--data", tmp_path / "brain", "--methods", "majority", "--clients", "2")
    outcome = call(*args, "--out", tmp_path / "out")
    assert outcome.code == 3 and outcome.err.startswith("error[same_image_in_both]: 6 test images (20.0%)")
    assert "--accept same_image_in_both" in outcome.err and not (tmp_path / "out").exists()
    ok(*args, "--out", tmp_path / "out", "--accept", "same_image_in_both")
    found = results(tmp_path / "out")
    assert found["config"]["data"]["accept"] == ["same_image_in_both"]
    assert any("also in the training set" in text and "(accepted)" in text for text in found["warnings"])
    assert call(*args, "--out", tmp_path / "two", "--accept", "leaks").err.startswith("error[unknown_accept]")


def hospital(root: Path, patients: int = 10) -> Path:
    """Three DICOM files a patient, whose identity no file of ours may hold."""
    rng = np.random.default_rng(0)
    for patient in range(patients):
        for number in range(3):
            values = rng.integers(1000, size=(12, 12), dtype=np.uint16)
            dicom(root / "ab"[patient % 2] / f"{patient}-{number}.dcm", values, f"MRN-99{patient:04d}")
    return root


def identities(folder: Path) -> list[str]:
    """Files below a folder that hold a name, a number or the institution of a patient, in any common encoding."""
    words = ("Quixote", "MRN-99", "La Mancha")
    needles = [word.encode(encoding) for word in words for encoding in ("utf-8", "utf-16-le", "utf-32-le")]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 3
    return [path.name for path in files if any(needle in path.read_bytes() for needle in needles)]


def test_no_stored_file_of_a_run_names_a_patient(tmp_path: Path) -> None:
    hospital(tmp_path / "scans")
    assert len(identities(tmp_path / "scans")) == 30, "the search finds what it looks for"
    args = ("run", config_file(tmp_path, OWN), "--data", tmp_path / "scans", "--clients", "2", "--partition", "iid")
    outcome = ok(*args, "--out", tmp_path / "out")
    assert identities(tmp_path / "out") == []
    shown = call("check", tmp_path / "scans", "--json")
    said = outcome.out + outcome.err + shown.out + shown.err
    assert NAME not in said and "MRN-99" not in said and "La Mancha" not in said
    assert shown.json()["patients"] == {"train": 8, "test": 2, "both": 0}


def agree(root: Path, classes: str, images: Path) -> tuple[str | Path, ...]:
    """A federation of two, and the command by which the first one trains."""
    for name in ("north", "south", "server"):
        assert call("client", "keygen", "--out", root / f"{name}.key").code == 0
    settings = ("training.epochs=1", "training.recipe='modern'", "class_counts.smallest=0")
    federation, work = root / "federation.toml", root / "site"
    made = call(
        *("federation", "init", "--out", federation, "--classes", classes, "--server", root / "server.pub"),
        *("--client", f"north={root / 'north.pub'}", "--client", f"south={root / 'south.pub'}"),
        *("--image-size", "8", "--channels", "1", "--model", "resnet8", "--method", "fedavg"),
        *(word for setting in settings for word in ("--set", setting)),
    )
    assert made.code == 0, made.err
    place = ("--federation", federation, "--work", work / "work", "--out", work / "north.safetensors")
    return ("client", "train", "--data", images, "--key", root / "north.key", *place)


def test_no_upload_names_a_patient(tmp_path: Path) -> None:
    ok(*agree(tmp_path, "a,b", hospital(tmp_path / "scans")))
    assert (tmp_path / "site" / "north.safetensors").is_file() and identities(tmp_path / "site") == []


def test_client_train_refuses_before_it_trains(tmp_path: Path) -> None:
    train = agree(tmp_path, "glioma_tumor,no_tumor", brain(tmp_path / "brain"))
    outcome = call(*train)
    assert outcome.code == 3 and outcome.err.startswith("error[same_image_in_both]: 6 test images"), outcome.err
    assert not (tmp_path / "site" / "north.safetensors").exists()
    outcome = call(*train, "--accept", "same_image_in_both")
    assert outcome.code == 0 and "warning: 6 test images (20.0%) also in the training set" in outcome.err


def test_images_to_predict_may_be_dicom(tmp_path: Path) -> None:
    dicom(tmp_path / "in" / "IM-0001", np.arange(64, dtype=np.uint8).reshape(8, 8))
    os.mkfifo(tmp_path / "in" / "pipe")
    (tmp_path / "in" / "notes.txt").write_text("hello")
    [found] = image_files([tmp_path / "in"])
    assert found.name == "IM-0001" and read_files([found], Task(("a", "b"), 8, 3, "resnet8")).shape == (1, 8, 8, 3)


def test_arrays_of_any_size(tmp_path: Path) -> None:
    found = call("check", write_npz(tmp_path / "own.npz", size=9), "--json").json()
    assert found["layout"] == "arrays" and found["sizes"] == {"9 x 9": 42} and not found["refused"]


def test_a_site_applies_the_same_rules(tmp_path: Path) -> None:
    task = Task(("glioma_tumor", "no_tumor"), 20, 1, "resnet8")
    client, held_out = load_site(brain(tmp_path / "brain"), task, "north", 0.2, 0)
    with refuses(DataError, "same_image_in_both", "also in the training set"):
        check_site(client, held_out, task.classes)
    assert check_site(client, held_out, task.classes, ["same_image_in_both"])
    rng = np.random.default_rng(0)
    images = rng.integers(256, size=(4, 8, 8, 1), dtype=np.uint8)
    both = np.array(["p", "q"])
    alone = Client("north", images[:2], np.zeros(2, np.int64), both)
    with refuses(DataError, "patient_in_both_splits"):
        check_site(alone, Split(images[2:], np.zeros(2, np.int64), both), ("a", "b"))
    assert check_site(alone, Split(images[2:], np.zeros(2, np.int64)), ("a", "b")) == [], "one class is fine at a site"
