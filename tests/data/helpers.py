"""Small datasets and the place of the real files."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from fedbicross.data import Dataset
from fedbicross.errors import FedBiCrossError
from small import refuses

ROOT = Path(__file__).resolve().parents[2]


def real_file(name: str) -> Path:
    folder = Path(os.environ.get("FEDBICROSS_DATA") or ROOT.parent / "shared" / "data")
    if not (folder / name).is_file():
        pytest.skip(f"{folder / name} is absent (set FEDBICROSS_DATA)")
    return folder / name


def toy(n=200, n_test=60, classes=4, seed=0, patients=0, sites=0, size=4) -> Dataset:
    """Random images; patients and sites, where asked for, are dealt at random (a patient stays at one site)."""
    rng = np.random.default_rng(seed)
    names = {}
    for split, count in (("train", n), ("test", n_test)):
        person = rng.integers(max(patients, 1), size=count)
        if patients:
            names[f"{split}_patients"] = [f"{split}-{i}" for i in person]
        if sites:
            names[f"{split}_sites"] = [f"site-{i % sites}" for i in person]
    return Dataset.from_arrays(
        "toy",
        rng.integers(256, size=(n, size, size, 3), dtype=np.uint8),
        rng.integers(classes, size=n),
        rng.integers(256, size=(n_test, size, size, 3), dtype=np.uint8),
        rng.integers(classes, size=n_test),
        classes=[f"c{i}" for i in range(classes)],
        **names,
    )


def raises(code: str, words: str = ""):
    """Expect an error with this code whose message, one line, holds these words."""
    return refuses(FedBiCrossError, code, re.escape(words) or None)
