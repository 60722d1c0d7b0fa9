"""`fedbicross resume`: continue a killed run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedbicross import runs
from fedbicross.cli.show import run_and_report


def resume(
    folder: Annotated[Path, typer.Argument(help="the run's folder")],
    json: Annotated[bool, typer.Option("--json", help="print results.json instead of the table")] = False,
) -> None:
    """Continue a killed run to the results that it would have had."""
    run_and_report(lambda progress: runs.runner.resume(folder, progress=progress), folder, json)
