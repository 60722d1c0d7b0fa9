"""MedMNIST's ``.npz`` files, official or rebuilt, read without trusting them.

Layout: ``{train,val,test}_images`` (uint8, n×S×S or n×S×S×3) and ``{train,val,test}_labels`` (integers, n or n×1).
Train and val are merged, as in the papers. Array headers are read and bounded before any pixel is unpacked, and
pickled (object) arrays are refused.
"""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbicross.data.catalogue import DATASETS, MEDMNIST_URL, DatasetInfo, medmnist_info
from fedbicross.data.dataset import Dataset, Split, as_images, as_labels, default_classes
from fedbicross.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_BYTES = 8 * 2**30  # of all arrays of a file once unpacked
SPLITS = ("train", "val", "test")
_KEYS = tuple(f"{split}_{what}" for split in SPLITS for what in ("images", "labels"))
# All that zipfile and numpy raise on damaged input (RuntimeError: encrypted; TokenError: mangled array header).
_CORRUPT = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, SyntaxError, RuntimeError, TokenError)


def load_medmnist(name: str, data_dir: Path, image_size: int = 28, max_bytes: int = MAX_BYTES) -> Dataset:
    """Read a known MedMNIST set from ``data_dir``."""
    info = medmnist_info(name, image_size)
    file = info.file_name(image_size)
    path = data_dir / file
    if not path.is_file():
        raise DataError(
            "missing_file",
            f"{path} does not exist: run `fedbicross data fetch {name}`, "
            f"or download {MEDMNIST_URL.format(file=file)} and put it there",
        )
    return load_npz(path, image_size, max_bytes)


def load_npz(path: Path, image_size: int | None = None, max_bytes: int = MAX_BYTES) -> Dataset:
    """Read any file of MedMNIST's layout; class names are known when the file is named after a known set."""
    arrays = read_arrays(path, max_bytes)
    splits = [_split(arrays, split) for split in SPLITS]
    shapes = {split.images.shape[1:] for split in splits}
    if len(shapes) > 1:
        raise DataError("shape_mismatch", f"{path.name}: splits differ in image shape: {sorted(shapes)}")
    size = splits[0].images.shape[1]
    if image_size is not None and size != image_size:
        raise DataError("wrong_size", f"{path.name} holds {size}-pixel images; set the image size to {size}")
    train = Split(
        np.concatenate([splits[0].images, splits[1].images]), np.concatenate([splits[0].labels, splits[1].labels])
    )
    info = DATASETS.get(path.stem.removesuffix(f"_{size}"))
    if info is not None and info.refused:
        raise DataError("multi_label", f"{path.name} cannot be used: {info.refused}")
    if info is not None and info.classes:
        return Dataset(info.name, info.classes, train, splits[2], _note(path, info, size))
    highest = max(int(split.labels.max(initial=0)) for split in (train, splits[2]))
    if highest > 10_000:  # an absurd label must not allocate as many class names
        raise DataError("label_range", f"{path.name}: label {highest} is too large")
    return Dataset(path.stem, default_classes(highest + 1), train, splits[2])


def read_arrays(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, NDArray[Any]]:
    """The six arrays of a file, after a look at every header."""
    if not path.is_file():
        raise DataError("missing_file", f"{path} does not exist")
    try:
        with zipfile.ZipFile(path) as archive:
            headers = _headers(archive, path)
            total = sum(headers.values())
            if total > max_bytes:
                raise DataError(
                    "too_large", f"{path.name} unpacks to {total / 2**30:.1f} GiB; the limit is {max_bytes / 2**30:.1f}"
                )
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in _KEYS}
    except _CORRUPT as error:
        raise DataError("corrupt_file", f"{path.name} is damaged or not an .npz file ({error})") from error


def _headers(archive: zipfile.ZipFile, path: Path) -> dict[str, int]:
    """Size in bytes of each array as its header states it, refusing what np.load would choke on later."""
    members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
    sizes = {}
    for key in _KEYS:
        if key not in members:
            raise DataError("missing_key", f"{path.name} has no array {key!r}; found {sorted(members)[:12]}")
        with archive.open(members[key]) as stream:
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(stream)
        if dtype.hasobject:
            raise DataError("object_array", f"{path.name}: {key} holds Python objects, which are never unpickled")
        count = 1
        for length in shape:  # Python integers: a forged shape cannot overflow
            count *= length
        sizes[key] = count * dtype.itemsize
        if sizes[key] > members[key].file_size:
            raise DataError("corrupt_file", f"{path.name}: {key} claims more data than the file holds")
    return sizes


def _split(arrays: dict[str, NDArray[Any]], split: str) -> Split:
    try:
        return Split(as_images(arrays[f"{split}_images"]), as_labels(arrays[f"{split}_labels"]))
    except DataError as error:
        raise DataError(error.code, f"{split}: {error.args[0]}") from error


def _note(path: Path, info: DatasetInfo, size: int) -> str:
    """Licence, caveat, and whether these are the official bytes."""
    with path.open("rb") as stream:
        md5 = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    origin = "official file" if md5 == info.md5.get(size) else "not the official MedMNIST file (its checksum differs)"
    return "; ".join(part for part in (f"{info.name}: {info.licence}", info.note, origin) if part)
