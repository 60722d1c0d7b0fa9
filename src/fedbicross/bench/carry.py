"""Cells of another machine: all of a suite's in one file, and back into a folder.

The file is what the cells' own files hold, one line each, compressed. What comes in is data of a stranger: it is read
with limits, and a line becomes a file only under the name of a cell that the suite has.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbicross.atomic import write_atomic
from fedbicross.bench import budgets, cells, suite
from fedbicross.bench.suite import Cell
from fedbicross.errors import FedBiCrossError, RunError

MAX_CELL = 4 << 20  # bytes of a line; a cell of a hundred hospitals has less than one
MAX_CELLS = 100_000


@dataclass
class Carried:
    """What an unpacking did: keys of cells."""

    written: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # the stored one is as good or better
    refused: list[str] = field(default_factory=list)  # why, for each


def pack(names: Sequence[str | Path], out: Path, to: Path) -> list[str]:
    """Write the stored cells of these suites, under whatever budget, into one file; their keys."""
    found: list[str] = []
    lines: list[bytes] = []
    for name, content in map(suite.load, names):
        for budget in budgets.BUDGETS:
            for cell in suite.expand(name, content, budget) if (out / "cells" / name / budget).is_dir() else ():
                stored = cells.load(cells.file_of(out, cell))
                if stored is not None:
                    lines.append(cells.as_bytes(stored))
                    found.append(cell.key)
    if not found:
        raise RunError("nothing_to_pack", f"no cells of {', '.join(map(str, names))} are stored in {out}")
    try:
        write_atomic(to, gzip.compress(b"".join(lines), mtime=0))
    except OSError as error:
        raise RunError("cannot_write", f"{to} cannot be written: {error.strerror}") from None
    return found


def unpack(file: Path, names: Sequence[str | Path], out: Path) -> Carried:
    """Put the cells of a packed file into a folder.

    A cell that is what the suite asks for replaces what is there: rows and the training alone that they are measured
    against come from one machine. One that is stale here is taken only where there is none.
    """
    known, done = Known(names), Carried()
    for number, line in enumerate(_lines(file), 1):
        try:
            cell, stored = _checked(line, known)
        except ValueError as problem:
            done.refused.append(f"line {number}: {problem}")
            continue
        place = cells.file_of(out, cell)
        current = stored["digest"] == cells.digest(cell)
        if _equal(place, stored) or (not current and place.exists()):
            done.kept.append(cell.key)
            continue
        try:
            write_atomic(place, cells.as_bytes(stored))
            cells.error_file_of(out, cell).unlink(missing_ok=True)
        except OSError as error:
            raise RunError("cannot_write", f"writing to {out} failed: {error.strerror}") from None
        done.written.append(cell.key)
    return done


class Known:
    """The cells of some suites, by what a stored cell says of itself; a suite is expanded when it is asked for."""

    FIELDS = ("suite", "budget", "data", "partition", "alpha", "clients", "models", "seed", "method")  # all of its key

    def __init__(self, names: Sequence[str | Path]) -> None:
        self._suites = dict(map(suite.load, names))
        self._cells: dict[tuple[str, str], dict[str, Cell]] = {}

    def find(self, said: object) -> Cell | None:
        """The cell with these fields, or None."""
        if not isinstance(said, dict) or said.get("suite") not in list(self._suites):
            return None
        name, budget = said["suite"], said.get("budget")
        if budget not in list(budgets.BUDGETS):
            return None
        if (name, budget) not in self._cells:
            every = suite.expand(name, self._suites[name], budget)
            self._cells[name, budget] = {self._sign(cell.identity()): cell for cell in every}
        return self._cells[name, budget].get(self._sign(said))

    def _sign(self, said: Mapping[str, Any]) -> str:
        return json.dumps([said.get(field) for field in self.FIELDS])


def _equal(place: Path, stored: Mapping[str, Any]) -> bool:
    try:
        return cells.load(place) == stored
    except FedBiCrossError:  # a damaged one is replaced
        return False


def _lines(file: Path) -> Iterator[bytes]:
    try:
        with gzip.open(file) as opened:
            for _ in range(MAX_CELLS):
                line = opened.readline(MAX_CELL)
                if not line:
                    return
                if not line.endswith(b"\n"):
                    raise RunError("pack_garbled", f"{file}: a line of more than {MAX_CELL:,} bytes, or a cut one")
                yield line
            if opened.read(1):
                raise RunError("pack_garbled", f"{file}: more than {MAX_CELLS:,} lines")
    except (OSError, EOFError, zlib.error) as error:
        raise RunError("pack_unreadable", f"{file} is no packed file of cells: {error}") from None


def _checked(line: bytes, known: Known) -> tuple[Cell, dict[str, Any]]:
    """The cell that a line is of, and the line; ValueError in words where it is none."""
    try:
        stored = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("no valid JSON") from None
    if not isinstance(stored, dict) or stored.get("schema") != cells.SCHEMA:
        raise ValueError(f"no cell of schema {cells.SCHEMA}")
    cell, row = known.find(stored.get("cell")), stored.get("row")
    if cell is None:
        raise ValueError("a cell that none of the suites has")
    if not isinstance(row, dict) or row.get("method") != cell.spec or not isinstance(stored.get("digest"), str):
        raise ValueError(f"{cell.key}: not the row of {cell.spec}")
    return cell, stored
