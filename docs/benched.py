"""The page and the blocks that are made of the stored cells of `fedbicross bench`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from docs.parts import link, table
from fedbicross.bench import publish
from fedbicross.bench import table as bench_table
from fedbicross.bench.cells import CellStatus, file_of
from fedbicross.bench.suite import builtin
from fedbicross.bench.table import Group, gain_text
from fedbicross.methods import METHODS

PAGE = "table.html"  # in docs/
ALONE = ("local_only", "local_only:balanced", "local_only:both")
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


Columns = Mapping[str, tuple[str, str, str]]  # method, kind of accuracy and protocol of each


@dataclass(frozen=True)
class PrimumCell:
    """primum on one federation, beside training alone and its teacher."""

    title: str
    skew: str
    seed: int
    rows: Mapping[str, Mapping[str, Any]]  # by method
    file: Path
    machine: str

    @property
    def clients(self) -> int:
        """N."""
        return len(self.rows["primum"]["clients"])

    @property
    def length(self) -> str:
        """How much the server computed."""
        settings = self.rows["primum"]["settings"]
        return f"{settings['pool']} × {settings['steps']}, {settings['steps_distil']}"

    def numbers(self, columns: Columns) -> list[float]:
        """In percent."""
        rows = {**self.rows, "the better alone": self.rows[self.rows["primum"]["alone"]]}
        return [100 * rows[method][kind][protocol] for method, kind, protocol in columns.values()]

    def counts(self) -> tuple[int, int, int]:
        """Hospitals with fewer right answers than by `local_only:both`, than by the better alone, and harmed ones."""
        own, ours = (self.rows[name]["clients"] for name in ("local_only:both", "primum"))
        pairs = [(b["accuracy"]["matched"], p["accuracy"]["matched"]) for b, p in zip(own, ours, strict=True)]
        lower = sum(after is not None and after < before for before, after in pairs)
        against = [client["against_alone"] for client in ours if client["against_alone"]]
        return lower, sum(one["lost"] > one["won"] for one in against), self.rows["primum"]["clearly_harmed_clients"]


PRIMUM_IN_FULL: Columns = {
    "own patients: the better alone %": ("the better alone", "accuracy", "matched"),
    "`local_only:both` %": ("local_only:both", "accuracy", "matched"),
    "`primum` %": ("primum", "accuracy", "matched"),
    "weighted by images: `local_only:both` %": ("local_only:both", "accuracy_weighted", "matched"),
    "`primum`, weighted %": ("primum", "accuracy_weighted", "matched"),
    "everybody's patients: the better alone %": ("the better alone", "accuracy", "global"),
    "`ensemble:consensus` %": ("ensemble:consensus", "accuracy", "global"),
    "`primum:student` %": ("primum:student", "accuracy", "global"),
    "`primum`, everybody's %": ("primum", "accuracy", "global"),
    "`primum`, classes that it has %": ("primum", "accuracy", "label_set"),
}
PRIMUM_IN_SHORT: Columns = {
    "own patients: alone %": ("local_only:both", "accuracy", "matched"),
    "with `primum` %": ("primum", "accuracy", "matched"),
    "everybody's patients: alone %": ("local_only:both", "accuracy", "global"),
    "`primum` there %": ("primum", "accuracy", "global"),
    "its student %": ("primum:student", "accuracy", "global"),
    "all networks together %": ("ensemble:consensus", "accuracy", "global"),
}


def _by_benchmark(root: Path) -> list[PrimumCell]:
    """Cells of `python -m benchmarks.primum`."""
    titles, found = {"bloodmnist": "BloodMNIST", "kermany_cxr_224": "Chest X-rays"}, []
    for file in sorted((root / "results" / "primum").glob("*-*-*-*.json")):
        made = json.loads(file.read_text(encoding="utf-8"))
        data, alpha, _, seed = file.stem.split("-")
        rows = {row["method"]: row for row in made["rows"]}
        machine = f"{made['versions']['device']}, torch {made['versions']['torch']}"
        found.append(PrimumCell(titles[data], f"α = {alpha}", int(seed), rows, file, machine))
    return found


def _by_suite(root: Path) -> list[PrimumCell]:
    """Cells of the suite `primum` whose three models are there."""
    federations: dict[str, dict[str, CellStatus]] = {}
    for status in _of_primum(root):
        federations.setdefault(status.cell.federation, {})[status.cell.method] = status
    found = []
    for cells in federations.values():
        if {"primum", "primum:student", "ensemble:consensus", *ALONE} <= set(cells):
            rows, cell = {method: _row(status) for method, status in cells.items()}, cells["primum"].cell
            skew = "IID" if cell.alpha is None else f"α = {cell.alpha:g}"
            file, machine = file_of(cells_in(root), cell), _machines([cells["primum"]])
            found.append(PrimumCell(cell.title, skew, cell.seed, rows, file, machine))
    return found


def _primum_cells(root: Path) -> list[PrimumCell]:
    return sorted(_by_benchmark(root) + _by_suite(root), key=lambda one: (one.title, one.skew, one.clients, one.seed))


def primum_cells(_: str, page: Path, root: Path) -> str:
    """primum on every federation that is stored."""
    lines: list[tuple[object, ...]] = []
    found = _primum_cells(root)
    for one in found:
        name = f"[{one.title}, {one.skew}]({link(one.file, page)})"
        numbers = (f"{value:.1f}" for value in one.numbers(PRIMUM_IN_FULL))
        lines.append((name, one.clients, one.seed, one.length, *numbers, " / ".join(map(str, one.counts()))))
    if not found:
        return "No cells are stored. Made by `fedbicross bench run primum`."
    titles = ("data", "N", "seed", "images, student", *PRIMUM_IN_FULL, "lower / than the better / harmed")
    machines = "; ".join(dict.fromkeys(one.machine for one in found))
    return f"{table(titles, lines, 'l' + 'r' * (len(titles) - 1))}\n\nResNet-18, {machines}."


def primum_means(how: str, page: Path, root: Path) -> str:
    """Means over seeds of `primum_cells`; `short` for fewer columns."""
    del page
    groups: dict[tuple[object, ...], list[PrimumCell]] = {}
    for one in _primum_cells(root):
        groups.setdefault((f"{one.title}, {one.skew}", one.clients, one.length), []).append(one)
    columns = PRIMUM_IN_SHORT if how == "short" else PRIMUM_IN_FULL
    lines: list[tuple[object, ...]] = []
    for (name, clients, length), group in groups.items():
        means = (f"{fmean(values):.1f}" for values in zip(*(one.numbers(columns) for one in group), strict=True))
        lower, than_better, harmed = (sum(values) for values in zip(*(one.counts() for one in group), strict=True))
        counts = (lower, harmed) if how == "short" else (lower, than_better, harmed)
        counted = f"{' / '.join(map(str, counts))} of {sum(one.clients for one in group)}"
        lines.append((name, clients, *(() if how == "short" else (length,)), len(group), *means, counted))
    titles = (
        ("mean of", "hospitals", "seeds", *columns, "lower / harmed")
        if how == "short"
        else ("mean of", "N", "images, student", "seeds", *columns, "lower / than the better / harmed")
    )
    return table(titles, lines, "l" + "r" * (len(titles) - 1))


def _machines(found: Sequence[CellStatus]) -> str:
    files = [status.stored for status in found if status.stored is not None]
    return "; ".join(dict.fromkeys(f"{one['device']}, torch {one['versions']['torch']}" for one in files))


def _made_by(found: Sequence[CellStatus]) -> str:
    networks = ", ".join(dict.fromkeys(status.cell.models for status in found))
    made = "Made by `fedbicross bench run primum`; raw results in `results/bench/cells/primum`."
    return f"{networks}; {_machines(found)}. {made}" if found else f"No cells are stored. {made}"
