"""A run's folder: bytes under names, written all or nothing, equal bytes kept once, one runner at a time."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

from filelock import lock_descriptor

from fedbicross import sums
from fedbicross.atomic import TEMPORARY, read_plain, write_atomic
from fedbicross.errors import RunError

OBJECTS = "objects"
NUMBERS = re.compile(r"\[\n[^\[\]{}\"]*\]")  # a list of numbers; a line break is in no string


def json_text(value: Any) -> str:
    """JSON for people and for `diff`: a line an entry, but a list of numbers on one line, or curves would be pages."""
    text = json.dumps(value, indent=1, sort_keys=True, allow_nan=False)
    return NUMBERS.sub(lambda found: " ".join(found.group().split()).replace("[ ", "[").replace(" ]", "]"), text)


class DiskStore:
    """``context.Store`` in a folder. Content lies under ``objects/<sha256>``; names are hard links to it.

    What is loaded must be what was saved: ``SHA256SUMS`` says what that was.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sums = sums.Sums(root)

    def load(self, name: str) -> bytes | None:
        """The bytes, or None; bytes that were not saved under this name are refused."""
        try:
            data = read_plain(self.root / name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise RunError("damaged", f"{name} in {self.root}: {error.strerror}; {sums.advice(name)}") from None
        self.sums.check(name, data)
        return data

    def lists(self, name: str) -> bool:
        """Whether it was ever saved, or a kill came just before."""
        return self.sums.lists(name)

    def size(self, name: str) -> int:
        """Length in bytes; 0 where there is nothing."""
        try:
            return (self.root / name).stat().st_size
        except FileNotFoundError:
            return 0

    def save(self, name: str, data: bytes) -> None:
        """Keep the bytes; what an earlier name already holds is linked, not written again."""
        path = self.root / name
        digest = hashlib.sha256(data).hexdigest()
        content = self.root / OBJECTS / digest
        if not content.is_file() or content.read_bytes() != data:  # a damaged copy must not come back by its name
            write_atomic(content, data)
        self.sums.note(name, digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        link = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name[:100]}")
        try:
            link.unlink(missing_ok=True)
            os.link(content, link)
            old = path.stat() if path.exists() else None
            os.replace(link, path)  # noqa: PTH105
            link.unlink(missing_ok=True)  # rename() of two names of one file does nothing and leaves both
        except OSError:
            link.unlink(missing_ok=True)
            os.replace(content, path)  # noqa: PTH105  a file system without hard links: each name has its own copy
            return
        if old is not None and old.st_nlink <= 2:
            self._sweep({old.st_ino})

    def write(self, name: str, data: bytes) -> None:
        """Keep the bytes as a file of their own, for people to read."""
        self.sums.note(name, hashlib.sha256(data).hexdigest())
        write_atomic(self.root / name, data)

    def drop(self, prefix: str) -> None:
        """Forget a name, or every name in a folder, and the content that no name refers to any more."""
        path = self.root / prefix
        files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else []
        inodes = {file.stat().st_ino for file in files}
        for file in files:
            file.unlink(missing_ok=True)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        self._sweep(inodes)

    def _sweep(self, inodes: set[int]) -> None:
        """Remove the content among ``inodes`` that lost its last name."""
        for entry in os.scandir(self.root / OBJECTS) if inodes and (self.root / OBJECTS).is_dir() else ():
            # Not entry.stat(): on Windows it counts no links.
            if entry.inode() in inodes and Path(entry.path).stat().st_nlink == 1:
                Path(entry.path).unlink(missing_ok=True)


class RunFolder:
    """``runs/<name>/`` with its lock and its event log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = DiskStore(path)
        self._lock: int | None = None

    def __enter__(self) -> RunFolder:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
            # The system frees the lock when its holder dies, so that a crash never leaves a stale one.
            free = lock_descriptor(self._lock, blocking=False)
        except OSError as error:
            self.__exit__()
            raise RunError("cannot_write", f"cannot write to {self.path}: {error.strerror}") from None
        if not free:
            self.__exit__()
            raise RunError("locked", f"another process is running in {self.path}")
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def held(self) -> bool:
        """Whether some process is running here now; touches nothing."""
        try:
            lock = os.open(self.path / ".lock", os.O_RDWR)
        except OSError:
            return False
        try:
            return not lock_descriptor(lock, blocking=False)
        finally:
            os.close(lock)

    def clean(self) -> None:
        """Clean up what a kill may have left: temporary files, content without a name, a cut last line of the log."""
        log = self.path / "events.jsonl"
        try:
            if log.is_file():
                whole = log.read_bytes().rfind(b"\n") + 1
                if whole != log.stat().st_size:
                    os.truncate(log, whole)  # a line that a kill cut off
            elif log.exists():  # a pipe would be waited for
                raise RunError("damaged", f"{log} is not a regular file; delete it, and times are no longer told")
            for leftover in self.path.rglob(f"{TEMPORARY}*"):
                leftover.unlink(missing_ok=True)
            for content in (self.path / OBJECTS).glob("*"):
                if content.stat().st_nlink == 1:
                    content.unlink()
        except OSError as error:
            raise RunError("cannot_write", f"cannot write to {self.path}: {error.strerror}") from None

    def event(self, **fields: Any) -> None:
        """Append one line to events.jsonl: the event, a tab, and the beginning of its SHA-256."""
        text = json.dumps({"time": time.time(), **fields}).encode()
        with (self.path / "events.jsonl").open("ab") as file:
            file.write(text + b"\t" + _mark(text) + b"\n")

    def events(self) -> list[dict[str, Any]]:
        """All whole lines of the log; a line cut by a kill is passed over, one that was changed is refused."""
        path = self.path / "events.jsonl"
        try:
            lines = read_plain(path).split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunError("damaged", f"{path}: {error.strerror}; delete it, and times are no longer told") from None
        out: list[dict[str, Any]] = []
        for number, line in enumerate(lines, start=1):
            text, _, mark = line.rpartition(b"\t")
            if mark != _mark(text):
                raise RunError("damaged", f"{path}: line {number} was changed; delete it, and its time is not told")
            out.append(json.loads(text))
        return out


def _mark(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:16].encode()
