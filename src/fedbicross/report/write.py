"""From ``results.json`` to files: the page and the tables, each complete or not there at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedbicross import sums
from fedbicross.atomic import read_plain, write_atomic
from fedbicross.errors import RunError
from fedbicross.report.classes import class_csv
from fedbicross.report.html import render
from fedbicross.report.metric import judged_by
from fedbicross.report.tables import client_csv, latex, markdown, result_csv

SCHEMA = 1
MAX_RESULTS = 1 << 30  # bytes


def load_results(run_dir: Path) -> dict[str, Any]:
    """The run's results, or a RunError that says what is wrong with them."""
    path = run_dir / "results.json"
    try:
        raw = read_plain(path, MAX_RESULTS)
    except FileNotFoundError:
        raise RunError("results_missing", f"{path} does not exist; finish or resume the run first") from None
    except OSError as error:
        raise RunError("results_unreadable", f"{path} cannot be read: {error.strerror}") from None
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        raise RunError("results_garbled", f"{path} is not valid JSON; resume the run to write it again") from None
    _check_as_written(run_dir, raw)
    if not isinstance(found, dict) or not isinstance(found.get("rows"), list):
        raise RunError("results_garbled", f"{path} holds no list of rows; resume the run to write it again")
    if not all(isinstance(row, dict) and isinstance(row.get("method"), str) for row in found["rows"]):
        raise RunError("results_garbled", f"{path} has a row without a method; resume the run to write it again")
    if found.get("schema") != SCHEMA:
        raise RunError("results_schema", f"{path} has schema {found.get('schema')!r}; this version reads {SCHEMA}")
    if not _rows_fit(found):
        raise RunError("results_changed", f"{path}: a row was changed after the run; {sums.advice('results.json')}")
    return found


def _check_as_written(run_dir: Path, results: bytes) -> None:
    """In the folder of a run: refuse settings, rows or results that are not those that the run wrote."""
    written = sums.Sums(run_dir)
    if not written:  # results alone, as they are handed on, or the folder of an earlier version
        return
    names = ["config.toml", "partition.json", *(p.relative_to(run_dir).as_posix() for p in run_dir.glob("rows/**/*"))]
    for name in names:
        try:
            if not (run_dir / name).is_dir():
                written.check(name, read_plain(run_dir / name))
        except OSError as error:
            raise RunError("damaged", f"{name} in {run_dir}: {error.strerror}; {sums.advice(name)}") from None
    written.check("results.json", results)


def _rows_fit(found: dict[str, Any]) -> bool:
    """Whether the rows are those that the digest beside them is of, where there is one."""
    if "rows_sha256" not in found or "trimmed" in found:
        return True
    try:
        return bool(found["rows_sha256"] == sums.rows_digest(found["rows"]))
    except ValueError:  # NaN, which no run writes
        return False


def write_report(run_dir: Path, metric: str | None = None) -> list[Path]:
    """Write ``report.html`` and ``tables/`` into the run folder; the same results give the same bytes.

    ``metric`` is what the verdict goes by; none: what the run was told.
    """
    stored = load_results(run_dir)
    try:
        results = judged_by(stored, metric)
        contents = {
            "report.html": render(results, run_dir),
            "tables/results.md": markdown(results),
            "tables/results.csv": result_csv(results),
            "tables/results.tex": latex(results),
            "tables/clients.csv": client_csv(stored),
            "tables/classes.csv": class_csv(stored),
        }
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if sums.Sums(run_dir):  # what this program wrote itself it must be able to show
            raise
        problem = f"it lacks what a report needs ({type(error).__name__}: {str(error)[:100]})"
        raise RunError("results_garbled", f"{run_dir / 'results.json'}: {problem}") from error
    for name, content in contents.items():
        try:
            write_atomic(run_dir / name, content.encode("utf-8", "replace"))
        except OSError as error:
            raise RunError("cannot_write", f"{run_dir / name} cannot be written: {error.strerror}") from None
    return [run_dir / name for name in contents]
