"""An append-only log in which every line holds the SHA-256 of the line before it.

Editing, removing or reordering lines breaks the chain. What the chain alone cannot show is that lines are missing at
the end: keep the last digest, which `fedbicross server fuse` prints, somewhere else, and give it to ``verify``.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from filelock import lock_descriptor

from fedbicross.atomic import open_itself
from fedbicross.bundle.format import canonical_json
from fedbicross.errors import RunError

START = "0" * 64  # what the first line names as its predecessor
MAX_LINE = 1 << 20


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def append(path: str | Path, event: Mapping[str, Any], clock: Callable[[], str] = now) -> str:
    """Add one entry, on disk before this returns; the digest of the new line."""
    with _locked(Path(path), "RDWR", "CREAT") as handle:
        number, previous, end = _last(handle, path)
        torn = os.fstat(handle).st_size - end
        entry: dict[str, Any] = {"n": number + 1, "time": clock(), "event": dict(event), "previous": previous}
        if torn:  # a process died while it wrote: its half line never counted, but that it existed is recorded
            entry["torn_bytes_removed"] = torn
            os.ftruncate(handle, end)
        line = canonical_json(entry).encode()
        if len(line) >= MAX_LINE:
            raise RunError("audit_entry", f"an audit entry of {len(line):,} bytes is over the limit of {MAX_LINE:,}")
        os.lseek(handle, end, os.SEEK_SET)
        written = os.write(handle, line + b"\n")
        if written != len(line) + 1:
            raise RunError("audit_write", f"cannot write to {path}: the disk may be full")
        os.fsync(handle)
        return hashlib.sha256(line).hexdigest()


class Chain(NamedTuple):
    """An unbroken log: how many entries, and the digest of the last, which is worth keeping elsewhere."""

    entries: int
    last: str


def verify(path: str | Path, last: str | None = None) -> Chain:
    """Read a log through and refuse a broken one; ``last`` is the digest that its last line must have."""
    previous, count = START, 0
    with _locked(Path(path), "RDONLY") as handle, os.fdopen(os.dup(handle), "rb") as file:
        for count, line in enumerate(_lines(file, path), start=1):
            entry = _entry(line)
            if entry is None or entry["n"] != count or entry["previous"] != previous:
                raise RunError("audit_broken", f"{path}: line {count} was changed, or one before it was removed")
            previous = hashlib.sha256(line).hexdigest()
    if last is not None and last != previous:
        raise RunError("audit_broken", f"{path}: line {count} is not the last that was written")
    return Chain(count, previous)


def _lines(file: Any, path: str | Path) -> Iterator[bytes]:
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if not line.endswith(b"\n"):
            raise RunError("audit_torn", f"{path}: line {number} is unfinished or too long")
        yield line[:-1]


def _entry(line: bytes) -> dict[str, Any] | None:
    """The entry if the line is exactly what ``append`` writes."""
    try:
        entry = json.loads(line)
        known = {"n", "time", "event", "previous"}
        if not isinstance(entry, dict) or entry.keys() - {"torn_bytes_removed"} != known:
            return None
        return entry if canonical_json(entry).encode() == line else None
    except (ValueError, RecursionError):
        return None


def _last(handle: int, path: str | Path) -> tuple[int, str, int]:
    """Number and digest of the last whole line, and where it ends."""
    size = os.fstat(handle).st_size
    start = max(0, size - 2 * MAX_LINE)
    os.lseek(handle, start, os.SEEK_SET)
    tail = os.read(handle, size - start)
    end = tail.rfind(b"\n") + 1
    if end == 0:
        if size >= MAX_LINE:
            raise RunError("audit_broken", f"{path} is not an audit log")
        return 0, START, 0
    line = tail[tail.rfind(b"\n", 0, end - 1) + 1 : end - 1]
    entry = _entry(line)
    if entry is None or type(entry["n"]) is not int:
        raise RunError("audit_broken", f"{path}: its last line is not an audit entry; nothing was added")
    return entry["n"], hashlib.sha256(line).hexdigest(), start + end


@contextmanager
def _locked(path: Path, *flags: str) -> Iterator[int]:
    """The open file, held alone; waits for another writer."""
    try:
        handle = open_itself(path, *flags)
    except OSError as error:
        raise RunError("audit_file", f"cannot open the audit log {path}: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise RunError("audit_file", f"{path} is not a regular file")
        lock_descriptor(handle)
        yield handle
    except OSError as error:
        raise RunError("audit_write", f"cannot write to {path}: {error.strerror}") from None
    finally:
        os.close(handle)
