"""Stored cells: one small JSON file each, and whether it still is what the suite asks for."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fedbicross.atomic import write_atomic
from fedbicross.bench.suite import Cell
from fedbicross.bundle.format import canonical_json
from fedbicross.data import DATASETS
from fedbicross.data.load import default_data_dir
from fedbicross.errors import FedBiCrossError, RunError

SCHEMA = 1
# Bump by hand when a change of the code changes results that no setting shows: the first for everything, the second
# for one method, e.g. {"fedisca": 2}. Cells made before then are stale.
ENGINE_VERSION = 1
METHOD_VERSIONS: dict[str, int] = {}

State = Literal["done", "stale", "failed", "missing", "not available here"]


def _digest(parts: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(parts).encode()).hexdigest()


def _method(cell: Cell, spec: str) -> dict[str, Any]:
    """A method as it will run, with every default: changing one makes this method's cells stale, and no other's."""
    method = cell.config.build(spec)
    version = METHOD_VERSIONS.get(spec.partition(":")[0], 1)
    return {"spec": spec, "settings": method.config.model_dump(), "gated": method.gated, "version": version}


def federation_digest(cell: Cell) -> str:
    """What the cells of one federation share: images, who has which, client models, and training alone."""
    config = cell.config
    parts = {
        "engine": ENGINE_VERSION,
        "data": config.data.model_dump(exclude={"dir"}),
        "partition": config.partition.model_dump(),
        "clients": config.clients,
        "model": config.model,
        "client_models": config.client_models,
        "training": config.training.model_dump(),
        "seed": cell.seed,
        "alone": [_method(cell, spec) for spec in cell.alone],
    }
    return _digest(parts)


def digest(cell: Cell) -> str:
    """All that decides about a cell's numbers, but for the machine."""
    return _digest({"federation": federation_digest(cell), "method": _method(cell, cell.spec)})


def file_of(out: Path, cell: Cell) -> Path:
    """Where a cell is stored."""
    return out / "cells" / f"{cell.key}.json"


def error_file_of(out: Path, cell: Cell) -> Path:
    """Where it is said why a cell could not be made."""
    return out / "cells" / f"{cell.key}.error.json"


def load(path: Path) -> dict[str, Any] | None:
    """A stored file, or None where there is none."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError("cell_unreadable", f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise RunError("cell_garbled", f"{path} is not valid JSON; delete it and run the suite again") from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise RunError("cell_schema", f"{path} is no cell of schema {SCHEMA}; delete it and run the suite again")
    return found


def save(out: Path, cell: Cell, results: Mapping[str, Any]) -> None:
    """Keep a finished cell: its row without curves and pictures, and all that is needed to make it again."""
    row = next(row for row in results["rows"] if row["method"] == cell.spec)
    diagnosis = {kind: row["diagnosis"][kind] for kind in ("scalars",) if kind in row["diagnosis"]}
    config = cell.config.model_dump()  # without a path of this machine
    stored = {
        "schema": SCHEMA,
        "cell": cell.identity(),
        "digest": digest(cell),
        "engine_version": ENGINE_VERSION,
        "row": {**{key: value for key, value in row.items() if key != "clinical"}, "diagnosis": diagnosis},
        "seconds": row["seconds"],
        "config": config,
        "dataset": {**results["dataset"], "name": cell.config.data.name},
        "clients": results["clients"][str(cell.seed)],
        "partition_sha256": results["partition_sha256"],
        "warnings": results["warnings"],
        "versions": results["versions"],
        "device": results["versions"]["device"],
    }
    try:
        write_atomic(file_of(out, cell), as_bytes(stored))
        error_file_of(out, cell).unlink(missing_ok=True)
    except OSError as error:
        raise RunError("cannot_write", f"writing to {out} failed: {error.strerror}") from None


def as_bytes(stored: Mapping[str, Any]) -> bytes:
    """A cell as one line of JSON."""
    return f"{json.dumps(stored, separators=(',', ':'), sort_keys=True, allow_nan=False)}\n".encode()


# An absolute path up to its last name: cells are handed on, and say nothing about the machine that made them.
FOLDERS = re.compile(r"""(?<![\w.~:/\\-])(?:~|[A-Za-z]:|\\)?[/\\](?:[^\s:;,'"()/\\]+[/\\])*(?=[^\s/\\])""")


def without_places(text: str, *places: Path | None) -> str:
    """A message with the names of files and without the folders that they lie in; ``places`` may hold blanks."""
    known = {str(form) for place in (*places, Path.home()) if place for form in (place, place.resolve())}
    for folder in sorted(known - {".", "/"}, key=len, reverse=True):
        text = re.sub(rf"{re.escape(folder)}(?![\w-])[/\\]?", "", text) if Path(folder).is_absolute() else text
    return FOLDERS.sub("", text)


def save_error(out: Path, cell: Cell, error: FedBiCrossError, data_dir: Path | None = None) -> None:
    """Say in the folder why a cell could not be made; the next run tries again."""
    text = without_places(str(error), out, data_dir or default_data_dir())
    stored = {"schema": SCHEMA, "cell": cell.identity(), "digest": digest(cell), "error": text}
    write_atomic(error_file_of(out, cell), f"{canonical_json(stored)}\n".encode())


def place(cell: Cell, data_dir: Path | None) -> tuple[str, str | None] | None:
    """``data.name`` and ``data.dir`` on this machine; None where the images are not at hand."""
    name, folder = cell.config.data.name, data_dir or default_data_dir()
    if name == "cells":
        return name, None
    if name in DATASETS:
        info = DATASETS[name]
        there = not info.refused and (folder / info.file_name(cell.config.data.image_size)).is_file()
        return (name, str(folder)) if there else None
    found = next((path for end in ("", ".npz", ".csv") if (path := folder / f"{name}{end}").exists()), None)
    return None if found is None else (str(found), None)


@dataclass(frozen=True)
class CellStatus:
    """The state of a cell, what is stored of it, and why it failed, if it did."""

    cell: Cell
    state: State
    stored: dict[str, Any] | None = None
    reason: str = ""
    other_images: bool = False  # than training alone of the same seed: the two cannot be paired


def status_of(cell: Cell, out: Path, available: bool = True) -> CellStatus:
    """Look at one cell. What is stored counts, wherever it was made; data are only missed for what is not."""
    stored = load(file_of(out, cell))
    if stored is not None:
        if _other_images(cell, stored, out):
            return CellStatus(cell, "stale", stored, "made on other images than training alone", other_images=True)
        if stored.get("digest") == digest(cell):
            return CellStatus(cell, "done", stored)
        engine = stored.get("engine_version")
        reason = "settings changed" if engine == ENGINE_VERSION else f"engine {engine}, now {ENGINE_VERSION}"
        return CellStatus(cell, "stale", stored, reason)
    failed = load(error_file_of(out, cell))
    if failed is not None and failed.get("digest") == digest(cell):
        return CellStatus(cell, "failed", None, str(failed.get("error")))
    return CellStatus(cell, "missing" if available else "not available here")


def _other_images(cell: Cell, stored: Mapping[str, Any], out: Path) -> bool:
    """Whether the images, or who has which, were others when the first way of training alone was stored."""
    first = cell.alone[0]
    if cell.spec == first:
        return False
    alone = load(file_of(out, replace(cell, method=first, spec=first)))
    return alone is not None and alone.get("partition_sha256") != stored.get("partition_sha256")


def statuses_of(cells: Iterable[Cell], out: Path, data_dir: Path | None = None) -> list[CellStatus]:
    """The status of every cell."""
    return [status_of(cell, out, place(cell, data_dir) is not None) for cell in cells]
