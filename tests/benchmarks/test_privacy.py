"""The benchmark of accuracy against ε, on a handful of drawn images, and the table made of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks import privacy
from docs import measured


def test_every_cell_is_measured_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    for split, count in (("train", 40), ("test", 10)):
        for label, bright in (("NORMAL", 60), ("PNEUMONIA", 180)):
            folder = tmp_path / "images" / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = rng.normal(bright, 30, (24, 24)).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    monkeypatch.setattr(privacy, "ENCODER", "tiny")
    monkeypatch.setattr(privacy, "EPSILONS", (100.0,))
    monkeypatch.setattr(privacy, "SEEDS", range(2))
    monkeypatch.setattr(privacy, "SITES", {"one site": (1, "iid"), "two": (2, "iid")})
    out = tmp_path / "results" / "privacy" / "cxr.json"
    given = [str(tmp_path / "images"), "--features", str(tmp_path / "kept"), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["privacy", *given])
    privacy.main()
    found = json.loads(out.read_text(encoding="utf-8"))
    assert len(found["rows"]) == 2 * 2 + 2 * 2
    assert (found["train_images"], found["test_images"]) == (80, 20)
    assert all(row["accuracy"] > 0.8 for row in found["rows"] if "epsilon" not in row["settings"])
    text = measured.privacy("cxr", tmp_path / "docs" / "page.md", tmp_path)
    assert text.count("\n| 100 | 256 |") == 1 and "none | all" in text and "2 seeds" in text
    assert measured.privacy("cxr-development", tmp_path / "docs" / "page.md", tmp_path) == "Not measured yet."
