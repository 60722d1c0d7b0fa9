"""`fedbicross report`: make the page and the tables anew from stored results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedbicross import report as reports
from fedbicross import runs
from fedbicross.cli.show import print_json
from fedbicross.errors import RunError, printable


def report(
    folder: Annotated[Path, typer.Argument(help="the run's folder")],
    metric: Annotated[
        str | None, typer.Option(help="judge by this instead: accuracy, balanced_accuracy or macro_auc")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="write nothing; compare every file with what the run wrote")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="print the written paths, or what was found, as JSON")] = False,
) -> None:
    """Write report.html and the Markdown, CSV and LaTeX tables from results.json."""
    if check:
        _check(folder, json)
        return
    paths = [str(path) for path in reports.write_report(folder, metric)]
    if json:
        print_json(paths)
    else:
        print("\n".join(paths))


def _check(folder: Path, as_json: bool) -> None:
    found = runs.integrity.check_run(folder)
    if as_json:
        print_json(vars(found))
    else:
        for line in found.differences:
            print(printable(line))
    if found.differences:
        raise RunError("changed", f"{len(found.differences)} difference(s) to what was written into {folder}")
    if not as_json:
        print(f"{folder}: {found.files:,} files are what the run wrote")
