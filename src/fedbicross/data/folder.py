"""A hospital's own images: a folder (``data.layout``) or a CSV manifest (``data.manifest``), read by one rule
(``data.pictures``).

Without a given split, ``test_fraction`` of the patients (of the images, where there are none) is held out, evenly over
classes and sites. Every bad file is found before anything is refused, so that nobody mends them one run at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedbicross.data.dataset import Dataset, Images, Indices, Names, Split
from fedbicross.data.files import KNOWN
from fedbicross.data.layout import Entry, Found, Problem, folders_in_every_class, scan_folder
from fedbicross.data.manifest import scan_manifest
from fedbicross.data.patient_groups import split_off_test
from fedbicross.data.pictures import MAX_PIXELS, Header, Reader, convert, has_colour
from fedbicross.errors import ConfigError, DataError

MAX_BYTES = 8 * 2**30  # of all images once converted
PATIENTS = "patient_in_both_splits"
_NAMED = 3  # problems in an error message; `fedbicross check` lists all


def load_folder(
    path: Path,
    image_size: int = 28,
    *,
    test_fraction: float = 0.2,
    rng: np.random.Generator | None = None,
    accept: Sequence[str] = (),
) -> Dataset:
    """Read a folder of class folders, or the images named in a CSV manifest."""
    if not 4 <= image_size <= 4096:
        raise ConfigError("bad_image_size", f"the image size must be between 4 and 4096 pixels, got {image_size}")
    name = path.name if path.is_dir() else path.stem
    found, headers = find_images(path)
    entries = found.entries
    classes = tuple(sorted({entry.label for entry in entries}))
    if len(classes) < 2:
        raise DataError("one_class", f"{name}: only one class found ({classes[0]!r}); at least two are needed")
    for label in classes:
        if not label.isprintable():  # also a file name in another encoding, which cannot be written as UTF-8
            raise DataError("bad_name", f"{name}: the class name {label!r} is not plain text; rename it")
    labels = np.array([classes.index(entry.label) for entry in entries], np.int64)
    patients, sites = columns(entries)
    is_test = choose_test(name, entries, labels, test_fraction, rng or np.random.default_rng(0))
    notes = ["own images"]
    if found.skipped:
        notes.append(f"{len(found.skipped)} files were passed over (`fedbicross check` lists them)")
    if path.is_dir() and (inner := folders_in_every_class(path, entries)):
        notes.append(f"the classes {', '.join(classes[:3])} all hold folders named {inner[0]}: are those the classes?")
    if PATIENTS in accept and patients is not None and np.intersect1d(patients[is_test], patients[~is_test]).size:
        patients = None
        notes.append("patients are in both train and test, which was accepted: they are ignored")
    images = read_images([(entry.path, entry.slice) for entry in entries], image_size, headers=headers)
    everything = Split(images, labels, patients, sites)
    train, test = (everything.take(np.flatnonzero(part)) for part in (~is_test, is_test))
    return Dataset(name, classes, train, test, "; ".join(notes))


def scan(path: Path) -> Found:
    """What a folder or a CSV manifest names."""
    return scan_folder(path) if path.is_dir() or path.suffix.lower() != ".csv" else scan_manifest(path)


def find_images(path: Path) -> tuple[Found, list[Header]]:
    """Every image with its header and patient; refused if any file or line is bad."""
    found = scan(path)
    headers = look_at(found)
    refuse(path, found.problems)
    if not found.entries:
        raise DataError("empty", f"{path.name}: no images found ({KNOWN} in one folder per class)")
    return found, headers


def look_at(found: Found, tell: Callable[[int], None] = lambda done: None) -> list[Header]:
    """Read all headers: a volume becomes its slices, patients are told apart, what is bad joins the problems."""
    reader = Reader()
    entries: list[Entry] = []
    headers: list[Header] = []
    for done, entry in enumerate(found.entries, start=1):
        try:
            inside = reader.look(entry.path)
        except DataError as error:
            # Archives export reports and presentation states beside pictures; one that a manifest names is a mistake.
            harmless = error.code == "no_pixels" and found.layout != "manifest"
            (found.skipped if harmless else found.problems).append(_problem(entry, error))
            continue
        finally:
            tell(done)
        entries += [replace(entry, slice=header.slice) for header in inside]
        headers += inside
    found.entries = name_patients(entries, [header.patient for header in headers])
    return headers


def name_patients(entries: Sequence[Entry], keys: Sequence[Hashable]) -> list[Entry]:
    """Patients by number, in the order of the files, unless a manifest names them or no file does.

    A number says nothing about a person, needs no salt to be kept secret, and is the same whenever the same files are
    loaded. An image without a patient counts as one of its own. One patient for all is a placeholder.
    """
    known = {key for key in keys if key is not None}
    one_for_all = len(known) == 1 and None not in keys and all(entry.slice is None for entry in entries)
    if not known or one_for_all or any(entry.patient is not None for entry in entries):
        return list(entries)
    alone = [key if key is not None else ("alone", place) for place, key in enumerate(keys)]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(alone))}
    return [replace(entry, patient=f"patient-{numbers[key]}") for entry, key in zip(entries, alone, strict=True)]


def refuse(path: Path, problems: Sequence[Problem]) -> None:
    """One error for all problems; its code is that of the first."""
    if problems:
        more = len(problems) - _NAMED
        said = "; ".join(problem.reason for problem in problems[:_NAMED])
        rest = f"; and {more} more: `fedbicross check {path}` lists them all" if more > 0 else ""
        raise DataError(problems[0].code, f"{said}{rest}")


def _problem(what: object, error: DataError) -> Problem:
    return Problem(str(what), error.code, str(error.args[0]))


def choose_test(
    name: str, entries: Sequence[Entry], labels: Indices, test_fraction: float, rng: np.random.Generator
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which images test: as given, or held out by patient."""
    if entries[0].split is not None:
        return np.array([entry.split == "test" for entry in entries])
    if not 0 < test_fraction < 1:
        raise ConfigError("bad_test_fraction", f"test_fraction must lie between 0 and 1, got {test_fraction}")
    is_test = split_off_test(labels, *columns(entries), test_fraction, rng)
    if not is_test.any():
        raise DataError("empty", f"{name}: {len(entries)} images are too few to hold any out for testing")
    return is_test


def columns(entries: Sequence[Entry]) -> tuple[Names | None, Names | None]:
    """Patients and sites, where they are known."""
    patients = None if entries[0].patient is None else np.array([entry.patient for entry in entries], dtype=np.str_)
    sites = None if entries[0].site is None else np.array([entry.site for entry in entries], dtype=np.str_)
    return patients, sites


def read_images(
    sources: Sequence[Path | tuple[Path, int | None]],
    image_size: int,
    max_pixels: int = MAX_PIXELS,
    headers: Sequence[Header] | None = None,
) -> Images:
    """Convert image files, or slices of volumes, by the rule of ``data.pictures``."""
    reader = Reader(max_pixels)
    places = [source if isinstance(source, tuple) else (source, None) for source in sources]
    # Two passes: only after every header is known is it clear whether the set is grey.
    if headers is None:
        headers = [header for path in dict.fromkeys(path for path, _ in places) for header in reader.look(path)]
    grey = all(header.grey for header in headers)
    channels = 1 if grey else 3
    if (total := len(places) * image_size**2 * channels) > MAX_BYTES:
        raise DataError("too_large", f"{len(places)} images of {image_size} pixels need {total / 2**30:.1f} GiB")
    images = np.empty((len(places), image_size, image_size, channels), np.uint8)
    problems: list[Problem] = []
    for row, (path, index) in enumerate(places):
        try:
            with reader.decoded(path, index) as image:
                images[row] = convert(image, image_size, grey, path)
        except DataError as error:
            problems.append(_problem(path, error))
    if problems:
        refuse(places[0][0].parent, problems)
    return images if grey or any(map(has_colour, images)) else images[..., :1].copy()
