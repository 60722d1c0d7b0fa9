"""The library's front door: run a federation from Python with plain arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedbicross import report
from fedbicross.data import Dataset
from fedbicross.runs import runner
from fedbicross.runs.config import load_config


def run(
    source: str | Dataset = "cells", *, out: str | Path | None = None, quick: bool = False, **settings: Any
) -> dict[str, Any]:
    """Run methods on simulated hospitals and return the results (the content of results.json).

    ``source`` is a name, a path, or a ``Dataset`` of your own arrays. ``settings`` are those of the configuration:
    ``methods=["fedavg"], clients=5, partition={"alpha": 0.1}, training={"epochs": 5}, model="resnet8", seeds=[0]``.
    With ``out`` the run is kept there, can be resumed, and gets a report.
    """
    dataset = source if isinstance(source, Dataset) else None
    name = f"python:{dataset.name}" if dataset else str(source)
    settings["data"] = {**settings.get("data", {}), "name": name}
    config = load_config(flags=settings, quick=quick)
    results = runner.run(config, Path(out) if out else None, dataset=dataset)
    if out:
        report.write_report(Path(out))
    return results


def resume(out: str | Path, *, dataset: Dataset | None = None) -> dict[str, Any]:
    """Continue a killed run; a run on your own arrays needs the same ``dataset`` again."""
    results = runner.resume(Path(out), dataset=dataset)
    report.write_report(Path(out))
    return results
