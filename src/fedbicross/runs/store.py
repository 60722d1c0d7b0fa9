"""A run's folder: bytes under names, written all or nothing, equal bytes kept once, one runner at a time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from filelock import lock_descriptor

from fedbicross.atomic import TEMPORARY, write_atomic
from fedbicross.errors import RunError

OBJECTS = "objects"


class DiskStore:
    """``context.Store`` in a folder. Content lies under ``objects/<sha256>``; names are hard links to it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def load(self, name: str) -> bytes | None:
        """The bytes, or None."""
        try:
            return (self.root / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def size(self, name: str) -> int:
        """Length in bytes; 0 where there is nothing."""
        try:
            return (self.root / name).stat().st_size
        except FileNotFoundError:
            return 0

    def save(self, name: str, data: bytes) -> None:
        """Keep the bytes; what an earlier name already holds is linked, not written again."""
        path = self.root / name
        content = self.root / OBJECTS / hashlib.sha256(data).hexdigest()
        if not content.exists() or content.read_bytes() != data:  # a damaged copy must not come back by its name
            write_atomic(content, data)
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
            if log.exists() and not log.read_bytes().endswith(b"\n"):
                with log.open("a", encoding="utf-8") as file:
                    file.write("\n")
            for leftover in self.path.rglob(f"{TEMPORARY}*"):
                leftover.unlink(missing_ok=True)
            for content in (self.path / OBJECTS).glob("*"):
                if content.stat().st_nlink == 1:
                    content.unlink()
        except OSError as error:
            raise RunError("cannot_write", f"cannot write to {self.path}: {error.strerror}") from None

    def event(self, **fields: Any) -> None:
        """Append one line to events.jsonl."""
        line = json.dumps({"time": time.time(), **fields}) + "\n"
        with (self.path / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(line)

    def events(self) -> list[dict[str, Any]]:
        """All whole lines of the log; a line cut by a kill is passed over."""
        try:
            lines = (self.path / "events.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []
        out = []
        for line in lines:
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict):
                    out.append(event)
        return out
