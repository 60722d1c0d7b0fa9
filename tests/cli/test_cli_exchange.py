"""Three hospitals and a server in folders of their own, which exchange only files through a fourth."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cli.console import call, console, ok, snapshot
from fedbicross.bundle import audit, keys, pack, sign, unpack
from fedbicross.context import Context, Task
from fedbicross.data.cells import load_cells
from fedbicross.deploy import compare
from fedbicross.deploy.folder import load_model
from fedbicross.federation import simulate
from fedbicross.messages import Predictor, Upload, file_name
from fedbicross.parts.class_mix import adapt_prior
from fedbicross.transport.federation_file import FederationFile, load_federation
from fedbicross.transport.site_data import load_site, read_files
from small import packed_unchecked

SITES = ("north", "south", "east")
CLASSES = ("lymphocyte", "monocyte", "neutrophil")
TASK = Task(CLASSES, 8, 3, "resnet8")
TINY = ("training.epochs=1", "training.batch_size=8", "training.recipe='modern'", "class_counts.smallest=0")


def draw_site(folder: Path, seed: int, per_class: int = 12) -> None:
    """Drawn blood cells of three classes as PNG files in class folders."""
    cells = load_cells(8, seed, 400, 8)
    for label in CLASSES:
        (folder / label).mkdir(parents=True)
        rows = np.flatnonzero(cells.train.labels == cells.classes.index(label))[:per_class]
        for number, row in enumerate(rows):
            Image.fromarray(cells.train.images[row]).save(folder / label / f"{number:03d}.png")


def carry(file: Path, folder: Path) -> Path:
    """The memory stick: a copy under the same name."""
    folder.mkdir(exist_ok=True)
    return Path(shutil.copy(file, folder / file.name))


def set_up(root: Path, method: str = "fedavg", sites: tuple[str, ...] = SITES, *more: str) -> Path:
    """Keys at every site, public halves and the federation file through the post."""
    post = root / "post"
    for number, name in enumerate((*sites, "server")):
        (root / name).mkdir(parents=True)
        role = "server" if name == "server" else "client"
        with chdir(root / name):
            ok(role, "keygen", "--out", f"{name}.key")
            carry(Path(f"{name}.pub"), post)
            if role == "client":
                draw_site(Path("images"), number)
    options = [word for name in sites for word in ("--client", f"{name}={post / name}.pub")]
    options += [word for setting in (*TINY, *more) for word in ("--set", setting)]
    with chdir(root / "server"):
        ok(
            *("federation", "init", "--classes", ", ".join(CLASSES), "--server", "server.pub", *options),
            *("--image-size", "8", "--model", "resnet8", "--method", method, "--run-id", "cells-1"),
        )
        carry(Path("federation.toml"), post)
    for name in sites:
        carry(post / "federation.toml", root / name)
    return root


def train(root: Path, name: str) -> Path:
    with chdir(root / name):
        ok("client", "train", "--data", "images", "--key", f"{name}.key", "--out", f"{name}.safetensors")
        return carry(Path(f"{name}.safetensors"), root / "post" / "uploads")


@pytest.fixture(scope="module")
def uploaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All three have trained and handed in; tests copy this."""
    root = set_up(tmp_path_factory.mktemp("hospitals"))
    for name in SITES:
        train(root, name)
    return root


@pytest.fixture
def hospitals(uploaded: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of its own, seen from the server's folder."""
    root = Path(shutil.copytree(uploaded, tmp_path / "hospitals"))
    with chdir(root / "server"):
        yield root


@pytest.fixture(scope="module")
def finished(uploaded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole way to three models; tests only read it."""
    root = Path(shutil.copytree(uploaded, tmp_path_factory.mktemp("finished") / "hospitals"))
    finish(root)
    return root


def finish(root: Path) -> None:
    with chdir(root / "server"):
        ok("server", "verify", "../post/uploads")
        ok("server", "fuse", "../post/uploads", "--key", "server.key", "--out", "../post/replies")
    for name in SITES:
        with chdir(root / name):
            carry(root / "post" / "replies" / f"{name}.safetensors", Path("in"))
            ok("client", "personalize", "--reply", f"in/{name}.safetensors", "--data", "images", "--out", "model")


def simulated(root: Path, federation: FederationFile) -> dict[str, bytes]:
    clients = [
        load_site(root / name / "images", federation.task, name, federation.hold_out, federation.seed)[0]
        for name in SITES
    ]
    ctx = Context(federation.task, federation.training, seed=federation.seed)
    return {name: model.pack() for name, model in simulate(federation.build(), clients, ctx).items()}


# --- the whole way -------------------------------------------------------------------------------------------


def test_three_hospitals_end_where_a_simulation_ends(finished: Path) -> None:
    federation = load_federation(finished / "server" / "federation.toml")
    expected = simulated(finished, federation)
    for name in SITES:
        made = load_model(finished / name / "model")
        assert replace(made, temperature=1.0).pack() == expected[name], "to the byte, but for how sure it is"


@pytest.mark.slow
def test_the_same_with_fedbicross_whose_models_differ(tmp_path: Path) -> None:
    small = ("settings.steps=2", "settings.batch=6", "settings.probes=4", "settings.epochs_personal=1", "hold_out=0.1")
    root = set_up(tmp_path / "h", "fedbicross:k2", SITES, *small)
    for name in SITES:
        train(root, name)
    finish(root)
    federation = load_federation(root / "server" / "federation.toml")
    models = {name: replace(load_model(root / name / "model"), temperature=1.0).pack() for name in SITES}
    assert models == simulated(root, federation)
    assert len(set(models.values())) == 3


def test_only_files_travel_and_nothing_private_does(finished: Path) -> None:
    post = finished / "post"
    travelled = {str(path.relative_to(post)) for path in post.rglob("*") if path.is_file()}
    assert travelled == {
        "federation.toml",
        *(f"{name}.pub" for name in (*SITES, "server")),
        *(f"uploads/{name}.safetensors" for name in SITES),
        *(f"replies/{name}.safetensors" for name in SITES),
    }
    content = b"".join(path.read_bytes() for path in post.rglob("*") if path.is_file())
    for name in SITES:
        secret = (finished / name / f"{name}.key").read_bytes().splitlines()[1]
        assert secret not in content
        assert stat.S_IMODE((finished / name / f"{name}.key").stat().st_mode) == 0o600
    assert b".png" not in content


def test_the_model_folder(finished: Path) -> None:
    folder = finished / "north" / "model"
    names = ["MODEL_CARD.md", "alone.safetensors", "config.json", "model.safetensors", "preprocessor_config.json"]
    assert sorted(path.name for path in folder.iterdir()) == names
    card = (folder / "MODEL_CARD.md").read_text(encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert "Not a medical device" in card and "north" in card and "monocyte" in card
    assert "The trained network and its number of training images." in card
    assert f"{config['origin']['upload_bytes']:,} bytes" in card
    assert config["test"]["images"] > 0 and f"On {config['test']['images']} images" in card
    assert f"{100 * config['test']['accuracy']:.1f} %" in card
    assert f"{100 * config['alone']['accuracy']:.1f} %" in card
    assert "## Did taking part help?" in card and config["comparison"]["keep"] in ("federated", "alone")
    for line in compare.advice(config["comparison"]):
        assert line in card
    assert config["origin"]["run"].startswith("cells-1+")
    assert config["id2label"] == {"0": "lymphocyte", "1": "monocyte", "2": "neutrophil"}
    import fedbicross

    answers = fedbicross.load_model(folder).probabilities(np.zeros((2, 8, 8, 3), np.uint8))
    assert answers.shape == (2, 3) and np.allclose(answers.sum(1), 1, atol=1e-5)


# --- federation ----------------------------------------------------------------------------------------------


def test_federation_show_says_what_was_agreed(finished: Path) -> None:
    with chdir(finished / "north"):
        words, facts = ok("federation", "show").out, ok("federation", "show", "--json").json()
    for text in (facts["fingerprint"], "lymphocyte, monocyte, neutrophil", "8 px, 3 channel(s)", "3 of 3", "site east"):
        assert text in words
    assert facts["settings"] == {"rounds": 1, "local_epochs": 1, "weighting": "size"}
    assert facts["training"]["epochs"] == 1
    with chdir(finished / "server"):
        assert ok("federation", "show", "--json").json()["fingerprint"] == facts["fingerprint"]


def test_federation_init_mistakes(hospitals: Path) -> None:
    before = snapshot(hospitals)
    base: list[Any] = ["federation", "init", "--classes", "a,b", "--server", "server.pub", "--out", "new.toml"]
    north, south = "north=../post/north.pub", "south=../post/south.pub"
    for words, code in (
        (("--client", "north"), "bad_client"),
        (("--client", north, "--client", north), "bad_client"),
        (("--client", north, "--client", "south=../post/north.pub"), "same_key"),
        (("--client", "north=server.pub"), "same_key"),
        (("--client", "north=nowhere.pub"), "no_key"),
        (("--client", "north=server.key"), "bad_key"),
        (("--client", north, "--method", "fedavgg"), "unknown_method"),
        (("--client", north, "--method", "centralised"), "not_federated"),
        (("--client", north, "--method", "fedavg:multi_round"), "not_one_shot"),
        (("--client", north, "--model", "cnn"), "needs_batchnorm"),
        (("--client", north, "--quorum", "2"), "quorum"),
        (("--client", north, "--set", "quorumm=1"), "unknown_key"),
        (("--client", north, "--set", "settings.stepss=1"), "unknown_key"),
        (("--client", north, "--run-id", "a b"), "run_id"),
        (("--client", north, "--client", "NORTH=../post/south.pub"), "client_name"),
        (("--client", "é=../post/north.pub", "--client", "É=../post/south.pub"), "client_name"),
        (("--client", "é=../post/north.pub", "--client", f"{file_name('é')}=../post/south.pub"), "client_name"),
        (("--client", north, "--method", "fedavg", "--set", "class_counts.send=false"), "needs_counts"),
    ):
        outcome = call(*base, *words)
        assert outcome.code in (2, 6) and outcome.err.startswith(f"error[{code}]"), (words, outcome.err)
        assert outcome.err.count("\n") == 1
    assert snapshot(hospitals) == before
    made = ok(*base, "--client", north, "--client", south, "--quick", "--json").json()
    assert load_federation(Path("new.toml")).run_id == made["run_id"]
    assert call(*base, "--client", north).code == 4, "never overwritten"


def test_a_federation_file_with_mistakes(hospitals: Path) -> None:
    text = Path("federation.toml").read_text()
    for old, new, code in (
        ("image_size", "imagesize", "unknown_key"),
        ("quorum = 3\n", "", "missing_key"),
        ("quorum = 3", "quorum = 4", "quorum"),
        ("ed25519:", "rsa:", "bad_key"),
        ("channels = 3", "channels = 2", "bad_value"),
        ("hold_out = 0.2", "hold_out = 1.5", "bad_value"),
        ('"monocyte"', '"lymphocyte"', "classes"),
        ("[clients]", "[clients", "bad_toml"),
    ):
        assert old in text, old
        Path("odd.toml").write_text(text.replace(old, new))
        outcome = call("federation", "show", "odd.toml")
        assert (outcome.code, outcome.err.startswith(f"error[{code}]")) == (2, True), (new, outcome.err)
    Path("odd.toml").write_text("#" * (2 << 20))
    assert "too_large" in call("federation", "show", "odd.toml").err
    assert "no_federation" in call("federation", "show", "gone.toml").err


def test_keys_are_never_overwritten(hospitals: Path) -> None:
    before = Path("server.key").read_bytes()
    outcome = call("server", "keygen", "--out", "server.key")
    assert outcome.code == 2 and "key_exists" in outcome.err
    assert Path("server.key").read_bytes() == before
    public = Path("server.pub").read_text()
    Path("server.pub").unlink()
    assert "was there already" in ok("server", "keygen", "--out", "server.key").out, "half a pair is completed"
    assert (Path("server.key").read_bytes(), Path("server.pub").read_text()) == (before, public)
    Path("half.key").touch(0o600)
    assert "error[key_file]" in call("server", "keygen", "--out", "half.key").err


def test_a_private_key_never_lies_under_a_public_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with chdir(tmp_path):
        assert "error[key_name]" in call("client", "keygen", "--out", "north.pub").err
        assert not list(tmp_path.iterdir())
        with monkeypatch.context() as patch:
            patch.setattr(
                "fedbicross.atomic._write", lambda path, data: (_ for _ in ()).throw(OSError(28, "disk full"))
            )
            assert "error[cannot_write]" in call("client", "keygen", "--out", "north.key").err
        assert not list(tmp_path.iterdir()), "no half of a pair that stops the next try"
        ok("client", "keygen", "--out", "north.key")


@pytest.mark.timeout(60)
def test_a_pipe_on_the_stick_is_not_waited_for(hospitals: Path) -> None:
    os.mkfifo(hospitals / "post" / "pipe.pub")
    os.mkfifo(hospitals / "post" / "pipe.toml")
    base = ("federation", "init", "--classes", "a,b", "--server", "server.pub", "--out", "new.toml")
    assert "error[no_key]" in call(*base, "--client", f"north={hospitals / 'post' / 'pipe.pub'}").err
    assert "error[no_federation]" in call("federation", "show", hospitals / "post" / "pipe.toml").err


# --- client --------------------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
def test_a_pipe_among_the_images_is_not_waited_for(hospitals: Path) -> None:
    words = ("client", "train", "--key", "north.key", "--out", "north.safetensors", "--data")
    with chdir(hospitals / "north"):
        for name in ("pipe.png", "pipe.dcm", "pipe"):
            os.mkfifo(Path("images") / CLASSES[0] / name)
        ok(*words, "images")  # the images are the same, and the upload is there
        Path("list.csv").write_text(f"path,label\nimages/{CLASSES[0]}/pipe.png,{CLASSES[0]}\n")
        assert "error[not_a_file]" in call(*words, "list.csv").err
        for name, code in (("own", "unknown_format"), ("own.npz", "missing_file"), ("own.csv", "not_a_file")):
            os.mkfifo(name)
            assert f"error[{code}]" in call(*words, name).err


def test_training_again_costs_nothing_and_overwrites_nothing(hospitals: Path) -> None:
    words = ("client", "train", "--data", "images", "--key", "north.key", "--out", "north.safetensors")
    with chdir(hospitals / "north"):
        sent = Path("north.safetensors").read_bytes()
        outcome = ok(*words, "--json")
        assert "training north" not in outcome.err and Path("north.safetensors").read_bytes() == sent
        assert outcome.json()["bytes"] == len(sent)
        Path("north.safetensors").write_text("something else")
        assert "error[exists]" in call(*words).err
        assert Path("north.safetensors").read_text() == "something else"


def test_client_show_says_what_leaves(hospitals: Path) -> None:
    with chdir(hospitals / "north"):
        words = ok("client", "show", "north.safetensors", "--tensors").out
        facts = ok("client", "show", "north.safetensors", "--json").json()
    for text in ("weights of a resnet8", "means and variances", "no part of the network", "none", "head.weight"):
        assert text in words
    assert "The trained network and its number of training images." in words
    assert facts["kind"] == "upload" and facts["checked"] == "ok" and facts["manifest"]["client"] == "north"
    images = facts["manifest"]["num_samples"]
    assert f"{images}" in words and facts["manifest"]["class_counts"] is None
    with chdir(hospitals):
        assert "not checked" in ok("client", "show", "north/north.safetensors").out
    Path("text.safetensors").write_text("no bundle at all, only text")
    assert call("client", "show", "text.safetensors").code == 5


def rewritten(file: Path, **changes: Any) -> Path:
    """A stranger's version of an upload: other fields, no signature."""
    tensors, manifest = unpack(file.read_bytes(), "upload")
    out = file.with_name("strange.safetensors")
    out.write_bytes(pack("upload", {**tensors, **changes.pop("tensors", {})}, {**manifest, **changes}))
    return out


def test_a_file_cannot_write_to_the_terminal(hospitals: Path) -> None:
    """A manifest could else move the cursor and put "checked: ok" where it likes."""
    north = hospitals / "post" / "uploads" / "north.safetensors"
    evil = "\x1b[2J\x1b[31mfine"
    strange = rewritten(north, client=evil, run_id=evil, extra={evil: evil})
    shown = ok("client", "show", strange, "--tensors")
    assert "\x1b" not in shown.out + shown.err and "\\x1b[2J" in shown.out
    odd = strange.rename("\x1b[2J.safetensors")  # here, so that its name fits into a table
    for words in (("server", "verify", odd), ("server", "fuse", odd, "--key", "server.key")):
        outcome = call(*words)
        assert outcome.code in (5, 6) and "\x1b" not in outcome.out + outcome.err
        assert "\\x1b[2J" in outcome.out + outcome.err


def test_show_says_no_more_than_it_knows(hospitals: Path, finished: Path) -> None:
    north = hospitals / "post" / "uploads" / "north.safetensors"
    with chdir(hospitals):  # no federation file here: nothing but the file speaks
        hidden = rewritten(north, tensors={"head.bias": torch.zeros(5000)})
        assert "1 tensor(s), 20,000 bytes: head.bias" in ok("client", "show", hidden).out, "a name proves nothing"
        for changes in ({"class_counts": 5}, {"task": [1]}, {"client": None}, {"more": 1}):
            assert "error[manifest]" in call("client", "show", rewritten(north, **changes)).err
        outcome = call("client", "show", finished / "north" / "model" / "model.safetensors")
        assert (outcome.code, "error[wrong_kind]" in outcome.err) == (5, True)


def test_images_that_do_not_fit_the_agreement(hospitals: Path) -> None:
    words = ("client", "train", "--key", "north.key", "--data")
    with chdir(hospitals / "north"):
        (Path("images") / "monocyte").rename(Path("images") / "monocytes")
        outcome = call(*words, "images")
        assert (outcome.code, "did you mean 'monocyte'" in outcome.err) == (3, True)
        (Path("images") / "monocytes").rename(Path("images") / "monocyte")
        next((Path("images") / "monocyte").iterdir()).unlink()
        assert "error[changed]" in call(*words, "images").err, "an upload was made from other images"
        assert "error[missing_file]" in call(*words, "nowhere/at/all").err
        assert (
            "error[wrong_key]"
            in call("client", "train", "--key", "../south/south.key", "--data", "images", "--name", "north").err
        )
        assert "error[not_listed]" in call(*words, "images", "--name", "nort").err


def test_a_site_without_some_classes_and_with_grey_images(hospitals: Path) -> None:
    federation = load_federation(Path("federation.toml"))
    shutil.rmtree(hospitals / "north" / "images" / "monocyte")
    for path in (hospitals / "north" / "images").rglob("*.png"):
        Image.open(path).convert("L").save(path)
    client, held_out = load_site(hospitals / "north" / "images", federation.task, "north", 0.25, 0)
    assert set(client.labels) <= {0, 2} and client.images.shape[1:] == (8, 8, 3)
    assert (len(client.labels), len(held_out)) == (18, 6)
    again, _ = load_site(hospitals / "north" / "images", federation.task, "north", 0.25, 0)
    assert again.digest == client.digest
    nothing, empty = load_site(hospitals / "north" / "images", federation.task, "north", 0.0, 0)
    assert (len(nothing.labels), len(empty)) == (24, 0)


def test_predictions_as_csv(finished: Path, tmp_path: Path) -> None:
    image = finished / "north" / "images" / "monocyte" / "000.png"
    odd = tmp_path / "=cmd.png"
    shutil.copy(image, odd)
    model = finished / "north" / "model"
    out = tmp_path / "answers.csv"
    ok("client", "predict", odd.parent, image, "--model", model, "--out", out)
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [Path(row["image"].lstrip("'")).name for row in rows] == ["=cmd.png", "000.png"]
    for row in rows:
        values = [float(row[name]) for name in CLASSES]
        assert abs(sum(values) - 1) < 1e-5 and row["predicted"] == CLASSES[int(np.argmax(values))]
    assert {tuple(row[name] for name in CLASSES) for row in rows} == {tuple(rows[0][name] for name in CLASSES)}
    printed = ok("client", "predict", image, "--model", model).out
    assert printed.splitlines()[0] == "image,predicted,lymphocyte,monocyte,neutrophil"
    before = out.read_bytes()
    assert "error[exists]" in call("client", "predict", image, "--model", model, "--out", out).err
    assert out.read_bytes() == before
    (tmp_path / "broken.png").write_text("no image")
    assert call("client", "predict", tmp_path / "broken.png", "--model", model).code == 3
    assert call("client", "predict", tmp_path / "gone.png", "--model", model).code == 3
    with chdir(tmp_path):
        assert ok("client", "predict", "=cmd.png", "--model", model).out.splitlines()[1].startswith("'=cmd.png")


def test_evaluate_scores_the_images_that_were_held_out(finished: Path, tmp_path: Path) -> None:
    model, data = finished / "north" / "model", finished / "north" / "images"
    config = json.loads((model / "config.json").read_text())
    found = ok("client", "evaluate", "--model", model, "--data", data, "--json").json()
    assert {key: found[key] for key in ("test", "alone", "comparison")} == {
        key: config[key] for key in ("test", "alone", "comparison")
    }
    everything = ok("client", "evaluate", "--model", model, "--data", data, "--which", "all", "--json").json()
    assert everything["test"]["images"] == 36 > found["test"]["images"]
    words = ok("client", "evaluate", "--model", model, "--data", data).out
    assert "balanced accuracy" in words and "expected calibration error" in words and "trained alone" in words
    assert all(line in words for line in compare.advice(found["comparison"]))
    (tmp_path / "train").mkdir()
    shutil.copytree(data / "monocyte", tmp_path / "one" / "monocyte")
    for path in sorted((tmp_path / "one" / "monocyte").iterdir())[1:]:
        path.unlink()
    assert "error[empty]" in call("client", "evaluate", "--model", model, "--data", tmp_path / "one").err


def test_answers_under_the_class_mix_of_the_images_at_hand(finished: Path, tmp_path: Path) -> None:
    data, whole = finished / "north" / "images", finished / "north" / "model"
    network = load_model(whole)
    count, folder = len(network.states[:1]), tmp_path / "model"
    mixed = replace(
        network,
        architectures=network.architectures[:1],
        states=network.states[:1],
        combine="consensus",
        class_weights=torch.full((count, 3), 0.5),
        log_prior=torch.tensor([0.98, 0.01, 0.01]).log(),
        referral=None,
    )
    shutil.copytree(whole, folder)
    (folder / "model.safetensors").write_bytes(mixed.pack())
    settings = json.loads((folder / "config.json").read_text())
    settings["model_sha256"] = hashlib.sha256(mixed.pack()).hexdigest()
    (folder / "config.json").write_text(json.dumps(settings))
    files = sorted(data.rglob("*.png"))
    images = read_files(files, TASK)
    for flags, model in (((), mixed), (("--adapt-prior",), adapt_prior(mixed, images))):
        ok("client", "predict", data, "--model", folder, "--out", tmp_path / f"{len(flags)}.csv", *flags)
        rows = list(csv.DictReader((tmp_path / f"{len(flags)}.csv").read_text().splitlines()))
        found = {row["image"]: [float(row[name]) for name in CLASSES] for row in rows}
        expected = dict(zip(map(str, files), model.probabilities(images), strict=True))
        assert found.keys() == expected.keys()
        assert all(np.allclose(found[name], expected[name], atol=2e-6) for name in found)
    fixed, adapted = (
        ok("client", "evaluate", "--model", folder, "--data", data, "--which", "all", "--json", *flags).json()
        for flags in ((), ("--adapt-prior",))
    )
    assert fixed["test"]["ece"] != adapted["test"]["ece"] and fixed["alone"] == adapted["alone"]
    for verb in (("predict", data), ("evaluate", "--data", data)):
        assert "error[no_class_mix]" in call("client", *verb, "--model", whole, "--adapt-prior").err


def test_the_model_trained_alone_can_be_used(finished: Path, tmp_path: Path) -> None:
    model, data = finished / "north" / "model", finished / "north" / "images"
    federation = load_federation(finished / "north" / "federation.toml")
    client, held_out = load_site(data, federation.task, "north", federation.hold_out, federation.seed)
    ctx = Context(federation.task, federation.training, seed=federation.seed)
    own = federation.build().alone(client, ctx)
    assert load_model(model, alone=True).pack() == own.pack(), "too few validation images for a temperature"
    files = sorted(data.rglob("*.png"))
    ok("predict", data, "--model", model, "--alone", "--out", tmp_path / "alone.csv")
    rows = list(csv.DictReader((tmp_path / "alone.csv").read_text().splitlines()))
    found = np.array([[float(row[name]) for name in CLASSES] for row in rows])
    assert np.allclose(found, own.probabilities(read_files(files, TASK)), atol=2e-6)
    settings = json.loads((model / "config.json").read_text())
    said = ok("predict", files[0], "--model", model).err
    assert ("--alone" in said) == (settings["comparison"]["keep"] == "alone" and not settings["comparison"]["same"])
    scores = ok("client", "evaluate", "--model", model, "--data", data, "--json").json()
    right = own.probabilities(held_out.images).argmax(1) == held_out.labels
    assert scores["alone"]["accuracy"] == float(right.mean())


def test_a_federation_s_model_is_exported(finished: Path, tmp_path: Path) -> None:
    model = finished / "north" / "model"
    ok("export", model, "--out", tmp_path / "hub")
    names = ["README.md", "alone.safetensors", "config.json", "model.safetensors", "preprocessor_config.json"]
    assert sorted(path.name for path in (tmp_path / "hub").iterdir()) == names
    for name in ("model.safetensors", "alone.safetensors", "config.json"):
        assert (tmp_path / "hub" / name).read_bytes() == (model / name).read_bytes()
    assert (tmp_path / "hub" / "README.md").read_text() == (model / "MODEL_CARD.md").read_text()
    assert (tmp_path / "hub" / "README.md").read_text().startswith("---\nlibrary_name: fedbicross\n")
    ok("export", model, "--alone", "--out", tmp_path / "own")
    assert (tmp_path / "own" / "model.safetensors").read_bytes() == (model / "alone.safetensors").read_bytes()
    card = (tmp_path / "own" / "README.md").read_text()
    assert "- Method: trained alone" in card and "Not measured: there is no model here that" in card
    for words, code in (
        ((model, "--out", tmp_path / "hub"), "exists"),
        ((tmp_path / "own", "--alone", "--out", tmp_path / "x"), "no_model_alone"),
        ((model / "model.safetensors", "--out", tmp_path / "x"), "no_card"),
        ((model, "--method", "fedavg", "--out", tmp_path / "x"), "not_a_run"),
        ((tmp_path, "--out", tmp_path / "x"), "no_model"),
    ):
        outcome = call("export", *words)
        assert f"error[{code}]" in outcome.err and not (tmp_path / "x").exists(), outcome.err
    assert (
        "error[no_model_alone]" in call("predict", model / "MODEL_CARD.md", "--model", tmp_path / "own", "--alone").err
    )


GOOD_COMPARISON = {
    "images": 5,
    "won": 1,
    "lost": 0,
    "interval": [-0.1, 0.3],
    "keep": "alone",
    "learned": True,
    "same": False,
}
ODD_SETTINGS: list[tuple[str, Any]] = [
    ("origin", {}),
    ("origin", {"hold_out": "x", "seed": 0}),
    ("test", [1]),
    ("test", {"images": "many"}),
    ("alone", {"images": 3}),
    ("comparison", ["federated"]),
    ("comparison", {**GOOD_COMPARISON, "interval": [1]}),
    ("comparison", {**GOOD_COMPARISON, "images": 0}),
    ("comparison", {**GOOD_COMPARISON, "won": float("nan")}),
    ("calibration_images", "ten"),
    ("alone_sha256", 7),
    ("schema", 1),
]


def test_a_changed_model_is_not_used(finished: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(finished / "north" / "model", tmp_path / "model"))
    image = finished / "north" / "images" / "monocyte" / "000.png"
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert "error[digest]" in call("client", "predict", image, "--model", model).err
    (model / "model.safetensors").write_bytes(data)
    settings = json.loads((model / "config.json").read_text())
    odd = [{}, [], *({**settings, key: value} for key, value in ODD_SETTINGS)]
    for broken in odd:
        (model / "config.json").write_text(json.dumps(broken))
        for words in (("predict", image), ("evaluate", "--data", image.parents[1])):
            outcome = call("client", *words, "--model", model)
            assert "error[no_model]" in outcome.err, (broken, outcome.err)
        outcome = call("export", model, "--out", tmp_path / "out")
        assert "error[no_model]" in outcome.err and not (tmp_path / "out").exists()
    assert call("client", "predict", image, "--model", tmp_path / "nowhere").code == 5


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"task": replace(TASK, image_size=10**9)}, "architecture"),
        ({"constant": torch.tensor([0.5, 0.5])}, "tensor_shape"),
        ({"constant": torch.tensor([2.0, 0.0, -1.0])}, "magnitude"),
        ({"constant": torch.tensor([torch.nan, 0.0, 1.0])}, "non_finite"),
        ({"constant": None}, "missing_tensor"),
        ({"architectures": ("resnet9000",), "states": ({},)}, "architecture"),
        ({"combine": "class_weighted"}, "missing_tensor"),
    ],
    ids=range(7),
)
def test_a_stranger_s_model_is_checked_before_it_answers(changes: dict[str, Any], code: str, tmp_path: Path) -> None:
    good = Predictor(TASK, constant=torch.tensor([0.2, 0.3, 0.5]))
    image = tmp_path / "image.png"
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(image)
    (tmp_path / "model.safetensors").write_bytes(good.pack())
    assert (
        ",0.200000,0.300000,0.500000" in ok("client", "predict", image, "--model", tmp_path / "model.safetensors").out
    )
    (tmp_path / "model.safetensors").write_bytes(packed_unchecked(replace(good, **changes)))
    outcome = call("client", "predict", image, "--model", tmp_path / "model.safetensors")
    assert outcome.code == 5 and f"error[{code}]" in outcome.err


# --- server --------------------------------------------------------------------------------------------------


def test_verify_names_every_file(hospitals: Path) -> None:
    uploads = hospitals / "post" / "uploads"
    good = ok("server", "verify", uploads)
    assert "3 of 3 sites" in good.out and "missing: none" in good.out
    (uploads / "south.safetensors").unlink()
    damaged = bytearray((uploads / "east.safetensors").read_bytes())
    damaged[-1] ^= 1
    (uploads / "east.safetensors").write_bytes(damaged)
    (uploads / "readme.txt").write_text("hello")
    outcome = call("server", "verify", uploads)
    assert outcome.code == 5
    assert "1 of 3 sites" in outcome.out and "missing: south, east" in outcome.out
    assert "refused, digest" in outcome.out and "readme.txt" in outcome.out
    facts = call("server", "verify", uploads, "--json").json()
    assert {Path(row["file"]).name: row["code"] for row in facts["files"]} == {
        "east.safetensors": "digest",
        "north.safetensors": None,
    }
    before = snapshot(hospitals)
    assert call("server", "verify", uploads / "nothing.safetensors").code == 5
    assert snapshot(hospitals) == before, "verify writes nothing"


def test_fuse_without_everybody(hospitals: Path) -> None:
    uploads, fuse = hospitals / "post" / "uploads", ("server", "fuse", "../post/uploads", "--key", "server.key")
    late = (uploads / "south.safetensors").read_bytes()
    (uploads / "south.safetensors").unlink()
    refused = call(*fuse)
    assert (refused.code, "error[quorum]" in refused.err, "south" in refused.err) == (6, True, True)
    assert not Path("replies").exists()
    done = ok(*fuse, "--quorum", "2")
    assert "missing" in done.out and "missing: south" in done.err
    assert sorted(path.name for path in Path("replies").iterdir()) == ["east.safetensors", "north.safetensors"]
    replies = snapshot(Path("replies"))
    (uploads / "south.safetensors").write_bytes(late)
    again = ok(*fuse)
    assert "late: south" in again.err and "too late" in again.out
    assert snapshot(Path("replies")) == replies
    everybody = ok(*fuse, "--work", "anew", "--out", "replies-anew", "--json").json()
    assert [row["reply"] != "none" for row in everybody["sites"]] == [True, True, True]


def test_a_damaged_upload_is_named_and_left_out(hospitals: Path) -> None:
    east = hospitals / "post" / "uploads" / "east.safetensors"
    east.write_bytes(east.read_bytes()[:-8])
    fuse = ("server", "fuse", "../post/uploads", "--key", "server.key")
    assert "error[quorum]" in call(*fuse).err
    facts = ok(*fuse, "--quorum", "2", "--json").json()
    assert [(Path(row["file"]).name, row["code"]) for row in facts["refused"]] == [("east.safetensors", "file_size")]
    assert audit.verify(facts["audit"], facts["audit_last"]).entries
    events = [json.loads(line)["event"] for line in Path(facts["audit"]).read_text().splitlines()]
    assert sum(event["what"] == "refused" for event in events) == 2
    printed = ok(*fuse)
    assert "east.safetensors" in printed.out and "file_size" in printed.out
    assert audit.verify(facts["audit"]).last in printed.out


def test_an_upload_that_sticks_out_is_held_or_left_out_and_stands_in_the_card(hospitals: Path) -> None:
    """Every number in it is possible, and it is signed: only beside the others it is a hundred times too sure."""
    east = hospitals / "post" / "uploads" / "east.safetensors"
    upload = Upload.unpack(east.read_bytes())
    head = {name: 100 * value for name, value in upload.tensors.items() if name.startswith("head.")}
    key = keys.load_private_key(hospitals / "east" / "east.key")
    east.write_bytes(sign(replace(upload, tensors={**upload.tensors, **head}).pack(), key))
    assert "3 of 3 sites" in ok("server", "verify", "../post/uploads").out
    fuse = ("server", "fuse", "../post/uploads", "--key", "server.key", "--out", "../post/replies")
    held = call(*fuse, "--quorum", "2", "--hold-on-notes")
    assert held.code == 6 and "error[held]" in held.err and "'east'" in held.err
    assert not (hospitals / "post" / "replies").exists()
    assert "error[quorum]" in call(*fuse).err, "all three are needed unless the operator says otherwise"
    done = ok(*fuse, "--quorum", "2")
    assert "left out of the fusion" in done.err
    with chdir(hospitals / "north"):
        reply = ("--reply", "../post/replies/north.safetensors")
        ok("client", "personalize", *reply, "--data", "images", "--out", "model")
        card = (Path("model") / "MODEL_CARD.md").read_text()
        assert "What the server noted" in card and "east" in card
    trusted = ok(*fuse[:-1], "trusted", "--work", "anew", "--trust", "east", "--hold-on-notes", "--json").json()
    assert [row["reply"] != "none" for row in trusted["sites"]] == [True, True, True]


def test_fuse_overwrites_nothing_and_needs_the_right_key(hospitals: Path) -> None:
    fuse = ("server", "fuse", "../post/uploads", "--out", "out", "--key")
    assert "error[wrong_key]" in call(*fuse, "../north/north.key").err
    Path("out").mkdir()
    (Path("out") / "south.safetensors").write_text("mine")
    assert "error[exists]" in call(*fuse, "server.key").err
    assert sorted(path.name for path in Path("out").iterdir()) == ["south.safetensors"], "all or none"
    Path("server.key").chmod(0o644)
    assert "error[key_permissions]" in call(*fuse, "server.key").err


def test_a_reply_for_somebody_else_makes_no_model(finished: Path, tmp_path: Path) -> None:
    reply = finished / "post" / "replies" / "south.safetensors"
    with chdir(finished / "north"):
        words = ("client", "personalize", "--reply", reply, "--data", "images", "--out", tmp_path / "m")
        outcome = call(*words)
        assert (outcome.code, "error[wrong_client]" in outcome.err) == (5, True)
        assert "error[not_listed]" in call(*words, "--name", "nort").err
        assert "error[which_site]" in call(*words, "--work", tmp_path).err
        taken = ("client", "personalize", "--reply", reply.with_name("north.safetensors"), *words[4:-1], Path("images"))
        assert "error[exists]" in call(*taken).err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_verb_run_twice_says_that_it_is_done(hospitals: Path) -> None:
    """As after a kill between the last write and the last line."""
    finish(hospitals)
    with chdir(hospitals / "north"):
        before = snapshot(Path("model"))
        words = ("client", "personalize", "--reply", "in/north.safetensors", "--data", "images", "--out", "model")
        again = ok(*words)
        assert "done before: model" in again.out and "accuracy" in again.out and "training" not in again.err
        assert ok(*words, "--json").json()["test"]["images"] > 0
        assert snapshot(Path("model")) == before
        assert "error[exists]" in call(*words, "--onnx").err, "that is not there yet"
        assert (
            "done before"
            in ok("client", "train", "--data", "images", "--key", "north.key", "--out", "north.safetensors").err
        )
        config = json.loads(Path("model/config.json").read_text())
        for changes, code in (
            ({"origin": {**config["origin"], "client": "south"}}, "exists"),
            ({"test": 3}, "no_model"),
        ):
            Path("model/config.json").write_text(json.dumps({**config, **changes}))
            assert f"error[{code}]" in call(*words).err
    fuse = ("server", "fuse", "../post/uploads", "--key", "server.key", "--out", "../post/replies")
    assert "done before" in ok(*fuse).err
    (hospitals / "server/fedbicross-work/cells-1/server/replies/south.safetensors").write_bytes(b"damaged")
    outcome = call(*fuse)
    assert outcome.code == 4 and "error[damaged]" in outcome.err and "south" in outcome.err


def test_the_log_can_be_checked_from_the_command_line(finished: Path, tmp_path: Path) -> None:
    log = Path(shutil.copy(next((finished / "server").rglob("audit.jsonl")), tmp_path))
    last = ok("server", "audit", log, "--json").json()["last"]
    assert "none changed" in ok("server", "audit", log, "--last", last).out
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:-1]))
    assert "--last" in ok("server", "audit", log).out, "a cut end shows only against the digest on paper"
    for content, options in ((lines[:-1], ("--last", last)), (lines[1:], ()), ([lines[0].upper(), *lines[1:]], ())):
        log.write_bytes(b"".join(content))
        outcome = call("server", "audit", log, *options)
        assert outcome.code == 4 and "error[audit_broken]" in outcome.err
    assert "error[audit_file]" in call("server", "audit", tmp_path / "gone").err


def test_what_was_agreed_besides_the_task_is_shown(hospitals: Path) -> None:
    sites = [word for name in SITES for word in ("--client", f"{name}=../post/{name}.pub")]
    base = ("federation", "init", "--classes", "a,b", "--server", "server.pub", *sites, "--out", "new.toml")
    ok(*base, "--purpose", "a trial of blood counts", "--expires", "2099-01-31", "--method", "fedavg")
    words = ok("federation", "show", "new.toml").out
    assert "a trial of blood counts" in words and "2099-01-31" in words
    assert "error[expires]" in call(*base[:-1], "other.toml", "--expires", "tomorrow").err
    shown = ok("client", "show", "../post/uploads/north.safetensors").out
    assert "signed for" in shown and "no last day" in shown


@pytest.mark.slow
def test_onnx_gives_the_same_answers(finished: Path, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    import fedbicross

    with chdir(finished / "north"):
        reply = ("--reply", finished / "post" / "replies" / "north.safetensors")
        ok("client", "personalize", *reply, "--data", "images", "--out", tmp_path / "model", "--onnx")
    images = np.random.default_rng(0).integers(256, size=(5, 8, 8, 3), dtype=np.uint8)
    session = runtime.InferenceSession((tmp_path / "model" / "model.onnx").read_bytes())
    (answers,) = session.run(None, {"images": images})
    assert np.allclose(answers, fedbicross.load_model(tmp_path / "model").probabilities(images), atol=1e-5)


def test_onnx_without_its_packages_is_one_line(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with chdir(finished / "north"):
        reply = ("--reply", finished / "post" / "replies" / "north.safetensors")
        outcome = call("client", "personalize", *reply, "--data", "images", "--out", tmp_path / "m", "--onnx")
    assert (outcome.code, "error[no_onnx]" in outcome.err) == (2, True)
    assert not (tmp_path / "m").exists()


@pytest.mark.slow
def test_a_site_in_a_process_of_its_own(hospitals: Path, uploaded: Path) -> None:
    shutil.rmtree(hospitals / "east" / "fedbicross-work")
    words = ("client", "train", "--data", "images", "--key", "east.key", "--out", "again.safetensors")
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # as many as trained the one to compare with
    outcome = console(*words, cwd=hospitals / "east", env=threads)
    assert outcome.code == 0, outcome.err
    assert "training east: 1/1" in outcome.err and "what leaves:" in outcome.out
    again = (hospitals / "east" / "again.safetensors").read_bytes()
    assert again == (uploaded / "post" / "uploads" / "east.safetensors").read_bytes(), "same images, same bytes"
