"""A hospital's own images: a folder per class, or a CSV manifest.

Folders: ``CLASS/…`` or ``train/CLASS/…`` with ``test/CLASS/…`` (and ``val/``, which joins train). Manifest: columns
``path,label`` and optionally ``patient_id,site,split``; paths are relative to the CSV and may not leave its folder.

One rule for every image, so that sites convert alike:

* png, jpg, bmp and tif; the first frame or page; EXIF rotation applied; at most 64 million pixels, checked before
  decoding;
* transparency is laid on black; palettes, CMYK and the like become RGB; 16-bit grey becomes v / 257;
* if every image is grey the dataset has 1 channel, if any has colour all have 3;
* resized with antialiasing until the shorter side is ``image_size``, then the centre square is kept.

Without a given split, ``test_fraction`` of the patients (of the images, where there are none) is held out, evenly over
classes and sites.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image as pillow
from PIL import ImageOps

from fedbicross.data.dataset import Dataset, Images, Indices, Names, Split
from fedbicross.data.patient_groups import split_off_test
from fedbicross.errors import ConfigError, DataError

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff"})
MAX_PIXELS = 64_000_000
MAX_BYTES = 8 * 2**30  # of all images once converted
_FORMATS = ("PNG", "JPEG", "BMP", "TIFF")  # whatever the suffix says, no other decoder is run
_GREY = frozenset({"1", "L", "LA", "I", "I;16", "I;16L", "I;16B", "I;16N"})
_SPLITS = {"train": "train", "val": "train", "valid": "train", "validation": "train", "test": "test"}


@dataclass(frozen=True)
class Entry:
    """One image before it is read."""

    path: Path
    label: str
    patient: str | None = None
    site: str | None = None
    split: str | None = None


def load_folder(
    path: Path, image_size: int = 28, *, test_fraction: float = 0.2, rng: np.random.Generator | None = None
) -> Dataset:
    """Read a folder of class folders."""
    return _load(path.name, scan_folder(path), image_size, test_fraction, rng)


def load_manifest(
    path: Path, image_size: int = 28, *, test_fraction: float = 0.2, rng: np.random.Generator | None = None
) -> Dataset:
    """Read the images named in a CSV manifest."""
    return _load(path.stem, scan_manifest(path), image_size, test_fraction, rng)


def scan_folder(root: Path) -> list[Entry]:
    """Find the images of a folder without opening them, in a fixed order."""
    if not root.is_dir():
        raise DataError("missing_file", f"{root} is not a folder")
    named = {child.name.lower(): child for child in sorted(root.iterdir()) if child.is_dir()}
    parts = [(split, named[name]) for name, split in _SPLITS.items() if name in named]
    # A class may happen to be called "test"; only train (with or without test) marks a split layout.
    if "train" not in named:
        return _scan_classes(root, None)
    has_test = "test" in named
    return [entry for split, folder in parts for entry in _scan_classes(folder, split if has_test else None)]


def scan_manifest(path: Path) -> list[Entry]:
    """Read a CSV manifest without opening the images."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream, strict=True)
            columns = [name.strip() for name in reader.fieldnames or []]
            reader.fieldnames = columns
            rows = list(reader)
    except FileNotFoundError as error:
        raise DataError("missing_file", f"{path} does not exist") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError("bad_manifest", f"{path} cannot be read as UTF-8 CSV ({error})") from error
    for needed in ("path", "label"):
        if needed not in columns:
            raise DataError("bad_manifest", f"{path.name} has no column {needed!r}; found {columns}")
    entries = [_manifest_row(path, columns, row, number) for number, row in enumerate(rows, start=2)]
    _refuse_duplicates(entries, path.name)
    return entries


def _manifest_row(path: Path, columns: list[str], row: dict[str, Any], number: int) -> Entry:
    where = f"{path.name} line {number}"
    values: dict[str, str] = {}
    for column in ("path", "label", "patient_id", "site", "split"):
        if column in columns:
            values[column] = (row[column] or "").strip()
            # A gap would have to be guessed: is it a new patient or the same as above?
            if not values[column]:
                raise DataError("bad_manifest", f"{where}: {column} is empty")
    name = values["path"]
    if PurePosixPath(name).is_absolute() or PureWindowsPath(name).anchor or ".." in PureWindowsPath(name).parts:
        raise DataError("path_outside", f"{where}: {name!r} must be relative to the manifest and stay in its folder")
    split = values.get("split")
    if split is not None and split.lower() not in _SPLITS:
        raise DataError("bad_split", f"{where}: split must be train, val or test, got {split!r}")
    return Entry(
        path.parent / name,
        values["label"],
        values.get("patient_id"),
        values.get("site"),
        None if split is None else _SPLITS[split.lower()],
    )


def _refuse_duplicates(entries: Iterable[Entry], where: str) -> None:
    seen: set[str] = set()
    for entry in entries:
        key = os.path.normpath(entry.path)
        if key in seen:
            raise DataError("duplicate_path", f"{where} names {entry.path.name} twice")
        seen.add(key)


def _scan_classes(root: Path, split: str | None) -> list[Entry]:
    """``CLASS/**/*.png``; hidden files and other types are passed over."""
    entries = []
    for folder in sorted(
        child for child in root.iterdir() if child.is_dir() and not child.name.startswith((".", "__"))
    ):
        for here, subfolders, files in os.walk(folder):
            subfolders.sort()
            entries += [
                Entry(Path(here, file), folder.name, split=split)
                for file in sorted(files)
                if Path(file).suffix.lower() in SUFFIXES and not file.startswith(".")
            ]
    return entries


def _load(
    name: str, entries: list[Entry], image_size: int, test_fraction: float, rng: np.random.Generator | None
) -> Dataset:
    if not 4 <= image_size <= 4096:
        raise ConfigError("bad_image_size", f"the image size must be between 4 and 4096 pixels, got {image_size}")
    if not entries:
        raise DataError("empty", f"{name}: no images found ({', '.join(sorted(SUFFIXES))} in one folder per class)")
    classes = tuple(sorted({entry.label for entry in entries}))
    if len(classes) < 2:
        raise DataError("one_class", f"{name}: only one class found ({classes[0]!r}); at least two are needed")
    for label in classes:
        if (
            not label.isprintable()
        ):  # also what a file name in another encoding becomes, which cannot be written as UTF-8
            raise DataError("bad_name", f"{name}: the class name {label!r} is not plain text; rename it")
    labels = np.array([classes.index(entry.label) for entry in entries], np.int64)
    patients = _column([entry.patient for entry in entries])
    sites = _column([entry.site for entry in entries])
    is_test = _choose_test(name, entries, labels, patients, sites, test_fraction, rng)
    everything = Split(read_images([entry.path for entry in entries], image_size), labels, patients, sites)
    return Dataset(
        name, classes, everything.take(np.flatnonzero(~is_test)), everything.take(np.flatnonzero(is_test)), "own images"
    )


def _choose_test(
    name: str,
    entries: list[Entry],
    labels: Indices,
    patients: Names | None,
    sites: Names | None,
    test_fraction: float,
    rng: np.random.Generator | None,
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    if entries[0].split is not None:
        return np.array([entry.split == "test" for entry in entries])
    if not 0 < test_fraction < 1:
        raise ConfigError("bad_test_fraction", f"test_fraction must lie between 0 and 1, got {test_fraction}")
    is_test = split_off_test(labels, patients, sites, test_fraction, rng or np.random.default_rng(0))
    if not is_test.any():
        raise DataError("empty", f"{name}: {len(entries)} images are too few to hold any out for testing")
    return is_test


def _column(values: list[str | None]) -> Names | None:
    return None if values[0] is None else np.array(values, dtype=np.str_)


def read_images(paths: list[Path], image_size: int, max_pixels: int = MAX_PIXELS) -> Images:
    """Convert image files by the rule above."""
    # Two passes: only after every header is known is it clear whether the set is grey.
    modes = {_mode(path, max_pixels) for path in paths}
    grey = modes <= _GREY
    channels = 1 if grey else 3
    if (total := len(paths) * image_size**2 * channels) > MAX_BYTES:
        raise DataError("too_large", f"{len(paths)} images of {image_size} pixels need {total / 2**30:.1f} GiB")
    images = np.empty((len(paths), image_size, image_size, channels), np.uint8)
    for row, path in enumerate(paths):
        with _open(path, max_pixels) as image:
            try:
                images[row] = _convert(image, image_size, grey, path)
            except (OSError, ValueError, SyntaxError, EOFError, MemoryError) as error:
                raise DataError("unreadable_image", f"{path} cannot be decoded ({error})") from error
    return images


def _open(path: Path, max_pixels: int) -> Image:
    """Open a file and look at its header only."""
    try:
        image = pillow.open(path, formats=_FORMATS)
    except FileNotFoundError as error:
        raise DataError("missing_file", f"{path} does not exist") from error
    except pillow.DecompressionBombError as error:
        raise DataError("too_many_pixels", f"{path} is too large ({error})") from error
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise DataError("unreadable_image", f"{path} is not a readable image ({error})") from error
    if image.width * image.height > max_pixels:
        image.close()
        raise DataError(
            "too_many_pixels", f"{path} has {image.width} x {image.height} pixels; the limit is {max_pixels:,}"
        )
    return image


def _mode(path: Path, max_pixels: int) -> str:
    with _open(path, max_pixels) as image:
        return image.mode


def _convert(image: Image, size: int, grey: bool, path: Path) -> Images:
    """Grey or RGB [size, size, channels] by the rule of the module."""
    image = ImageOps.exif_transpose(image)
    if image.mode == "F":
        raise DataError("unsupported_mode", f"{path} holds floating-point pixels, whose range is unknown")
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise DataError("unsupported_mode", f"{path} holds values outside 0..65535")
        image = pillow.fromarray(np.rint(values / 257).astype(np.uint8))
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        clear = image.convert("RGBA")
        image = pillow.alpha_composite(pillow.new("RGBA", clear.size, (0, 0, 0, 255)), clear)
    image = image.convert("L" if grey else "RGB")
    scale = size / min(image.size)
    wide, high = (max(size, round(length * scale)) for length in image.size)
    image = image.resize((wide, high), pillow.Resampling.BICUBIC)
    left, top = (wide - size) // 2, (high - size) // 2
    pixels = np.asarray(image.crop((left, top, left + size, top + size)), np.uint8)
    return pixels[..., None] if grey else pixels
