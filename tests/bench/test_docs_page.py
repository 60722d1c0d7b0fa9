"""What the documentation makes of stored cells. `tests/docs` hides the package `docs`, hence the other process."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
import sys
from pathlib import Path
from docs import benched, stored
root = Path(sys.argv[1])
benched.suites = lambda: ["smoke"]
print(benched.overview("", root / "docs" / "results.md", root))
for block in (benched.primum_ingredients, benched.primum_default_length):
    print(block("", root / "docs" / "methods" / "primum.md", root))
for path, text in benched.page(root).items():
    path.write_text(text)
print(stored.results("", root / "results" / "README.md", root))
"""


def made(root: Path) -> str:
    (root / "docs").mkdir(parents=True, exist_ok=True)
    (root / "configs").mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(root)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_block_and_the_page_of_stored_cells(smoke: Path, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    text = made(tmp_path)
    assert text.startswith("No cells are stored yet") and text.count("No cells are stored. Made by") == 2
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
