"""The page and the block that are made of the stored cells of `fedbicross bench`."""

from __future__ import annotations

from pathlib import Path

from docs.parts import table
from fedbicross.bench import publish
from fedbicross.bench import table as bench_table
from fedbicross.bench.suite import builtin
from fedbicross.bench.table import Group, gain_text

PAGE = "table.html"  # in docs/
NONE = "No cells are stored yet: `fedbicross bench run ours --out results/bench` makes them."


def cells_in(root: Path) -> Path:
    """The folder of the stored cells, as `--out` wants it."""
    return root / "results" / "bench"


def suites() -> list[str]:
    """All but the one whose numbers mean nothing."""
    return [name for name in builtin() if name != "smoke"]


def page(root: Path) -> dict[Path, str]:
    """The page of all stored cells; nothing where there are none."""
    out, to = cells_in(root), root / "docs" / PAGE
    return {to: publish.render(suites(), "html", out, to)} if (out / "cells").is_dir() else {}


def overview(_: str, page: Path, root: Path) -> str:
    """What every method gains over training alone: a table for each data set, suite and budget."""
    del page
    groups = bench_table.groups(bench_table.stored_cells(suites(), cells_in(root))[1])
    if not groups:
        return NONE
    sets: dict[tuple[str, str, str], list[Group]] = {}
    for group in groups:
        if "+" not in group.models:
            sets.setdefault((group.suite, group.title, group.budget), []).append(group)
    count = sum(len(line.statuses) for group in groups for line in group.lines)
    parts = [f'{count:,} cells. Pictures, all numbers and the raw files: <a href="{PAGE}">{PAGE}</a>.']
    for (suite, title, budget), members in sets.items():
        columns = [f"{group.skew}, N = {group.clients}" for group in members]
        by_group = [{line.method: line for line in group.lines} for group in members]
        methods = dict.fromkeys(method for lines in by_group for method in lines)
        rows = [
            (f"`{name}`", *(gain_text(lines[name].gain) if name in lines else "" for lines in by_group))
            for name in methods
        ]
        parts += [f"**{title}** (suite `{suite}`, budget `{budget}`)"]
        parts += [table(("gain over training alone, points", *columns), rows, "l" + "r" * len(columns))]
    return "\n\n".join(parts)
