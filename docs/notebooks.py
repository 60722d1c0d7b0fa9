"""Notebooks of the examples, cell by cell the scripts beside them, without outputs."""

from __future__ import annotations

import re
from pathlib import Path

import jupytext
import nbformat

EXAMPLES = ("quickstart", "own_images", "own_method")


def all_notebooks(root: Path) -> dict[Path, str]:
    """The text of each notebook by its place."""
    return {root / "examples" / f"{name}.ipynb": notebook(root / "examples" / f"{name}.py") for name in EXAMPLES}


def notebook(script: Path) -> str:
    """The script's docstring as a first cell of words, then its cells (``# %%``)."""
    _, words, code = script.read_text(encoding="utf-8").split('"""', 2)
    made = jupytext.reads(code.strip(), fmt="py:percent")
    made.cells.insert(0, nbformat.v4.new_markdown_cell(re.sub("``", "`", words.strip())))
    for number, cell in enumerate(made.cells):
        cell.id = f"cell-{number}"  # by default they are drawn at random
        cell.metadata = {}
    made.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return nbformat.writes(made, version=4) + "\n"
