"""The command line as a user meets it, tiny settings for it, and what a folder held before and after."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from fedbicross.bundle.format import canonical_json

ENTRY = "from fedbicross.cli import main; main()"
CONFIG = """
model = "resnet8"
clients = 3
methods = ["local_only", "fedavg"]
baselines = []
device = "cpu"
threads = 1
[data]
name = "cells"
train_size = 60
test_size = 30
image_size = 8
[training]
recipe = "modern"
epochs = 1
batch_size = 32
[partition]
alpha = 0.5
"""
ARTEFACTS = ("models", "replies", "uploads", "client_models")


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """Standard output, which must be one JSON document and nothing else."""
        return json.loads(self.out)


def environment(**more: str) -> dict[str, str]:
    """One thread, no colours, no proxy between us and 127.0.0.1."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "no_proxy": "*", "TERM": "dumb", **more}


def console(*args: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Outcome:
    """A whole new process, as a shell would start it."""
    done = subprocess.run(
        [sys.executable, "-c", ENTRY, *map(str, args)],
        cwd=cwd,
        env=environment(**(env or {})),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=240,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def call(*args: str | Path) -> Outcome:
    """The same entry point in this process, for speed; anything but an orderly exit is raised to the test."""
    from fedbicross.cli import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", ["fedbicross", *map(str, args)]),
    ):
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Outcome(code, out.getvalue(), err.getvalue())


def ok(*args: str | Path) -> Outcome:
    """The same, of a command that goes well."""
    outcome = call(*args)
    assert outcome.code == 0, outcome.err
    return outcome


def config_file(folder: Path, text: str = CONFIG) -> Path:
    """The tiny configuration as a file."""
    path = folder / "tiny.toml"
    path.write_text(text, encoding="utf-8")
    return path


def results(out: Path) -> dict[str, Any]:
    """What a run left in results.json."""
    return dict(json.loads((out / "results.json").read_text(encoding="utf-8")))


def timeless(found: Mapping[str, Any]) -> str:
    """The rows without clock times."""
    return canonical_json([{k: v for k, v in row.items() if not k.startswith("seconds")} for row in found["rows"]])


def artefacts(out: Path, kinds: Sequence[str] = ARTEFACTS) -> dict[str, bytes]:
    """Every model, reply and upload of a run by its name."""
    files = [path for kind in kinds for path in (out / kind).rglob("*") if path.is_file()]
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder; None stands for a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def write_npz(path: Path, size: int = 8, classes: int = 2, **changes: Any) -> Path:
    """A file of MedMNIST's layout; ``changes`` replace arrays, None leaves one out."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for split, count in (("train", 24), ("val", 6), ("test", 12)):
        arrays[f"{split}_images"] = rng.integers(256, size=(count, size, size, 3), dtype=np.uint8)
        arrays[f"{split}_labels"] = (np.arange(count) % classes).astype(np.uint8)[:, None]
    arrays |= changes
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return path
