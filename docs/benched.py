"""The page and the blocks that are made of the stored cells of `fedbicross bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

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


def _of_primum(root: Path) -> list[CellStatus]:
    return [s for s in bench_table.stored_cells(["primum"], cells_in(root))[1] if s.stored is not None]


def _row(status: CellStatus) -> Mapping[str, Any]:
    assert status.stored is not None
    row: Mapping[str, Any] = status.stored["row"]
    return row


def primum_ingredients(_: str, page: Path, root: Path) -> str:
    """The student without one ingredient at a time, on everybody's patients; differences are of the same seeds."""
    del page
    found = [s for s in _of_primum(root) if s.cell.sweep == "ingredients" and not s.cell.is_alone]
    accuracy: dict[str, dict[int, float]] = {}
    for status in found:
        accuracy.setdefault(status.cell.spec, {})[status.cell.seed] = 100 * _row(status)["accuracy"]["global"]
    whole = accuracy.get("primum", {})
    notes = METHODS["primum"].variant_notes
    lines = []
    for name, by_seed in accuracy.items():
        less = [value - whole[seed] for seed, value in by_seed.items() if seed in whole]
        what = notes.get(name.partition(":")[2], "the whole method").removeprefix("ablation: ")
        difference = "" if name == "primum" or not less else f"{fmean(less):+.1f}".replace("-", "−")
        lines.append((f"`{name}`", what, len(by_seed), f"{fmean(by_seed.values()):.1f}", difference))
    titles = ("variant", "what is taken away", "seeds", "student, everybody's patients %", "difference")
    return f"{table(titles, lines, 'llrrr')}\n\n{_made_by(found)}"


def primum_default_length(_: str, page: Path, root: Path) -> str:
    """Cells of the suite `primum` whose three models are there: own patients, and everybody's."""
    del page
    federations: dict[str, dict[str, CellStatus]] = {}
    for status in _of_primum(root):
        federations.setdefault(status.cell.federation, {})[status.cell.method] = status
    shown, lines = [], []
    for cells in federations.values():
        needed = {"primum", "primum:student", "ensemble:consensus"}
        if not needed <= set(cells) or not set(cells["primum"].cell.alone) <= set(cells):
            continue
        shown += cells.values()
        rows, cell = {method: _row(status) for method, status in cells.items()}, cells["primum"].cell
        accuracy = {method: row["accuracy"] for method, row in rows.items()}
        better = max((accuracy[name] for name in cell.alone), key=lambda one: one["matched"])
        both, ours = accuracy["local_only:both"], accuracy["primum"]
        own = [one["matched"] for one in (better, both, ours)]
        others = accuracy["ensemble:consensus"], accuracy["primum:student"], ours
        percent = [f"{100 * value:.1f}" for value in (*own, better["global"], *(one["global"] for one in others))]
        pairs = zip(rows["local_only:both"]["clients"], rows["primum"]["clients"], strict=True)
        lower = sum((b["accuracy"]["matched"] or 0) > (p["accuracy"]["matched"] or 0) for b, p in pairs)
        skew = "IID" if cell.alpha is None else f"α = {cell.alpha:g}"
        counts = f"{lower} / {rows['primum']['clearly_harmed_clients']}"
        lines.append((f"{cell.title}, {skew}", cell.clients, cell.seed, *percent, counts))
    names = [f"own patients: {name} %" for name in ("the better alone", "`local_only:both`", "`primum`")]
    everybody = ("the better alone", "`ensemble:consensus`", "`primum:student`", "`primum`")
    titles = ("data", "N", "seed", *names, *(f"everybody's: {name} %" for name in everybody), "lower / harmed")
    return f"{table(titles, lines, 'l' + 'r' * 10)}\n\n{_made_by(shown)}"


def _made_by(found: Sequence[CellStatus]) -> str:
    files = [status.stored for status in found if status.stored is not None]
    networks = ", ".join(dict.fromkeys(status.cell.models for status in found))
    machines = "; ".join(dict.fromkeys(f"{one['device']}, torch {one['versions']['torch']}" for one in files))
    made = "Made by `fedbicross bench run primum`; raw results in `results/bench/cells/primum`."
    return f"{networks}; {machines}. {made}" if files else f"No cells are stored. {made}"
