"""`fedbicross demo`: five simulated hospitals, one upload each, one reply each, one honest report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedbicross import runs
from fedbicross.cli.show import run_and_report

METHODS = ["fedavg", "ensemble:consensus", "primum"]
SETTINGS = {
    "name": "demo",
    "model": "resnet8",
    "data": {"name": "cells", "train_size": 4000, "test_size": 1000},
    "clients": 5,
    "partition": {"kind": "dirichlet", "alpha": 0.3},
    "training": {"recipe": "modern", "epochs": 12, "batch_size": 32},
    "methods": METHODS,
    "device": "cpu",
}


def demo(
    out: Annotated[Path, typer.Option(help="folder of the run; an earlier demo there is replaced")] = Path("runs/demo"),
    json: Annotated[bool, typer.Option("--json", help="print results.json instead of the table")] = False,
) -> None:
    """Run a whole one-shot federation on drawn blood cells, in minutes, without any download."""
    config = runs.config.load_config(flags=SETTINGS, quick=True)
    run_and_report(lambda progress: runs.runner.run(config, out, progress=progress, replace=True), out, json)
