"""`fedbicross track`: a finished run in TensorBoard or MLflow."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedbicross import report
from fedbicross.cli.show import print_json


class Tracker(StrEnum):
    """Where runs are compared."""

    tensorboard = "tensorboard"
    mlflow = "mlflow"


def track(
    folder: Annotated[Path, typer.Argument(help="the run's folder")],
    to: Annotated[Tracker, typer.Option(help="which tracker (extra `track`)")] = Tracker.tensorboard,
    logs: Annotated[
        str | None, typer.Option(help="folder of event files (default tensorboard), or address of an MLflow server")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Log settings, training curves and results of a run to TensorBoard or MLflow."""
    results = report.write.load_results(folder)
    if to is Tracker.tensorboard:
        where = str(report.track.to_tensorboard(results, Path(logs or "tensorboard")))
    else:
        page = folder / "report.html"
        where = report.track.to_mlflow(results, logs, page if page.is_file() else None)
    if json:
        print_json({"to": to.value, "logged": where})
    else:
        print(f"{to.value}: {where}")
