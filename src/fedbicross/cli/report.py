"""`fedbicross report`: make the page and the tables anew from stored results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedbicross import report as reports
from fedbicross.cli.show import print_json


def report(
    folder: Annotated[Path, typer.Argument(help="the run's folder")],
    json: Annotated[bool, typer.Option("--json", help="print the written paths as JSON")] = False,
) -> None:
    """Write report.html and the Markdown, CSV and LaTeX tables from results.json."""
    paths = [str(path) for path in reports.write_report(folder)]
    if json:
        print_json(paths)
    else:
        print("\n".join(paths))
