"""The page and the blocks that are made of the stored cells of `fedbicross bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from docs.parts import table
from fedbicross.bench import publish
from fedbicross.bench import table as bench_table
from fedbicross.bench.cells import CellStatus
from fedbicross.bench.suite import builtin
from fedbicross.bench.table import Group, gain_text
from fedbicross.methods import METHODS

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
        by_group = [{line.method: line for line in group.lines if not line.ablation} for group in members]
        methods = dict.fromkeys(method for lines in by_group for method in lines)
        rows = [
            (f"`{name}`", *(gain_text(lines[name].gain) if name in lines else "" for lines in by_group))
            for name in methods
        ]
        parts += [f"**{title}** (suite `{suite}`, budget `{budget}`)"]
        parts += [table(("gain over training alone, points", *columns), rows, "l" + "r" * len(columns))]
    return "\n\n".join(parts)


def primum_ingredients(_: str, page: Path, root: Path) -> str:
    """The student without one ingredient at a time, on everybody's patients."""
    del page
    statuses = [s for s in bench_table.stored_cells(["primum"], cells_in(root))[1] if s.cell.sweep == "ingredients"]
    rows: dict[str, list[float]] = {}
    for status in statuses:
        if status.stored is not None and not status.cell.is_alone:
            rows.setdefault(status.cell.spec, []).append(100 * status.stored["row"]["accuracy"]["global"])
    whole = fmean(rows["primum"])
    notes = METHODS["primum"].variant_notes
    lines = [
        (
            f"`{name}`",
            notes.get(name.partition(":")[2], "the whole method").removeprefix("ablation: "),
            len(found),
            f"{fmean(found):.1f}",
            "" if name == "primum" else f"{fmean(found) - whole:+.1f}".replace("-", "−"),
        )
        for name, found in rows.items()
    ]
    titles = ("variant", "what is taken away", "seeds", "student, everybody's patients %", "difference")
    return f"{table(titles, lines, 'llrrr')}\n\n{_of_the_suite(statuses)}"


def primum_default_length(_: str, page: Path, root: Path) -> str:
    """Cells of the suite `primum` whose three models are there: own patients, and everybody's."""
    del page
    stored = [s for s in bench_table.stored_cells(["primum"], cells_in(root))[1] if s.stored is not None]
    found: dict[str, dict[str, CellStatus]] = {}
    for status in stored:
        found.setdefault(status.cell.federation, {})[status.cell.method] = status
    whole = [cells for cells in found.values() if {"primum", "primum:student", "ensemble:consensus"} <= set(cells)]
    lines = []
    for cells in whole:
        rows = {method: status.stored["row"] for method, status in cells.items() if status.stored is not None}
        cell = cells["primum"].cell
        shares = [rows[name]["accuracy"] for name in (*cell.alone, "ensemble:consensus", "primum:student", "primum")]
        alone, (consensus, student, ours) = shares[: len(cell.alone)], shares[len(cell.alone) :]
        both = rows["local_only:both"]
        pairs = zip(both["clients"], rows["primum"]["clients"], strict=True)
        lower = sum((b["accuracy"]["matched"] or 0) > (p["accuracy"]["matched"] or 0) for b, p in pairs)
        numbers = [
            max(one["matched"] for one in alone),
            both["accuracy"]["matched"],
            ours["matched"],
            max(one["global"] for one in alone),
            *(one["global"] for one in (consensus, student, ours)),
        ]
        skew = "IID" if cell.alpha is None else f"α = {cell.alpha:g}"
        counts = f"{lower} / {rows['primum']['clearly_harmed_clients']}"
        percent = [f"{100 * value:.1f}" for value in numbers]
        lines.append((f"{cell.title}, {skew}", cell.clients, cell.seed, *percent, counts))
    own = [f"own patients: {name} %" for name in ("the better alone", "`local_only:both`", "`primum`")]
    names = ("the better alone", "`ensemble:consensus`", "`primum:student`", "`primum`")
    titles = ("data", "N", "seed", *own, *(f"everybody's: {name} %" for name in names), "lower / harmed")
    return f"{table(titles, lines, 'l' + 'r' * 10)}\n\n{_of_the_suite(stored)}"


def _of_the_suite(statuses: Sequence[CellStatus]) -> str:
    files = [status.stored for status in statuses if status.stored is not None]
    machines = dict.fromkeys(f"{one['device']}, torch {one['versions']['torch']}" for one in files)
    cells = "`results/bench/cells/primum`"
    return f"ResNet-18, {'; '.join(machines)}. Made by `fedbicross bench run primum`; raw results in {cells}."
