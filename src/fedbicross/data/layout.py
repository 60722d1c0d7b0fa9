"""Which images a folder holds, of which class and in which set, found without decoding any.

::

    CLASS/…                       one set; a test set is held out later
    train/CLASS/…  test/CLASS/…   the user's own sets; val/ joins train/
    CLASS/train/…  CLASS/test/…   the same, the other way round
    ANYTHING/train/CLASS/…        one folder around it all, as archives unpack

Names of sets are recognised in any case and spelling (``Training``, ``Test_Set``, ``validation``). A folder with such
a name is never taken for a class: half of the data sets that people download would otherwise have the classes
"Training" and "Testing".
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedbicross.data.files import kind_of, why_strange
from fedbicross.errors import DataError

ORDER = ("train", "val", "test")
LINK = "a link to a folder is not followed"
_SET = re.compile(
    r"(?P<train>train|training)|(?P<val>val|valid|validation)|(?P<test>test|testing|hold[ _-]?out|held[ _-]?out)"
)
_TAIL = re.compile(r"[ _-]?(set|data|images?|imgs?|split)$")


@dataclass(frozen=True)
class Entry:
    """One image before it is read."""

    path: Path
    label: str
    patient: str | None = None
    site: str | None = None
    split: str | None = None
    slice: int | None = None  # of a volume

    def __str__(self) -> str:
        return str(self.path) if self.slice is None else f"{self.path} (slice {self.slice})"


@dataclass(frozen=True)
class Problem:
    """A file, a line or a folder that was passed over or cannot be read, and why."""

    where: str
    code: str
    reason: str


@dataclass
class Found:
    """What a folder or manifest names. ``skipped`` is harmless, ``problems`` are not."""

    layout: str
    entries: list[Entry] = field(default_factory=list)
    skipped: list[Problem] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def skip(self, path: Path, code: str, reason: str) -> None:
        """Note a file that is passed over."""
        self.skipped.append(Problem(str(path), code, reason))


def split_of(name: str) -> str | None:
    """``train``, ``val`` or ``test`` if a folder's name says so."""
    plain = name.strip().lower()
    found = _SET.fullmatch(plain) or _SET.fullmatch(_TAIL.sub("", plain))
    return found.lastgroup if found else None


def folders_in_every_class(root: Path, entries: Iterable[Entry]) -> list[str]:
    """Names of folders that lie in every class folder, if several do: those may be the classes, and not the outer ones.

    As in ``SITE/CLASS/…``, or where several downloaded sets lie side by side.
    """
    inside: dict[str, set[str]] = {}
    for entry in entries:
        folders = entry.path.relative_to(root).parts[:-1]
        below = folders[folders.index(entry.label) + 1 :]
        inside.setdefault(entry.label, set()).update([name for name in below if split_of(name) is None][:1])
    shared = sorted(set.intersection(*inside.values())) if len(inside) > 1 else []
    return shared if len(shared) > 1 else []


def scan_folder(root: Path) -> Found:
    """Find the images of a folder, in a fixed order."""
    if not root.is_dir():
        raise DataError("missing_file", f"{root} is not a folder")
    top = _unwrap(root)
    folders = _folders(top)
    sets = {folder: split for folder in folders if (split := split_of(folder.name))}
    if sets:
        found = _sets_then_classes(top, folders, sets)
    elif any(_sets_in(folder) for folder in folders):
        found = _classes_then_sets(top, folders)
    else:
        found = Found("class_folders")
        _classes(top, None, found)
    if top != root:
        _note_files(root, found)
    outside = [skipped for skipped in found.skipped if skipped.code in ("outside", "link")]
    if not found.entries and outside:
        raise DataError(
            "no_class_folders",
            f"{root}: {len(outside)} images or folders lie outside of any class folder or are links to folders, e.g. "
            f"{outside[0].where}; put each image into a folder with the name of its class, or name them in a CSV "
            "manifest",
        )
    return found


def _folders(folder: Path) -> list[Path]:
    """The folders that are looked into; a link could lead anywhere."""
    inside = (child for child in folder.iterdir() if child.is_dir() and not child.is_symlink())
    return sorted(child for child in inside if not _hidden(child.name))


def _hidden(name: str) -> bool:
    return name.startswith((".", "__"))  # __MACOSX


def _sets_in(folder: Path) -> dict[Path, str]:
    return {child: split for child in _folders(folder) if (split := split_of(child.name))}


def _unwrap(root: Path) -> Path:
    """The folder itself, or the only one in it where that one holds the sets."""
    folders = _folders(root)
    alone = len(folders) == 1 and split_of(folders[0].name) is None
    return folders[0] if alone and any(_folders(inside) for inside in _sets_in(folders[0])) else root


def _has_test(sets: Iterable[str], where: Path) -> bool:
    """Whether the sets include one for testing; without one for training nothing can be done."""
    kinds = set(sets)
    if "train" not in kinds:
        names = " and ".join(sorted(kinds))
        raise DataError("no_train", f"{where} holds images for {names} but none for train; name the folder of the rest")
    return "test" in kinds


def _sets_then_classes(top: Path, folders: list[Path], sets: Mapping[Path, str]) -> Found:
    others = [folder.name for folder in folders if folder not in sets]
    if others and "train" not in sets.values():
        names = ", ".join(folder.name for folder in sets)
        raise DataError(
            "mixed_layout",
            f"{top}: {names} looks like a set, beside {', '.join(others[:5])}, which look like classes; put the "
            "classes into train/ and test/, or rename the class",
        )
    has_test = _has_test(sets.values(), top)
    found = Found("split_folders")
    for folder in folders:
        if folder not in sets:
            found.skip(folder, "outside", "lies beside the sets and is not read")
    for folder, split in sorted(sets.items(), key=lambda item: (ORDER.index(item[1]), item[0])):
        inside = _folders(folder)
        if len(inside) == 1 and split_of(inside[0].name) == split:  # train/train/, as archives unpack
            _note_files(folder, found)
            folder = inside[0]
        if nested := [child.name for child in _sets_in(folder)]:
            raise DataError("mixed_layout", f"{folder} is a set and holds sets itself: {', '.join(nested)}")
        _classes(folder, _read_as(split, has_test), found)
    _note_files(top, found)
    return found


def _classes_then_sets(top: Path, folders: list[Path]) -> Found:
    sets = {folder: _sets_in(folder) for folder in folders}
    found = Found("class_then_split")
    has_test = _has_test([split for inside in sets.values() for split in inside.values()], top)
    for folder in folders:
        if not sets[folder] and _any_image(folder):
            has = next(name.name for name, inside in sets.items() if inside)
            problem = f"class {has} is divided into sets, class {folder.name} is not"
            raise DataError("mixed_layout", f"{top}: {problem}; divide all or none")
        for inside in _folders(folder):
            if inside in sets[folder]:
                _walk(inside, folder.name, _read_as(sets[folder][inside], has_test), found)
            else:
                found.skip(inside, "outside", "lies beside the sets of its class and is not read")
        _note_files(folder, found)
    _note_files(top, found)
    return found


def _read_as(split: str, has_test: bool) -> str | None:
    """Validation images join the training images; without a test set one is held out of them all."""
    return None if not has_test else "test" if split == "test" else "train"


def _classes(folder: Path, split: str | None, found: Found) -> None:
    for inside in _folders(folder):
        _walk(inside, inside.name, split, found)
    _note_files(folder, found)


def _note_files(folder: Path, found: Found) -> None:
    """Images that lie where no class is known, and links that are not followed."""
    for path in sorted(folder.iterdir()):
        if _hidden(path.name):
            continue
        if path.is_dir():
            if path.is_symlink():
                found.skip(path, "link", LINK)
        elif not why_strange(path) and kind_of(path):
            found.skip(path, "outside", "lies outside of any class folder")


def _any_image(folder: Path) -> bool:
    probe = Found("")
    _walk(folder, "", None, probe)
    return bool(probe.entries)


def _walk(folder: Path, label: str, split: str | None, found: Found) -> None:
    """Every image below a folder; hidden files and folders are passed over, others are noted."""
    for here, subfolders, files in os.walk(folder):
        subfolders[:] = sorted(name for name in subfolders if not _hidden(name))  # .ipynb_checkpoints holds copies
        for name in subfolders:
            if (link := Path(here, name)).is_symlink():
                found.skip(link, "link", LINK)
        for name in sorted(files):
            path = Path(here, name)
            if name.startswith("."):
                continue
            if strange := why_strange(path):
                found.skip(path, "not_a_file", strange)
            elif kind_of(path) is None:
                found.skip(path, "not_an_image", "neither a known image ending nor DICOM")
            else:
                found.entries.append(Entry(path, label, split=split))
