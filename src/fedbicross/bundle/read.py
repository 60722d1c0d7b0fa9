"""Files from outside: opened once, never followed, never waited for, bounded before they are read."""

from __future__ import annotations

import errno
import os
import re
import stat
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from fedbicross.atomic import open_itself
from fedbicross.bundle.limits import REPLY, Limits
from fedbicross.errors import UploadError

SUFFIX = ".safetensors"
MAX_ENTRIES = 100_000  # of one folder
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\.safetensors", re.ASCII)


class Listing(NamedTuple):
    """The bundles in a folder by name, and a line about everything else that lies there."""

    bundles: list[Path]
    ignored: list[str]


def read_file(path: str | Path, limits: Limits = REPLY, linked: bool = False) -> bytes:
    """All bytes of a regular file in one read; these bytes are then verified and used, never the file again.

    ``linked``: it may have a second name, as the files of a run have, which keeps equal bytes once.
    """
    path = Path(path)
    handle = _open(path)
    try:
        size = _check_file(handle, path.name, limits, linked)
        with os.fdopen(handle, "rb", closefd=False) as file:
            data = file.read(size + 1)
    except OSError as error:
        raise UploadError("cannot_read", f"{path.name!r}: {error.strerror}") from None
    finally:
        os.close(handle)
    if len(data) != size:
        raise UploadError("changing", f"{path.name!r} is still being written: wait and try again")
    return data


def _check_file(handle: int, name: str, limits: Limits, linked: bool) -> int:
    """The size of an open file that may be read whole."""
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        raise UploadError("not_a_file", f"{name!r} is not a regular file")
    if found.st_nlink > 1 and not linked:
        raise UploadError("hard_link", f"{name!r} is a second name of another file: copy it instead")
    if found.st_size > limits.max_bytes:
        raise UploadError("too_large", f"{name!r} has {found.st_size:,} bytes; the limit is {limits.max_bytes:,}")
    if _has_hole(handle, found.st_size):
        raise UploadError("sparse", f"{name!r} has holes, which no bundle has: copy it again in full")
    return found.st_size


def list_bundles(folder: str | Path) -> Listing:
    """The ``*.safetensors`` files in a folder by name; links, half-copied and oddly named ones left out and said."""
    bundles, ignored = [], []
    try:
        with os.scandir(folder) as scan:
            entries = sorted(islice(scan, MAX_ENTRIES + 1), key=lambda entry: entry.name)
    except OSError as error:
        raise UploadError("cannot_read", f"{str(folder)!r}: {error.strerror}") from None
    if len(entries) > MAX_ENTRIES:
        raise UploadError("too_many_files", f"{str(folder)!r} holds more than {MAX_ENTRIES:,} files")
    for entry in entries:
        reason = _strange(entry)
        if reason:
            ignored.append(f"{entry.name[:80]!r}: {reason}")
        else:
            bundles.append(Path(entry.path))
    return Listing(bundles, ignored)


def _open(path: Path) -> int:
    try:
        return open_itself(path, "RDONLY")
    except ValueError:
        raise UploadError("cannot_read", f"{str(path)[:80]!r} is no file name") from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise UploadError("symlink", f"{path.name!r} is a link: copy the file itself") from None
        raise UploadError("cannot_read", f"{str(path)[:200]!r}: {error.strerror}") from None


def _has_hole(handle: int, size: int) -> bool:
    if not hasattr(os, "SEEK_HOLE"):  # Windows
        return False
    try:
        hole, end = os.lseek(handle, 0, os.SEEK_HOLE), os.lseek(handle, 0, os.SEEK_END)
    except OSError:  # an empty file, or a file system that cannot tell; the size limit holds all the same
        return False
    finally:
        os.lseek(handle, 0, os.SEEK_SET)
    return hole < min(size, end)


def _strange(entry: os.DirEntry[str]) -> str:
    if entry.is_symlink():
        return "a link"
    if not entry.is_file(follow_symlinks=False):
        return "not a regular file"
    if entry.name.startswith((".", "~")) or entry.name.endswith((".tmp", ".part", ".partial", "~")):
        return "temporary or hidden"
    if not entry.name.endswith(SUFFIX):
        return f"does not end in {SUFFIX}"
    return "" if _NAME.fullmatch(entry.name) else "a name with other than letters, digits, dot, dash and underscore"
