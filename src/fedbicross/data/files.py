"""Which files are images, and how to open one without waiting on a pipe or reading more than it may hold."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

from fedbicross.atomic import open_flags
from fedbicross.errors import DataError

Kind: TypeAlias = Literal["image", "dicom", "nifti"]

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff"})
DICOM_SUFFIXES = frozenset({".dcm", ".dicom"})
NIFTI_ENDINGS = (".nii", ".nii.gz")
KNOWN = f"{', '.join(sorted(SUFFIXES | DICOM_SUFFIXES))}, {', '.join(NIFTI_ENDINGS)}"
_DICOM_MARK = (128, b"DICM")  # at this offset


def kind_of(path: Path) -> Kind | None:
    """What a regular file is by its ending; DICOM also by its mark, since archives export it without an ending."""
    name = path.name.lower()
    if name.endswith(NIFTI_ENDINGS):
        return "nifti"
    suffix = path.suffix.lower()
    if suffix in SUFFIXES:
        return "image"
    if suffix in DICOM_SUFFIXES:
        return "dicom"
    if name == "dicomdir":  # the table of contents of a disc
        return None
    try:
        with open_regular(path) as stream:
            start = stream.read(_DICOM_MARK[0] + len(_DICOM_MARK[1]))
    except (DataError, OSError):
        return None
    return "dicom" if start[_DICOM_MARK[0] :] == _DICOM_MARK[1] else None


def why_strange(path: Path) -> str:
    """Why a directory entry is never opened; empty for a regular file or a link to one."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return f"cannot be looked at ({error.strerror}): a broken link?"
    return "" if stat.S_ISREG(mode) else "a pipe, socket or device: never opened"


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; a pipe is refused instead of waited for."""
    try:
        # Without NONBLOCK the opening of a pipe would wait for a writer.
        handle = os.open(path, open_flags("RDONLY", "BINARY", "NONBLOCK", "NOCTTY", "CLOEXEC"))
    except FileNotFoundError as error:
        raise DataError("missing_file", f"{path} does not exist") from error
    except (OSError, ValueError) as error:
        raise DataError("unreadable_image", f"{path} cannot be opened ({error})") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DataError("not_a_file", f"{path} is not a regular file")
    return os.fdopen(handle, "rb")


def read_regular(path: Path, max_bytes: int) -> bytes:
    """All bytes of a regular file, at most so many."""
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > max_bytes:
            raise DataError("too_large", f"{path} has {size:,} bytes; the limit is {max_bytes:,}")
        return stream.read(size)
