"""`fedbicross demo`: five simulated hospitals, one upload each, one reply each, one honest report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbicross import report, runs
from fedbicross.cli.show import run_and_report
from fedbicross.errors import FedBiCrossError
from fedbicross.settings import as_toml

if TYPE_CHECKING:
    from fedbicross.runs.config import RunConfig

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
    out: Annotated[Path, typer.Option(help="folder of the run; a finished demo there is replaced")] = Path("runs/demo"),
    json: Annotated[bool, typer.Option("--json", help="print results.json instead of the table")] = False,
) -> None:
    """Run a whole one-shot federation on drawn blood cells, in minutes, without any download."""
    config = runs.config.load_config(flags=SETTINGS, quick=True)
    if _unfinished(out, config) and _go_on(out):
        run_and_report(lambda progress: runs.runner.resume(out, progress=progress), out, json)
        return
    run_and_report(lambda progress: runs.runner.run(config, out, progress=progress, replace=True), out, json)


def _unfinished(out: Path, config: RunConfig) -> bool:
    """Whether this very demo was stopped there before its end."""
    try:
        same = (out / "config.toml").read_bytes() == as_toml(config).encode()
        return same and not report.write.load_results(out).get("complete")
    except OSError:
        return False
    except FedBiCrossError as error:
        return error.code == "results_missing"


def _go_on(out: Path) -> bool:
    """Ask, where somebody is there to answer."""
    if somebody_is_there():
        return typer.confirm(f"{out} holds a demo that was stopped. Go on with it?", default=True, err=True)
    typer.echo(f"going on with the demo that was stopped in {out}", err=True)
    return True


def somebody_is_there() -> bool:
    """Whether a question would be seen and could be answered."""
    return sys.stdin.isatty() and sys.stderr.isatty()
