"""Cells travel in one file; what comes in is checked line by line."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.small import rows
from fedbicross.bench import carry, cells, suite
from fedbicross.errors import RunError
from small import refuses


@pytest.fixture
def packed(smoke: Path, tmp_path: Path) -> Path:
    file = tmp_path / "cells.jsonl.gz"
    assert len(carry.pack(["smoke"], smoke, file)) == 33
    return file


def test_there_and_back(smoke: Path, packed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = carry.unpack(packed, ["smoke"], out)
    assert len(done.written) == 33 and not done.kept and not done.refused
    assert rows(out) == rows(smoke)
    for file in (smoke / "cells").rglob("*.json"):
        assert (out / file.relative_to(smoke)).read_bytes() == file.read_bytes()
    again = carry.unpack(packed, ["smoke"], out)
    assert len(again.kept) == 33 and not again.written
    other = tmp_path / "again.gz"
    carry.pack(["smoke"], out, other)
    assert other.read_bytes() == packed.read_bytes(), "the same cells give the same bytes"


def test_what_is_current_replaces_what_is_there_and_what_is_stale_does_not(
    smoke: Path, packed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(smoke / "cells", out / "cells")
    file = next(out.rglob("fedavg.json"))
    true = file.read_bytes()
    other = json.loads(true)
    file.write_bytes(cells.as_bytes({**other, "digest": "0" * 64}))
    old = tmp_path / "old.gz"
    carry.pack(["smoke"], out, old)
    assert len(carry.unpack(packed, ["smoke"], out).written) == 1 and file.read_bytes() == true
    assert not carry.unpack(old, ["smoke"], out).written and file.read_bytes() == true
    file.unlink()
    assert len(carry.unpack(old, ["smoke"], out).written) == 1, "better a stale one than none"
    file.write_text("{")
    assert len(carry.unpack(packed, ["smoke"], out).written) == 1 and file.read_bytes() == true


def change(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda stored: {**stored, **fields}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda stored: [],
        lambda stored: {"schema": 1},
        change(schema=9),
        change(cell="fedavg"),
        change(row={"method": "other"}),
        change(row=None),
        change(digest=7),
        lambda stored: {**stored, "cell": {**stored["cell"], "data": "../../../etc"}},
        lambda stored: {**stored, "cell": {**stored["cell"], "method": "../fedavg"}},
        lambda stored: {**stored, "cell": {**stored["cell"], "suite": ["smoke"]}},
        lambda stored: {**stored, "cell": {**stored["cell"], "suite": "ours/.."}},
        lambda stored: {**stored, "cell": {**stored["cell"], "budget": {}}},
        lambda stored: {**stored, "cell": {**stored["cell"], "seed": True}},
        lambda stored: {**stored, "cell": {**stored["cell"], "clients": 3.0}},
    ],
)
def test_lines_that_are_no_cells(spoil: Any, packed: Path, tmp_path: Path) -> None:
    first, *rest = gzip.decompress(packed.read_bytes()).splitlines()
    bad = tmp_path / "bad.gz"
    bad.write_bytes(gzip.compress(b"\n".join([json.dumps(spoil(json.loads(first))).encode(), *rest]) + b"\n"))
    done = carry.unpack(bad, ["smoke"], tmp_path / "out")
    assert len(done.refused) == 1 and done.refused[0].startswith("line 1: ") and len(done.written) == 32
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(files) == 32 and all((tmp_path / "out" / "cells" / "smoke") in path.parents for path in files)


def test_files_that_are_no_packs(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, file = packed.read_bytes(), tmp_path / "file"
    cut = gzip.compress(gzip.decompress(whole)[:-1])
    contents = [(b"", None), (b"PK\3\4", "unreadable"), (whole[: len(whole) // 2], "unreadable"), (cut, "garbled")]
    for content, code in contents:
        file.write_bytes(content)
        if code is None:
            assert carry.unpack(file, ["smoke"], tmp_path / "out") == carry.Carried()
            continue
        with refuses(RunError, f"pack_{code}"):
            carry.unpack(file, ["smoke"], tmp_path / "out")
    with refuses(RunError, "pack_unreadable"):
        carry.unpack(tmp_path / "gone", ["smoke"], tmp_path / "out")
    for limit, value in (("MAX_CELL", 1000), ("MAX_CELLS", 32)):  # a small file may hold much more than it seems
        with monkeypatch.context() as patch, pytest.raises(RunError) as error:
            patch.setattr(carry, limit, value)
            carry.unpack(packed, ["smoke"], tmp_path / "out")
        assert error.value.code == "pack_garbled"


def test_nothing_to_pack(tmp_path: Path, smoke: Path) -> None:
    with pytest.raises(RunError) as error:
        carry.pack(list(suite.builtin()), tmp_path, tmp_path / "file")
    assert error.value.code == "nothing_to_pack" and not (tmp_path / "file").exists()
    (tmp_path / "file").touch()
    with refuses(RunError, "cannot_write"):
        carry.pack(["smoke"], smoke, tmp_path / "file" / "cells.gz")
