"""A method's own account of itself, whatever it consists of: numbers, curves, heat maps, tables and pictures."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedbicross.report.figures import line_chart
from fedbicross.report.grids import WIDTH, heatmap
from fedbicross.report.text import mapping, plain, sequence, short

LARGEST_IMAGE = 2_000_000
PNG = b"\x89PNG\r\n\x1a\n"
URI = "data:image/png;base64,"
ROWS = 200  # of a table; more belongs into a file


def diagnosis(found: object, run_dir: Path | None) -> dict[str, Any]:
    """Everything under a row's ``diagnosis``, drawn; kinds that are absent or malformed are left out."""
    parts = mapping(found)
    charts = [
        *((title, _curves(title, entry)) for title, entry in mapping(parts.get("curves")).items()),
        *((title, _heatmap(title, entry)) for title, entry in mapping(parts.get("heatmaps")).items()),
        *((title, _over_time(title, entry)) for title, entry in mapping(parts.get("heatmaps_over_time")).items()),
    ]
    return {
        "scalars": [(short(name, 60), plain(value)) for name, value in mapping(parts.get("scalars")).items()],
        "charts": [(short(title, 120), chart) for title, chart in charts if chart],
        "tables": [_table(title, entry) for title, entry in mapping(parts.get("tables")).items()],
        "strips": [_strip(title, entry, run_dir) for title, entry in mapping(parts.get("image_strips")).items()],
    }


def _curves(title: str, entry: Mapping[str, Any]) -> str:
    entry = mapping(entry)
    xs = sequence(entry.get("x"))
    series = [(name, xs, sequence(ys)) for name, ys in mapping(entry.get("series")).items()]
    return line_chart(series, short(entry.get("xlabel") or ""), short(entry.get("ylabel") or ""), title, width=WIDTH)


def _heatmap(title: str, entry: Mapping[str, Any]) -> str:
    entry = mapping(entry)
    return heatmap(
        sequence(entry.get("values")), sequence(entry.get("rows")), sequence(entry.get("columns")), short(title, 120)
    )


def _over_time(title: str, entry: Mapping[str, Any]) -> str:
    entry = mapping(entry)
    times = [plain(x) for x in sequence(entry.get("x"))]
    return heatmap(sequence(entry.get("values")), sequence(entry.get("rows")), times, short(title, 120))


def _table(title: str, entry: object) -> dict[str, Any]:
    parts = mapping(entry)
    rows = [sequence(row) for row in sequence(parts.get("rows"))]
    return {
        "title": short(title, 120),
        "columns": [short(column) for column in sequence(parts.get("columns"))],
        "words": [_wordy(rows, index) for index in range(max(map(len, rows), default=0))],
        "rows": [[plain(value) for value in row] for row in rows[:ROWS]],
        "left_out": max(len(rows) - ROWS, 0),
    }


def _wordy(rows: list[list[Any]], index: int) -> bool:
    """Whether a column holds words, which stand to the left, numbers to the right."""
    return any(isinstance(row[index], str) for row in rows if index < len(row))


def _strip(title: str, entry: object, run_dir: Path | None) -> dict[str, Any]:
    parts = mapping(entry)
    uri, reason = image_uri(run_dir, parts.get("images"))
    return {
        "title": short(title, 120),
        "rows": [short(name, 24) for name in sequence(parts.get("rows"))[:40]],
        "columns": [short(name, 24) for name in sequence(parts.get("columns"))[:40]],
        "uri": uri,
        "width": _shown_width(uri),
        "reason": reason,
    }


def image_uri(run_dir: Path | None, name: object) -> tuple[str | None, str]:
    """A PNG of the run folder as a data: URI, or None and why not. Results may come from strangers: no path escapes."""
    if run_dir is None or not isinstance(name, str) or not name:
        return None, "no picture was stored"
    try:
        root = run_dir.resolve()
        path = (root / name).resolve()
        if not path.is_relative_to(root):
            return None, "the picture lies outside the run folder"
        if not path.is_file():
            return None, "the picture is not in the run folder"
        if path.stat().st_size >= LARGEST_IMAGE:
            return None, "the picture is larger than 2 MB"
        data = path.read_bytes()
    except (OSError, ValueError, RuntimeError):
        return None, "the picture cannot be read"
    if not data.startswith(PNG) or len(data) >= LARGEST_IMAGE:
        return None, "the picture is not a PNG"
    return URI + base64.b64encode(data).decode("ascii"), ""


def _shown_width(uri: str | None) -> int:
    """A whole multiple of the picture's width (bytes 16 to 19 of a PNG) that fits the page: pixels stay square."""
    if uri is None:
        return 0
    width = int.from_bytes(base64.b64decode(uri[len(URI) : len(URI) + 32])[16:20], "big")
    return width * max(1, min(6, 760 // width)) if 0 < width < 100_000 else 760
