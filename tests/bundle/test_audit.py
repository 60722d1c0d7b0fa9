from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from fedbicross.bundle import audit
from fedbicross.errors import RunError
from small import refuses


def refused(code: str, *args: object, append: bool = False) -> str:
    with refuses(RunError, code) as caught:
        audit.append(*args) if append else audit.verify(*args)  # type: ignore[arg-type]
    return str(caught.value.args[0])


def test_a_chain_that_anyone_can_check(tmp_path: Path) -> None:
    log, clock = tmp_path / "audit.jsonl", count(1)
    digests = [audit.append(log, {"what": name}, lambda: f"t{next(clock)}") for name in ("a", "é\n", "c")]
    previous = "0" * 64
    for number, line in enumerate(log.read_bytes().splitlines(), start=1):
        entry = json.loads(line)
        assert (entry["n"], entry["time"], entry["previous"]) == (number, f"t{number}", previous)
        previous = hashlib.sha256(line).hexdigest()
        assert previous == digests[number - 1]
    assert audit.verify(log).entries == audit.verify(log, digests[-1]).entries == 3
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_an_empty_log_is_whole(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    assert audit.verify(tmp_path / "log").entries == 0
    refused("audit_file", tmp_path / "absent")


def test_the_clock(tmp_path: Path) -> None:
    audit.append(tmp_path / "log", {})
    time = json.loads((tmp_path / "log").read_text())["time"]
    assert len(time) == 20 and time[10] == "T" and time.endswith("Z")


def test_lines_missing_at_the_end_show_only_against_the_last_digest(tmp_path: Path) -> None:
    log = tmp_path / "log"
    first, last = audit.append(log, {"n": 1}), audit.append(log, {"n": 2})
    log.write_bytes(log.read_bytes().splitlines(keepends=True)[0])
    assert audit.verify(log).entries == 1, "the chain alone cannot know"
    assert "line 1" in refused("audit_broken", log, last)
    assert audit.verify(log, first).entries == 1


@pytest.mark.parametrize("line", [1, 2, 3])
def test_the_first_bad_line_is_named(line: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    for number in range(4):
        audit.append(log, {"number": number})
    lines = log.read_text().splitlines(keepends=True)
    lines[line - 1] = lines[line - 1].replace('"number":', '"Number":')
    log.write_text("".join(lines))
    assert f"line {line + 1}" in refused("audit_broken", log), "its successor no longer fits"
    lines[line - 1] = "{}\n"
    log.write_text("".join(lines))
    assert f"line {line} " in refused("audit_broken", log)


def test_a_torn_last_line(tmp_path: Path) -> None:
    """A kill in the middle of a write: whatever part is there, the log goes on and the tear is on record."""
    log = tmp_path / "log"
    audit.append(log, {"number": 1})
    whole = log.read_bytes()
    audit.append(log, {"number": 2})
    torn = log.read_bytes()
    for length in range(len(whole) + 1, len(torn)):
        log.write_bytes(torn[:length])
        assert "line 2" in refused("audit_torn", log)
        audit.append(log, {"number": 3})
        assert audit.verify(log).entries == 2
        last = json.loads(log.read_bytes().splitlines()[-1])
        assert last["event"] == {"number": 3} and last["torn_bytes_removed"] == length - len(whole)


def test_the_very_first_line_torn(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b'{"event":{"a')
    audit.append(log, {"a": 1})
    assert audit.verify(log).entries == 1


@pytest.mark.parametrize("content", [b"hello\n", b"\n", b"{}\n", b"[]\n", b'{"n":1}\n', b"\xff\n", b"[" * 5000 + b"\n"])
def test_nothing_is_added_to_what_is_no_log(content: bytes, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(content)
    refused("audit_broken", log, {}, append=True)
    refused("audit_broken", log)
    assert log.read_bytes() == content


@pytest.mark.timeout(20)
def test_places_that_are_no_log(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo", "folder/log"):
        refused("audit_file", tmp_path / name, {}, append=True)
    refused("audit_file", tmp_path, {}, append=True)
    assert not (tmp_path / "elsewhere").exists()


def test_entries_have_a_limit(tmp_path: Path) -> None:
    refused("audit_entry", tmp_path / "log", {"x": "x" * audit.MAX_LINE}, append=True)
    audit.append(tmp_path / "log", {"x": "x" * (audit.MAX_LINE // 2)})
    audit.append(tmp_path / "log", {"x": "x" * (audit.MAX_LINE // 2)})
    assert audit.verify(tmp_path / "log").entries == 2


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    audit.append(log, {"a": 1})
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda handle, data: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert "No space" in refused("audit_write", log, {"a": 2}, append=True)
    audit.append(log, {"a": 3})
    assert audit.verify(log).entries == 2


def test_many_writers_at_once(tmp_path: Path) -> None:
    """Four processes, one chain: the lock keeps lines whole and in order."""
    log = tmp_path / "log"
    code = "import sys; from fedbicross.bundle import audit\n"
    code += "for _ in range(25): audit.append(sys.argv[1], {'who': sys.argv[2]})"
    writers = [subprocess.Popen([sys.executable, "-c", code, str(log), str(who)]) for who in range(4)]
    assert [writer.wait() for writer in writers] == [0] * 4
    assert audit.verify(log).entries == 100
    assert {json.loads(line)["event"]["who"] for line in log.read_bytes().splitlines()} == {"0", "1", "2", "3"}
