"""A site's own images in the shape that the federation agreed on: its label map, size and channels.

Only the site's side imports this. A site need not have every class, but may not have one that nobody agreed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedbicross import seeds
from fedbicross.context import Task
from fedbicross.data import DATASETS, Split, check, load_dataset
from fedbicross.data.dataset import Dataset, Images, default_classes
from fedbicross.data.files import KNOWN, kind_of, why_strange
from fedbicross.data.folder import columns, find_images, read_images
from fedbicross.data.layout import Entry
from fedbicross.data.patient_groups import split_off_test
from fedbicross.data.pictures import Header, Reader
from fedbicross.errors import DataError, nearest
from fedbicross.messages import Client


def load_site(source: str | Path, task: Task, name: str, hold_out: float, seed: int) -> tuple[Client, Split]:
    """What the site trains on, and what it keeps for testing (possibly nothing).

    ``source`` is a folder of class folders, a CSV manifest, an ``.npz`` file or a known data set. Where it names no
    test images, whole patients (images, where patients are unknown) are held out, the same ones at every call.
    """
    return load_named(source, task, name, hold_out, seed)[:2]


def load_named(
    source: str | Path, task: Task, name: str, hold_out: float, seed: int
) -> tuple[Client, Split, list[str]]:
    """The same, and what each training image is called at the site."""
    path = Path(source)
    if path.is_dir() or path.suffix.lower() == ".csv":
        found, headers = find_images(path)
        is_test = _held_out(everything := _read(path, found.entries, headers, task), found.entries, hold_out, seed)
        train, test = everything.take(np.flatnonzero(~is_test)), everything.take(np.flatnonzero(is_test))
        names = [str(entry) for entry, test_image in zip(found.entries, is_test, strict=True) if not test_image]
    else:
        dataset = load_dataset(source, image_size=task.image_size)
        _check_label_map(dataset, task)
        train, test = (_with_channels(part, task.channels, dataset.name) for part in (dataset.train, dataset.test))
        names = [f"{source}: training image {number}" for number in range(len(train))]
    if not len(train):
        raise DataError("empty", f"{path} holds no images to train on")
    return Client(name, train.images, train.labels, train.patients), test, names


def check_site(client: Client, held_out: Split, classes: Sequence[str], accept: Sequence[str] = ()) -> list[str]:
    """Refuse images on which the site's own test would mean nothing; warnings about the rest."""
    facts = check.Facts.of(classes, Split(client.images, client.labels, client.patients), held_out)
    return check.settle(check.judge(facts, site=True), accept)


def image_files(sources: Sequence[Path]) -> list[Path]:
    """The images among files and folders, in a fixed order; a file that is named is taken whatever its ending."""
    found: list[Path] = []
    for source in sources:
        if source.is_dir():
            inside = sorted(path for path in source.rglob("*") if not why_strange(path) and kind_of(path))
            if not inside:
                raise DataError("empty", f"{source} holds no images ({KNOWN})")
            found += inside
        elif source.is_file():
            found.append(source)
        else:
            raise DataError("missing_file", f"{source} does not exist")
    return list(dict.fromkeys(found))


def pictures_in(paths: Sequence[Path]) -> list[tuple[Path, int | None]]:
    """Every image in these files, in order: a volume holds a slice after the other, any other file one image."""
    reader = Reader()
    found: list[tuple[Path, int | None]] = []
    for path in paths:
        found += [(path, header.slice) for header in reader.look(path)] if kind_of(path) == "nifti" else [(path, None)]
    return found


def read_files(places: Sequence[Path | tuple[Path, int | None]], task: Task) -> Images:
    """Image files, or slices of volumes, as the task's networks take them, by the one rule of ``data.pictures``."""
    first = places[0] if isinstance(places[0], Path) else places[0][0]
    return as_channels(read_images(places, task.image_size), task.channels, str(first.parent))


def as_channels(images: Images, channels: int, where: str) -> Images:
    """Grey images become RGB where the sites agreed on RGB; colour is never thrown away silently."""
    if images.shape[3] == channels:
        return images
    if channels == 3:
        return np.repeat(images, 3, axis=3)
    raise DataError("colour", f"{where}: colour images, but the sites agreed on grey ones; convert them first")


def _read(path: Path, entries: Sequence[Entry], headers: Sequence[Header], task: Task) -> Split:
    numbers = {name: number for number, name in enumerate(task.classes)}
    for label in sorted({entry.label for entry in entries}):
        if label not in numbers:
            hint = nearest(label, numbers)
            raise DataError("unknown_class", f"{path}: class {label!r} is not in the agreed label map{hint}")
    labels = np.array([numbers[entry.label] for entry in entries], np.int64)
    images = read_images([(entry.path, entry.slice) for entry in entries], task.image_size, headers=headers)
    return Split(as_channels(images, task.channels, str(path)), labels, *columns(entries))


def _held_out(everything: Split, entries: Sequence[Entry], hold_out: float, seed: int) -> np.ndarray:
    """Which images are kept for testing."""
    if entries[0].split is not None:
        return np.array([entry.split == "test" for entry in entries])
    if hold_out == 0:
        return np.zeros(len(entries), bool)
    rng = seeds.numpy_rng(seed, "hold-out")
    return split_off_test(everything.labels, everything.patients, everything.sites, hold_out, rng)


def _check_label_map(dataset: Dataset, task: Task) -> None:
    """Arrays have numbers for labels, which mean something only if their class names, if any, are the agreed ones."""
    count = len(dataset.classes)
    unnamed = dataset.name not in DATASETS and dataset.classes == default_classes(count)
    if dataset.classes == task.classes or (unnamed and count <= len(task.classes)):
        return
    raise DataError(
        "label_map", f"{dataset.name} has the classes {list(dataset.classes)}, the sites agreed on {list(task.classes)}"
    )


def _with_channels(part: Split, channels: int, where: str) -> Split:
    return Split(as_channels(part.images, channels, where), part.labels, part.patients, part.sites)
