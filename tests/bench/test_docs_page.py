"""What the documentation makes of stored cells. `tests/docs` hides the package `docs`, hence the other process."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
import sys
from pathlib import Path
from docs import benched, stored
root = Path(sys.argv[1])
benched.suites = lambda: ["smoke"]
print(benched.overview("", root / "docs" / "results.md", root))
print(benched.primum_ingredients("", root / "docs" / "methods" / "primum.md", root))
for path, text in benched.page(root).items():
    path.write_text(text)
print(stored.results("", root / "results" / "README.md", root))
"""
PRIMUM = """
import sys
from pathlib import Path
from docs import benched
root = Path(sys.argv[1])
for block, how in ((benched.primum_cells, ""), (benched.primum_means, "short")):
    print(block(how, root / "docs" / "methods" / "primum.md", root))
"""


def made(root: Path, code: str = CODE) -> str:
    (root / "docs").mkdir(parents=True, exist_ok=True)
    (root / "configs").mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", code, str(root)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_block_and_the_page_of_stored_cells(smoke: Path, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    text = made(tmp_path)
    assert text.startswith("No cells are stored yet") and "No cells are stored. Made by" in text
    assert not (tmp_path / "docs" / "table.html").exists()
    shutil.copytree(smoke / "cells", tmp_path / "results" / "bench" / "cells")
    text = made(tmp_path)
    assert text.startswith('33 cells. Pictures, all numbers and the raw files: <a href="table.html">')
    assert "| gain over training alone, points | α = 0.3, N = 2 | IID, N = 2 | α = 0.3, N = 3 |" in text
    line = re.search(r"\| `fedisca` \|(.*)\|", text)
    assert line and line[1].count("±") == 2 and line[1].endswith("|  "), "not run with three hospitals"
    assert "`bench/cells/` | 33 cells" in text, "and no cell by itself"
    page = (tmp_path / "docs" / "table.html").read_text(encoding="utf-8")
    links = re.findall(r'href="([^"#]+\.json)"', page)
    assert len(links) == 33 and all((tmp_path / "docs" / link).is_file() for link in links)


def row(method: str, right: list[float], won: int, lost: int) -> dict[str, Any]:
    """Two hospitals with so many of their own patients right; everybody's are half of that."""
    mean = {"matched": sum(right) / 2, "global": sum(right) / 4, "label_set": 0.5}
    clients = [{"accuracy": {"matched": share}, "against_alone": {"won": won, "lost": lost}} for share in right]
    kept = {"method": method, "alone": "local_only", "clients": clients, "clearly_harmed_clients": 0}
    settings = {"pool": 25, "steps": 500, "steps_distil": 6000}
    return {**kept, "accuracy": mean, "accuracy_weighted": mean, "settings": settings}


@pytest.mark.slow
def test_means_and_counts_of_primum_are_those_of_its_cells(tmp_path: Path) -> None:
    assert made(tmp_path, PRIMUM).startswith("No cells are stored.")
    folder = tmp_path / "results" / "primum"
    folder.mkdir(parents=True)
    for seed, shift in ((0, 0.0), (1, 0.2)):
        rows = [row(name, [0.5, 0.7], 0, 0) for name in ("local_only", "ensemble:consensus", "primum:student")]
        rows += [row("local_only:both", [0.6, 0.6], 0, 0), row("primum", [0.4 + shift, 0.8], seed, 1 - seed)]
        made_by = {"rows": rows, "versions": {"device": "a GPU", "torch": "2"}}
        (folder / f"bloodmnist-0.1-2-{seed}.json").write_text(json.dumps(made_by))
    text = made(tmp_path, PRIMUM)
    cells = [line for line in text.splitlines() if "bloodmnist-0.1-2-" in line]
    assert cells[0].endswith(
        "| 25 × 500, 6000 | 60.0 | 60.0 | 60.0 | 60.0 | 60.0 | 30.0 | 30.0 | 30.0 | 30.0 | 50.0 | 1 / 2 / 0 |"
    )
    assert cells[1].endswith("| 70.0 | 60.0 | 70.0 | 30.0 | 30.0 | 30.0 | 35.0 | 50.0 | 0 / 0 / 0 |")
    assert "| BloodMNIST, α = 0.1 | 2 | 2 | 60.0 | 65.0 | 30.0 | 32.5 | 30.0 | 30.0 | 1 / 0 of 4 |" in text
