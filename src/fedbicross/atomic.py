"""Files and folders that are there whole or not at all, even after a power cut. Imports nothing of fedbicross."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

TEMPORARY = ".tmp-"  # how the names of unfinished files begin, so that they can be cleared up after a kill


def open_flags(*names: str) -> int:
    """Flags of ``os.open`` by name, e.g. ``NOFOLLOW``; those that a system lacks (Windows has few) count as none."""
    flags = 0
    for name in names:
        flags |= getattr(os, f"O_{name}", 0)
    return flags


def open_itself(path: Path, *names: str, mode: int = 0o600) -> int:
    """``os.open`` with flags by name; a link at the end of the path is an ``OSError`` (ELOOP) and never followed.

    Without NONBLOCK the opening of a pipe would wait for a writer.
    """
    if not hasattr(os, "O_NOFOLLOW") and path.is_symlink():  # Windows; links need rights there that few have
        raise OSError(errno.ELOOP, "is a link")
    return os.open(path, open_flags(*names, "BINARY", "NOFOLLOW", "NONBLOCK", "NOCTTY", "CLOEXEC"), mode)


def read_plain(path: Path, most: int = 1 << 40) -> bytes:
    """All bytes of a regular file; ``OSError`` for a larger one, and for a pipe, which would be waited for."""
    handle = os.open(path, open_flags("RDONLY", "BINARY", "NONBLOCK", "NOCTTY", "CLOEXEC"))
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if found.st_size > most:
            raise OSError(errno.EFBIG, f"it is larger than {most:,} bytes", str(path))
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(handle)


def write_atomic(path: Path, data: bytes) -> None:
    """Temporary file, fsync, rename: a reader sees the old bytes or the new ones, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    try:
        _write(temporary, data)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """A new folder with these files; ``OSError`` if one with files in it is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    try:
        temporary.mkdir()
        for name, data in files.items():
            _write(temporary / name, data)
        _sync_folder(temporary)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync_folder(path.parent)


def _temporary(path: Path) -> Path:
    return path.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:  # x: neither an existing file nor a link that somebody put there is written through
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make a rename last. Some file systems cannot; the file itself is safe by then."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, open_flags("RDONLY", "CLOEXEC"))
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
