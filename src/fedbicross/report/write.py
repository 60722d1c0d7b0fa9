"""From ``results.json`` to files: the page and the tables, each complete or not there at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedbicross.atomic import write_atomic
from fedbicross.errors import RunError
from fedbicross.report.html import render
from fedbicross.report.tables import client_csv, latex, markdown, result_csv

SCHEMA = 1


def load_results(run_dir: Path) -> dict[str, Any]:
    """The run's results, or a RunError that says what is wrong with them."""
    path = run_dir / "results.json"
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise RunError("results_missing", f"{path} does not exist; finish or resume the run first") from None
    except OSError as error:
        raise RunError("results_unreadable", f"{path} cannot be read: {error.strerror}") from None
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        raise RunError("results_garbled", f"{path} is not valid JSON; resume the run to write it again") from None
    if not isinstance(found, dict) or not isinstance(found.get("rows"), list):
        raise RunError("results_garbled", f"{path} holds no list of rows; resume the run to write it again")
    if not all(isinstance(row, dict) and isinstance(row.get("method"), str) for row in found["rows"]):
        raise RunError("results_garbled", f"{path} has a row without a method; resume the run to write it again")
    if found.get("schema") != SCHEMA:
        raise RunError("results_schema", f"{path} has schema {found.get('schema')!r}; this version reads {SCHEMA}")
    return found


def write_report(run_dir: Path) -> list[Path]:
    """Write ``report.html`` and ``tables/`` into the run folder; the same results give the same bytes."""
    results = load_results(run_dir)
    contents = {
        "report.html": render(results, run_dir),
        "tables/results.md": markdown(results),
        "tables/results.csv": result_csv(results),
        "tables/results.tex": latex(results),
        "tables/clients.csv": client_csv(results),
    }
    for name, content in contents.items():
        try:
            write_atomic(run_dir / name, content.encode("utf-8", "replace"))
        except OSError as error:
            raise RunError("cannot_write", f"{run_dir / name} cannot be written: {error.strerror}") from None
    return [run_dir / name for name in contents]
