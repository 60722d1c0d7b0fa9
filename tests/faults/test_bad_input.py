"""Every mistake a user can make is one line, a documented exit code, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cli.console import (
    CONFIG,
    ENTRY,
    Outcome,
    artefacts,
    call,
    config_file,
    console,
    environment,
    ok,
    results,
    snapshot,
    timeless,
    write_npz,
)
from data.downloads import serving

CONFIGURATION, DATA, FOLDER, UPLOAD = 2, 3, 4, 5


def is_refusal(outcome: Outcome, status: int, code: str) -> None:
    """One line that starts ``error[code]``, the documented exit code, nothing on standard output."""
    assert outcome.code == status, outcome.err
    assert re.fullmatch(rf"error\[{code}\]: [^\n]+\n", outcome.err), outcome.err
    assert outcome.out == ""


def refused(folder: Path, status: int, code: str, *args: str | Path, words: str = "") -> None:
    """Refused in one line, and the folder is as it was."""
    before = snapshot(folder)
    outcome = call(*args)
    is_refusal(outcome, status, code)
    assert words in outcome.err, outcome.err
    assert snapshot(folder) == before


# --- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--alpha", "0"], "alpha", "greater than 0"),
        (["--alpha", "-1"], "alpha", "greater than 0"),
        (["--alpha", "nan"], "bad_value", "partition.alpha"),
        (["--alpha", "inf"], "bad_value", "partition.alpha"),
        (["--alpha", "1e300"], "bad_alpha", "1,000,000"),
        (["--clients", "0"], "clients", "at least 1"),
        (["--clients", "-3"], "clients", "at least 1"),
        (["--methods", "fedavgg"], "unknown_method", "did you mean 'fedavg'?"),
        (["--methods", "ensemble:class_weight"], "unknown_variant", "did you mean 'class_weighted'?"),
        (["--methods", "majority:x"], "unknown_variant", "it has none"),
        (["--set", "clinets=3"], "unknown_key", "did you mean 'clients'?"),
        (["--set", "training.epoch=3"], "unknown_key", "did you mean 'epochs'?"),
        (["--set", "method.fedavg.round=3"], "unknown_key", "did you mean 'rounds'?"),
        (["--set", "clients=five"], "bad_value", "clients"),
        (["--set", "clients=3.5"], "bad_value", "clients"),
        (["--set", "clients.x=3"], "bad_value", "clients"),
        (["--set", "data=3"], "bad_value", "data"),
        (["--set", "method=3"], "bad_value", "method"),
        (["--set", "method.fedavg=3"], "bad_value", "method.fedavg"),
        (["--set", "seeds=[0, 0]"], "seeds", "once"),
        (["--set", "clients"], "bad_set", "key=value"),
        (["--set", "data.image_size=4"], "bad_value", "data.image_size"),
        (["--set", "data.seed=-1"], "bad_seed", "seed"),
        (["--set", "threads=0"], "bad_value", "threads"),
        (["--set", "partition.classes_per_client=0", "--partition", "pathological"], "bad_classes_per_client", "1 to"),
        (["--model", "resnet19"], "unknown_model", "did you mean 'resnet18'?"),
        (["--methods", "ensemble", "--client-models", "resnet8,vgg88"], "unknown_model", "did you mean 'vgg8'?"),
        (["--methods", "ensemble", "--client-models", "resnet8,vgg8,cnn,resnet8"], "client_models", "at most one each"),
        (["--client-models", "resnet8,vgg8"], "mixed_models", "fedavg cannot work"),
        (["--methods", "fedisca", "--set", "method.fedisca.shots=0"], "bad_value", "method.fedisca.shots"),
        (["--data", "bloodmnits"], "unknown_data", "did you mean 'bloodmnist'?"),
        (["--data", "x" * 5000], "unknown_data", "known:"),
        (["--partition", "dirichle"], "unknown_partition", "did you mean 'dirichlet'?"),
        (["--device", "gpu"], "bad_value", "device"),
        (["--epochs", "0"], "bad_value", "training.epochs"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_settings(args: list[str], code: str, words: str, tmp_path: Path) -> None:
    config = config_file(tmp_path)
    refused(tmp_path, CONFIGURATION, code, "run", config, *args, "--out", tmp_path / "out", words=words)


@pytest.mark.parametrize("name", ["../../elsewhere", "/elsewhere", "a/b", "..", "", "a\\u0000b", "a\\nb"])
def test_a_configuration_does_not_choose_where_it_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_file(tmp_path, f'name = "{name}"\n' + CONFIG)
    refused(tmp_path, CONFIGURATION, "name", "run", config)


def test_more_clients_than_samples(tmp_path: Path) -> None:
    config = config_file(tmp_path)
    args = ("run", config, "--clients", "61", "--out", tmp_path / "new" / "out")
    refused(tmp_path, DATA, "too_many_clients", *args, words="61 clients cannot share 60")
    refused(tmp_path, DATA, "too_many_clients", *args[:2], "--clients", str(10**15), *args[4:])


@pytest.mark.slow
def test_in_a_process_of_its_own_too(tmp_path: Path) -> None:
    config = config_file(tmp_path)
    before = snapshot(tmp_path)
    is_refusal(console("run", config, "--methods", "fedavgg", cwd=tmp_path), CONFIGURATION, "unknown_method")
    is_refusal(console("run", config, "--clients", "61", cwd=tmp_path), DATA, "too_many_clients")
    is_refusal(console("run", config, "--out", config / "out"), FOLDER, "cannot_write")
    assert snapshot(tmp_path) == before


# --- configuration files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [b"clients = = 3", b"\xff\xfe\x00", b"clients = 3\x00", b"[" * 20_000, b"a." * 5000 + b"a = 1"]
)
def test_corrupt_configuration(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_bytes(content)
    before = snapshot(tmp_path)
    for verb in (["validate"], ["run", "--out", str(tmp_path / "out")]):
        outcome = call(verb[0], tmp_path / "c.toml", *verb[1:])
        assert outcome.code == CONFIGURATION and outcome.err.startswith("error["), outcome.err
        assert outcome.err.count("\n") == 1
    assert snapshot(tmp_path) == before


def test_no_configuration(tmp_path: Path) -> None:
    refused(tmp_path, CONFIGURATION, "no_config", "run", tmp_path / "absent.toml", "--out", tmp_path / "out")
    refused(tmp_path, CONFIGURATION, "bad_toml", "run", tmp_path, "--out", tmp_path / "out")


# --- data ---------------------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    data = write_npz(path).read_bytes()
    path.write_bytes(data[: len(data) // 2])


BAD_NPZ: dict[str, tuple[Callable[[Path], Any], str]] = {  # others: tests/data/test_medmnist.py
    "cut": (cut, "corrupt_file"),
    "negative": (lambda path: write_npz(path, test_labels=np.full(12, -1)), "label_range"),
    "no images": (lambda path: write_npz(path, test_images=np.empty((0, 8, 8, 3), np.uint8), test_labels=[]), ""),
    "other size": (lambda path: write_npz(path, size=12), "wrong_size"),
}


@pytest.mark.parametrize("case", BAD_NPZ)
def test_npz(case: str, tmp_path: Path) -> None:
    make, code = BAD_NPZ[case]
    make(tmp_path / "own.npz")
    config = config_file(tmp_path, CONFIG.replace("train_size = 60\ntest_size = 30\n", ""))
    args = ("run", config, "--data", tmp_path / "own.npz", "--out", tmp_path / "new" / "out")
    refused(tmp_path, DATA, code or r"\w+", *args)


def test_missing_npz(tmp_path: Path) -> None:
    config = config_file(tmp_path)
    out = ("--out", tmp_path / "out")
    refused(tmp_path, CONFIGURATION, "unknown_data", "run", config, "--data", tmp_path / "no.npz", *out, words="no.npz")
    refused(tmp_path, CONFIGURATION, "unknown_data", "run", config, "--data", "./no.npz", *out)
    known = ("--data", "bloodmnist", "--data-dir", tmp_path, "--set", "data.image_size=28")
    refused(tmp_path, DATA, "missing_file", "run", config, *known, *out, words="download")
    refused(tmp_path, DATA, "missing_file", "data", "show", tmp_path / "no.npz")
    refused(
        tmp_path, CONFIGURATION, "unknown_dataset", "data", "fetch", "bloodmnits", words="did you mean 'bloodmnist'?"
    )


def picture(path: Path, value: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(path)
    return path


def pictures(root: Path, count: int = 6) -> Path:
    for label in ("cat", "dog"):
        for number in range(count):
            picture(root / label / f"{number}.png", 20 * number)
    return root


def test_folders(tmp_path: Path) -> None:
    config = config_file(tmp_path, CONFIG.replace("train_size = 60\ntest_size = 30\n", ""))
    empty = tmp_path / "empty"
    empty.mkdir()
    args = ("run", config, "--out", tmp_path / "out", "--data")
    refused(tmp_path, DATA, "empty", *args, empty, words="no images")
    bad = pictures(tmp_path / "pets") / "cat" / "3.png"
    bad.write_bytes(bad.read_bytes()[:40])
    refused(tmp_path, DATA, "unreadable_image", *args, tmp_path / "pets", words="3.png")
    picture(tmp_path / "one" / "cat" / "1.png")
    refused(tmp_path, DATA, "one_class", *args, tmp_path / "one")
    (tmp_path / "notes.pdf").write_text("")
    refused(tmp_path, DATA, "unknown_format", *args, tmp_path / "notes.pdf")


def test_a_class_whose_name_is_not_text(tmp_path: Path) -> None:
    pictures(tmp_path / "pets")
    (tmp_path / "pets" / "cat").rename(tmp_path / "pets" / os.fsdecode(b"caf\xe9"))
    config = config_file(tmp_path, CONFIG.replace("train_size = 60\ntest_size = 30\n", ""))
    refused(tmp_path, DATA, "bad_name", "run", config, "--data", tmp_path / "pets", "--out", tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "bad_manifest"),
        ("path,label\n", "empty"),
        ("path,label,split\nabsent.png,x,train\nabsent2.png,y,test\n", "missing_file"),
        ('path,label\n"a.png,x\n', r"\w+"),
        ("path,label\na.png,x,y,z\n", r"\w+"),
    ],
)
def test_manifests(text: str, code: str, tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "list.csv").write_text(text)
    args = ("run", config_file(tmp_path), "--data", tmp_path / "list.csv", "--out", tmp_path / "out")
    refused(tmp_path, DATA, code, *args)


def test_natural_partition_without_sites(tmp_path: Path) -> None:
    args = ("run", config_file(tmp_path), "--partition", "natural", "--out", tmp_path / "out")
    refused(tmp_path, DATA, "no_sites", *args, words="site")


# --- partition files ----------------------------------------------------------------------------------------------


def changed(text: str, key: str, value: Any) -> str:
    found = json.loads(text)
    found["partitions"]["0"][key] = value
    return json.dumps(found)


BAD_PARTITIONS: dict[str, Callable[[str], str]] = {  # inside of one: tests/data/test_partition.py
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "list": lambda text: "[]",
    "number": lambda text: '{"partitions": 5}',
    "text": lambda text: '{"partitions": "0"}',
    "null": lambda text: '{"partitions": {"0": null}}',
    "deep": lambda text: "[" * 100_000,
    "other seed": lambda text: text.replace('"0":', '"1":'),
    "hash": lambda text: changed(text, "sha256", "0" * 64),
}


@pytest.mark.parametrize("case", BAD_PARTITIONS)
def test_corrupt_partition(case: str, finished: Path, tmp_path: Path) -> None:
    out = shutil.copytree(finished, tmp_path / "tiny")
    text = (out / "partition.json").read_text()
    (out / "partition.json").write_text(BAD_PARTITIONS[case](text))
    refused(tmp_path, FOLDER, "damaged", "resume", out, words="partition.json")
    config = config_file(tmp_path)
    before = snapshot(tmp_path)
    outcome = call("run", config, "--set", f"partition.file={out}/partition.json", "--out", tmp_path / "out")
    assert outcome.code in (CONFIGURATION, DATA), outcome.err
    assert re.fullmatch(r"error\[partition_\w+\]: [^\n]+\n", outcome.err), outcome.err
    assert snapshot(tmp_path) == before


# --- run folders --------------------------------------------------------------------------------------------------


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    """As root nothing is read-only, but below a file, or in /proc, nobody can write."""
    config = config_file(tmp_path)
    for out in (config / "out", config / "a" / "b", Path("/proc/fedbicross/out"), tmp_path / "new" / ("x" * 300)):
        refused(tmp_path, FOLDER, "cannot_write", "run", config, "--out", out)
    refused(tmp_path, FOLDER, "cannot_write", "run", config, "--out", config, "--overwrite")


def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    config = config_file(tmp_path)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("precious")
    (mine / "config.toml").write_text("x = 1")
    for more in ([], ["--overwrite"]):
        refused(tmp_path, FOLDER, "exists", "run", config, "--out", mine, *more)
    refused(tmp_path, FOLDER, "no_digests", "resume", mine)
    (mine / "config.toml").unlink()
    refused(tmp_path, FOLDER, "not_a_run", "resume", mine, words="no config.toml")
    refused(tmp_path, FOLDER, "not_a_run", "resume", tmp_path / "absent")
    refused(tmp_path, FOLDER, "not_a_run", "resume", config)
    refused(tmp_path, FOLDER, "results_missing", "report", mine)
    refused(tmp_path, FOLDER, "results_missing", "report", tmp_path / "absent")
    assert call("report", config).code == FOLDER
    (mine / "thesis.txt").unlink()
    assert call("run", config, "--methods", "majority", "--out", mine).code == 0, "an empty folder will do"


def test_a_start_that_was_killed_is_no_obstacle(tmp_path: Path) -> None:
    config = config_file(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    (out / ".lock").touch()
    (out / ".tmp-abc").write_text("{")
    refused(tmp_path, FOLDER, "not_a_run", "resume", out)
    (out / "partition.json").write_text("{}")
    assert call("run", config, "--methods", "majority", "--out", out).code == 0
    assert not list(out.rglob(".tmp-*"))


def test_corrupt_configuration_of_a_run(finished: Path, tmp_path: Path) -> None:
    out = shutil.copytree(finished, tmp_path / "tiny")
    text = (out / "config.toml").read_text()
    for bad in ("clients = = 3", text.replace("clients", "clinets"), text.replace("clients = 3", "clients = 2")):
        (out / "config.toml").write_text(bad)
        refused(tmp_path, FOLDER, "damaged", "resume", out, words="config.toml")


def garbled_results(good: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "no rows", {"schema": 1}
    for key in good:
        if key not in ("rows", "schema"):
            for value in (None, [3]):
                yield f"{key} = {value!r}", {**good, key: value}
            yield f"without {key}", {k: v for k, v in good.items() if k != key}
    for key in good["rows"][0]:
        for value in ({"x": [3]},):
            yield f"rows.{key} = {value!r}", {**good, "rows": [{**good["rows"][0], key: value}]}
        rest = {k: v for k, v in good["rows"][0].items() if k != key}
        yield f"rows without {key}", {**good, "rows": [rest]}


@pytest.mark.slow
def test_report_of_garbled_results(finished: Path, tmp_path: Path) -> None:
    """Either a page can still be written, or it is refused in one line; never a traceback, never half a page."""
    (tmp_path / "results.json").write_text("{garbled")
    refused(tmp_path, FOLDER, "results_garbled", "report", tmp_path)
    for name, content in garbled_results(results(finished)):
        (tmp_path / "results.json").write_text(json.dumps(content))
        before = snapshot(tmp_path)
        outcome = call("report", tmp_path)
        if outcome.code:
            is_refusal(outcome, FOLDER, r"results_\w+")
            assert snapshot(tmp_path) == before, name
        for path in tmp_path.iterdir():
            if path.name != "results.json":
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_resume_writes_garbled_results_again(finished: Path, tmp_path: Path) -> None:
    out = shutil.copytree(finished, tmp_path / "tiny")
    (out / "results.json").write_text("{garbled")
    (out / "events.jsonl").write_bytes(b'5\n[]\n\xff\xfe\n{"event": "tr')
    ok("resume", out)
    assert timeless(results(out)) == timeless(results(finished))


def test_a_damaged_file_can_be_deleted_and_made_again(finished: Path, tmp_path: Path) -> None:
    """Files of equal content are one file on disk; a damaged one must not come back under another name."""
    out = tmp_path / "tiny"
    subprocess.run(["cp", "-a", str(finished), str(out)], check=True)  # keeps the hard links
    victim = next((out / "client_models").iterdir())
    data = bytearray(victim.read_bytes())
    data[-5] ^= 1
    victim.write_bytes(bytes(data))
    shutil.rmtree(out / "rows")
    is_refusal(keep_last_line(call("resume", out)), FOLDER, "damaged")
    victim.unlink()
    for kind in ("rows", "uploads", "models", "replies", "predictions"):
        shutil.rmtree(out / kind)
    assert call("resume", out).code == 0
    assert timeless(results(out)) == timeless(results(finished))
    assert artefacts(out) == artefacts(finished)


def keep_last_line(outcome: Outcome) -> Outcome:
    """Without the progress that came before the error."""
    assert "Traceback" not in outcome.err
    return Outcome(outcome.code, outcome.out, outcome.err.splitlines()[-1] + "\n")


# --- a full disk --------------------------------------------------------------------------------------------------


def with_small_files(most: int, *words: object) -> Outcome:
    """A process of its own that can write no file of more bytes."""
    done = subprocess.run(
        [sys.executable, "-c", ENTRY, *map(str, words)],
        env=environment(),
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)),
        check=False,
    )
    return keep_last_line(Outcome(done.returncode, done.stdout, done.stderr))


def full(handle: int) -> None:
    raise OSError(28, "No space left on device")


def test_full_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_file(tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    refused(tmp_path, FOLDER, "cannot_write", "run", config, "--out", tmp_path / "a" / "b" / "out", words="No space")
    refused(tmp_path, FOLDER, "cannot_write", "run", config, "--out", tmp_path / "out", words="No space")


@pytest.mark.slow
def test_full_in_the_middle_then_resumed(finished: Path, tmp_path: Path) -> None:
    """Files of over 100 kB cannot be written, as with a quota; the network has 300 kB."""
    config, out = config_file(tmp_path), tmp_path / "tiny"
    outcome = with_small_files(100_000, "run", config, "--out", out)
    is_refusal(outcome, FOLDER, "cannot_write")
    assert f"`fedbicross resume {out}`" in outcome.err
    assert not list(out.rglob(".tmp-*"))
    assert call("resume", out).code == 0
    assert timeless(results(out)) == timeless(results(finished))
    assert artefacts(out) == artefacts(finished)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small disk can only be mounted by root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_fills_up_then_has_space_again(finished: Path, small_disk: Path, tmp_path: Path) -> None:
    out = small_disk / "tiny"
    outcome = call("run", config_file(tmp_path), "--out", out)
    is_refusal(keep_last_line(outcome), FOLDER, "cannot_write")
    assert "No space left" in outcome.err and "resume" in outcome.err
    assert not list(out.rglob(".tmp-*"))
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb") as filler:
        while True:
            filler.write(bytes(4096))
            filler.flush()
    with contextlib.suppress(OSError), (out / "events.jsonl").open("ab") as log:
        log.write(b'{"cut": "' + b"x" * 5000)
    again = call("resume", out)  # still full
    is_refusal(keep_last_line(again), FOLDER, "cannot_write")
    (small_disk / "filler").unlink(missing_ok=True)
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    assert call("resume", out).code == 0
    assert timeless(results(out)) == timeless(results(finished))
    assert artefacts(out) == artefacts(finished)


def test_a_full_disk_when_the_report_is_written(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = shutil.copytree(finished, tmp_path / "tiny")
    monkeypatch.setattr(os, "fsync", full)
    refused(tmp_path, FOLDER, "cannot_write", "report", out, words="No space")


# --- downloads ----------------------------------------------------------------------------------------------------


@pytest.fixture
def half() -> Iterator[str]:
    """Of a file that is promised and breaks off in the middle."""
    with serving(b"x" * 1000) as server:
        server.mode = "cut"
        yield server.url


def test_interrupted_download(half: str, tmp_path: Path) -> None:
    outcome = call("data", "fetch", "bloodmnist", "--data-dir", tmp_path / "d", "--url", half)
    is_refusal(keep_last_line(outcome), DATA, "interrupted")
    assert snapshot(tmp_path) == {"d": None, "d/bloodmnist.npz.part": b"x" * 500}, "never under the final name"


def test_download_to_a_full_disk(half: str, tmp_path: Path) -> None:
    words = ("data", "fetch", "bloodmnist", "--data-dir", tmp_path / "d", "--url", half)
    is_refusal(with_small_files(100, *words), DATA, "cannot_write")
    assert not (tmp_path / "d" / "bloodmnist.npz").exists()


@pytest.mark.parametrize("url", ["file:///etc/passwd", "http://[::1", "http://127.0.0.1:port/", "http://127.0.0.1/ü"])
def test_addresses(url: str, tmp_path: Path) -> None:
    refused(tmp_path, CONFIGURATION, "bad_url", "data", "fetch", "bloodmnist", "--data-dir", tmp_path, "--url", url)
