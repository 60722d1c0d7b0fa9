"""A suite small enough to run many times, and what a folder of cells holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedbicross.bench import suite
from fedbicross.bench.suite import Cell
from fedbicross.settings import parse

VALUES: dict[str, Any] = {
    "title": "Small",
    "budget": "smoke",
    "model": "resnet8",
    "device": "cpu",
    "threads": 1,
    "training": {"recipe": "modern", "epochs": 1, "batch_size": 16},
    "data": {"cells": {"image_size": 8, "train_size": 48, "test_size": 24}},
    "sweep": [
        {
            "name": "one",
            "data": ["cells"],
            "partitions": ["dirichlet:0.5"],
            "clients": [2],
            "alone": ["local_only"],
            "methods": ["fedavg", "fedisca"],
        }
    ],
}


def make(sweep: dict[str, Any] | None = None, **values: Any) -> list[Cell]:
    """The cells of the small suite with another first sweep."""
    sweeps = [{**VALUES["sweep"][0], **(sweep or {})}]
    return suite.expand("small", parse(suite.Suite, {**VALUES, "sweep": sweeps, **values}))


def rows(out: Path) -> dict[str, Any]:
    """All that is stored but clock times."""
    found = {}
    for path in sorted((out / "cells").rglob("*.json")):
        stored = json.loads(path.read_text())
        row = {key: value for key, value in stored["row"].items() if not key.startswith("seconds")}
        found[path.relative_to(out).as_posix()] = {**stored, "row": row, "seconds": None}
    return found
