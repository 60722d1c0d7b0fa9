"""What the makers of generated blocks share: tables, links, and stored results."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = Iterable[object]


def table(header: Row, rows: Iterable[Row], align: str = "") -> str:
    """A Markdown table; ``align`` holds one letter (l or r) a column."""
    titles = list(header)
    rule = ["---:" if align[i : i + 1] == "r" else ":---" for i in range(len(titles))]
    lines = [titles, rule, *([str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def link(target: Path, page: Path) -> str:
    """The way from a page to a file."""
    return Path(os.path.relpath(target, page.parent)).as_posix()


def load(run: str, root: Path) -> dict[str, Any]:
    """The raw results of a stored run."""
    found: dict[str, Any] = json.loads((root / "results" / run / "results.json").read_text(encoding="utf-8"))
    return found


def read_stored(root: Path, name: str) -> tuple[Path, dict[str, Any]]:
    """A stored file below results/, and the JSON in it."""
    file = root / "results" / name
    return file, json.loads(file.read_text(encoding="utf-8"))
