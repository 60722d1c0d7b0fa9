"""A CSV manifest: columns ``path,label`` and optionally ``patient_id,site,split``.

Separated by comma, semicolon (as office programs save it where the comma is the decimal sign) or tab; names of columns
in any case. Paths are relative to the CSV and may not leave its folder, not by a link either. Every bad line is
found, not only the first.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath

from fedbicross.data.files import read_regular
from fedbicross.data.layout import Entry, Found, Problem, split_of
from fedbicross.errors import DataError

NEEDED = ("path", "label")
OPTIONAL = ("patient_id", "site", "split")
MAX_BYTES = 256 * 2**20
DELIMITERS = (",", ";", "\t")


def scan_manifest(path: Path) -> Found:
    """Read a manifest without opening the images; bad lines are in ``problems``."""
    found = Found("manifest")
    columns, rows = _read(path)
    home, seen = path.parent.resolve(), set[str]()
    for number, row in rows:
        where = f"{path.name} line {number}"
        try:
            entry = _entry(path, home, where, {column: row.get(column, "") for column in columns})
            key = os.path.normpath(entry.path)
            if key in seen:
                raise DataError("duplicate_path", f"{where}: names {entry.path.name} a second time")
        except DataError as error:
            found.problems.append(Problem(where, error.code, str(error.args[0])))
            continue
        seen.add(key)
        found.entries.append(entry)
    return found


def _read(path: Path) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """The known columns that are there, and each line's number and values."""
    try:
        text = read_regular(path, MAX_BYTES).decode("utf-8-sig")
        sign = _delimiter(text.partition("\n")[0])
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=sign, skipinitialspace=True, strict=True)
        header = [name.strip().lower() for name in next(reader, [])]
        lines = [(reader.line_num, values) for values in reader if values]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        hint = "; save it as CSV UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        raise DataError("bad_manifest", f"{path} cannot be read as UTF-8 CSV ({error}){hint}") from error
    for needed in NEEDED:
        if needed not in header:
            # A file without a header begins with a patient: nothing of its first line is said.
            count = f"its first line has {len(header)} columns, none of that name"
            raise DataError("bad_manifest", f"{path.name} has no column {needed!r}: {count}")
    known = [name for name in (*NEEDED, *OPTIONAL) if name in header]
    return known, [(number, dict(zip(header, values, strict=False))) for number, values in lines]


def _delimiter(line: str) -> str:
    """The sign that makes the needed columns of the first line; a comma if none does."""
    for sign in DELIMITERS:
        names = next(csv.reader([line], delimiter=sign, skipinitialspace=True), [])
        if set(NEEDED) <= {name.strip().lower() for name in names}:
            return sign
    return DELIMITERS[0]


def _entry(manifest: Path, home: Path, where: str, row: Mapping[str, str]) -> Entry:
    values = {column: text.strip() for column, text in row.items()}
    for column, text in values.items():
        # A gap would have to be guessed: is it a new patient or the same as above?
        if not text:
            raise DataError("bad_manifest", f"{where}: {column} is empty")
    name = _unquoted(values["path"])
    if PurePosixPath(name).is_absolute() or PureWindowsPath(name).anchor or ".." in PureWindowsPath(name).parts:
        raise DataError("path_outside", f"{where}: {name!r} must be relative to the manifest and stay in its folder")
    if "\\" in name and not (manifest.parent / name).exists():
        name = PureWindowsPath(name).as_posix()  # written on Windows, read elsewhere
    if not _inside(manifest.parent / name, home):
        raise DataError("path_outside", f"{where}: {name!r} leaves the folder of the manifest through a link")
    split = None
    if "split" in values:
        kind = split_of(values["split"])
        if kind is None:
            raise DataError("bad_split", f"{where}: split must be train, val or test, got {values['split']!r}")
        split = "test" if kind == "test" else "train"
    return Entry(manifest.parent / name, values["label"], values.get("patient_id"), values.get("site"), split)


def _inside(path: Path, home: Path) -> bool:
    """Whether a path stays below a folder once links are followed."""
    try:
        return path.resolve().is_relative_to(home)
    except (OSError, RuntimeError):  # links in a circle
        return False
    except ValueError:  # no name of a file: said when it is opened
        return True


def _unquoted(text: str) -> str:
    """Without quotation marks that some programs write around a path in addition to CSV's own."""
    return text[1:-1].strip() if len(text) > 2 and text[0] == text[-1] and text[0] in "\"'" else text
