"""The list of what was written: complete after a kill, shared by processes, and never waited for."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fedbicross import sums
from fedbicross.errors import RunError
from small import code_of

ONE, TWO = (hashlib.sha256(text).hexdigest() for text in (b"one", b"two"))


def test_what_was_noted_is_allowed_and_nothing_else(tmp_path: Path) -> None:
    written = sums.Sums(tmp_path)
    assert not written and code_of(RunError, written.check, "a", b"one") == "no_digests"
    written.note("a", ONE)
    written.note("a", TWO)  # a kill may come before the file itself is written
    assert written and written.lists("a") and not written.lists("b")
    for text in (b"one", b"two"):
        written.check("a", text)
    assert code_of(RunError, written.check, "a", b"three") == code_of(RunError, written.check, "b", b"one") == "damaged"
    written.note("a", ONE)
    assert len((tmp_path / sums.NAME).read_text().splitlines()) == 2, "once is enough"


def test_another_process_may_add(tmp_path: Path) -> None:
    here, there = sums.Sums(tmp_path), sums.Sums(tmp_path)
    here.note("a", ONE)
    there.note("b", TWO)
    here.check("b", b"two")
    there.check("a", b"one")


def test_a_line_cut_by_a_kill_spoils_no_other(tmp_path: Path) -> None:
    sums.Sums(tmp_path).note("a", ONE)
    with (tmp_path / sums.NAME).open("a") as file:
        file.write(f"{TWO}  b")
    again = sums.Sums(tmp_path)
    assert code_of(RunError, again.check, "b", b"two") == "damaged"
    again.note("c", TWO)
    for name, text in (("a", b"one"), ("c", b"two")):
        sums.Sums(tmp_path).check(name, text)


@pytest.mark.parametrize("content", [b"", b"\xff\x00" * 100, b"0" * 64, f"{ONE} a\n".encode(), f"{ONE}  \n".encode()])
def test_a_damaged_list_allows_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / sums.NAME).write_bytes(content)
    assert code_of(RunError, sums.Sums(tmp_path).check, "a", b"one") == "damaged"


def test_a_pipe_or_a_folder_in_its_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / sums.NAME)
    assert code_of(RunError, sums.Sums(tmp_path).check, "a", b"one") == "damaged"
    (tmp_path / sums.NAME).unlink()
    (tmp_path / sums.NAME).mkdir()
    assert code_of(RunError, sums.Sums(tmp_path).check, "a", b"one") == "damaged"


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_the_usual_tool_reads_it(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one")
    sums.Sums(tmp_path).note("a", ONE)
    subprocess.run(["sha256sum", "--check", "--strict", sums.NAME], cwd=tmp_path, check=True, capture_output=True)


def test_rows_are_compared_without_their_times() -> None:
    row = {"method": "fedavg", "accuracy": 0.5}
    assert sums.rows_digest([{**row, "seconds": 1.0, "seconds_by_stage": {}}]) == sums.rows_digest([row])
    assert sums.rows_digest([{**row, "accuracy": 0.6}]) != sums.rows_digest([row])
