"""``SHA256SUMS``: what was written into a folder, so that a file which changed since is noticed and named.

One line a file as ``sha256sum`` writes it, on disk before the file is; lines are only ever added. A file must hold
what was once written under its name: the latest, or what a kill between the two writes left of an earlier time. It
shows damage and edits. It is no signature: whoever edits a file can edit the list as well.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbicross.atomic import open_flags, read_plain
from fedbicross.bundle.format import canonical_json
from fedbicross.errors import RunError

NAME = "SHA256SUMS"
_LINE = re.compile(rb"([0-9a-f]{64})  ([^\n]{1,4096})\n")
_MOST = 1 << 30  # bytes


class Sums:
    """The list of one folder. Several processes may add to it."""

    def __init__(self, root: Path) -> None:
        self.root, self.file = root, root / NAME
        self._known: dict[str, set[str]] = {}
        self._size = 0  # of the file when it was read

    def note(self, name: str, digest: str) -> None:
        """Content that is about to be written under this name."""
        if self.allows(name, digest):
            return
        self.root.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.file, open_flags("RDWR", "CREAT", "APPEND", "BINARY", "NONBLOCK", "CLOEXEC"), 0o644)
        try:
            size = os.fstat(handle).st_size
            torn = size and os.pread(handle, 1, size - 1) != b"\n"  # a kill in the middle of a line
            os.write(handle, (b"\n" if torn else b"") + f"{digest}  {name}\n".encode())
            os.fsync(handle)
        finally:
            os.close(handle)
        self._known.setdefault(name, set()).add(digest)

    def allows(self, name: str, digest: str) -> bool:
        """Whether this content was ever written under this name."""
        return digest in self._known.get(name, ()) or (self._read() and digest in self._known.get(name, ()))

    def lists(self, name: str) -> bool:
        """Whether anything was ever written under this name."""
        return name in self._known or (self._read() and name in self._known)

    def names(self) -> list[str]:
        """Everything that was ever written, or about to be."""
        self._read()
        return sorted(self._known)

    def __bool__(self) -> bool:
        """Whether there is a list at all: folders of earlier versions have none."""
        return self.file.exists()

    def check(self, name: str, data: bytes) -> None:
        """Refuse content that was not written under this name."""
        if self.allows(name, hashlib.sha256(data).hexdigest()):
            return
        if not self:
            raise RunError(
                "no_digests",
                f"{self.root} has no {NAME}: it was made by an earlier version, or the list was removed, so that "
                "nothing in it can be checked; begin in another folder",
            )
        raise RunError("damaged", f"{name} in {self.root} is not what was written there; {advice(name)}")

    def _read(self) -> bool:
        """Read the list where it has grown; whether it had."""
        try:
            size = self.file.stat().st_size
            if size == self._size:
                return False
            data = read_plain(self.file, _MOST)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise RunError("damaged", f"{self.file} cannot be read: {error.strerror}") from None
        self._size = size
        for digest, name in _LINE.findall(data):
            self._known.setdefault(name.decode("utf-8", "replace"), set()).add(digest.decode())
        return True


def rows_digest(rows: Sequence[Mapping[str, Any]]) -> str:
    """Of the rows of results.json: what the same run gives again, so that clock times are left out."""
    timeless = [{key: value for key, value in row.items() if not key.startswith("seconds")} for row in rows]
    return hashlib.sha256(canonical_json(timeless).encode("utf-8", "surrogatepass")).hexdigest()


def advice(name: str) -> str:
    """What to do about a file that is damaged or missing."""
    if name in ("config.toml", "partition.json"):
        return "put the old one back, or start another run with the new one"
    if name == "results.json":
        return "`fedbicross resume` writes it again"
    if name.startswith("records/"):
        return "it cannot be made again alone: begin in another folder, or bring it back from a copy"
    if name in ("fusion.json", "site.json"):
        return "begin with another --work"
    return "delete it, and the same command makes it again"
