"""The page: stored cells in, one HTML file out, with nothing to fetch. Pictures first, numbers below."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from fedbicross.bench import charts
from fedbicross.bench.budgets import NOTES
from fedbicross.bench.cells import file_of
from fedbicross.bench.suite import Suite
from fedbicross.bench.table import (
    REPRODUCTION,
    Comparison,
    Group,
    Line,
    comparison_cells,
    count_text,
    gain_text,
    headlines,
    missing_data,
    p_text,
    published_for,
    published_text,
)
from fedbicross.report import html
from fedbicross.report.text import Stat, count, duration, percent_sd, size

SIGNIFICANT = 0.05


def render(
    suites: Mapping[str, Suite],
    groups: Sequence[Group],
    published: Sequence[Comparison],
    out: Path,
    to: Path | None = None,
) -> str:
    """``out`` holds the cells, ``to`` is where the page will lie: links lead from there to the raw files."""
    templates = html.environment("fedbicross.bench", "fedbicross.report")
    start = Path() if to is None else to.parent
    return templates.get_template("bench.html.j2").render(_context(suites, groups, published, out, start)) + "\n"


def _context(
    suites: Mapping[str, Suite], groups: Sequence[Group], published: Sequence[Comparison], out: Path, start: Path
) -> dict[str, Any]:
    lines = [line for group in groups for line in group.lines]
    methods = [line for line in lines if line.role == "method" and not line.ablation]
    to_choose_from = _without_ablations(groups)
    measured = [c for c in published if c.ours]
    return {
        "facts": _facts(groups, lines, methods),
        "notes": [
            note
            for name, suite in suites.items()
            if suite.note and any(g.suite == name for g in groups)
            for note in [f"{suite.title}: {suite.note}"]
        ],
        "budgets": {name: NOTES[name] for name in dict.fromkeys(group.budget for group in groups)},
        "pays": _pays(to_choose_from),
        "charts": _charts(to_choose_from),
        "strips": [
            (f"{group.name} ({group.budget})", Markup(drawing))
            for group in to_choose_from
            if (drawing := charts.client_strips(group, f"Gains by client: {group.name}"))
        ],
        "filters": _filters(groups),
        "rows": [_row(group, line, published, out, start) for group in groups for line in group.lines],
        "pairs": [(f"{group.name} ({group.budget})", _pairs(group)) for group in groups if group.pairs],
        "reproduction_header": REPRODUCTION,
        "reproduction": [(comparison_cells(c), bool(c.within)) for c in measured],
        "headlines": headlines(published),
        "not_run": _not_run(published),
        "missing": missing_data(suites, groups),
    }


def _without_ablations(groups: Sequence[Group]) -> list[Group]:
    """For charts of what methods gain: nobody would use a method without one of its parts."""
    kept = [replace(group, lines=tuple(line for line in group.lines if not line.ablation)) for group in groups]
    return [group for group in kept if any(line.role != "alone" for line in group.lines)]


def _facts(groups: Sequence[Group], lines: Sequence[Line], methods: Sequence[Line]) -> list[tuple[str, str]]:
    cells = sum(len(line.statuses) for line in lines)
    stale = sum(status.state == "stale" for line in lines for status in line.statuses)
    wins = sum((line.gain.mean or 0) > 0 for line in methods)
    beyond = sum(line.p is not None and line.p < SIGNIFICANT and (line.gain.mean or 0) > 0 for line in methods)
    devices = dict.fromkeys(device for line in lines for device in line.devices)
    return [
        ("cells", f"{cells:,}" + (f" ({stale} stale)" if stale else "")),
        ("federations", f"{len(groups):,}"),
        ("methods beat training alone", f"{wins} of {len(methods)}"),
        ("beyond chance (p < 0.05)", f"{beyond} of {len(methods)}"),
        ("made on", ", ".join(devices) or "nothing yet"),
    ]


def _pays(groups: Sequence[Group]) -> list[Markup]:
    """A picture for each suite and budget: what differs in these may not be compared."""
    sets: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        sets.setdefault((group.suite, group.budget), []).append(group)
    drawn = [_figure(f"{suite}, {budget}", charts.when_it_pays(members)) for (suite, budget), members in sets.items()]
    return [Markup(figure) for figure in drawn if figure]


def _charts(groups: Sequence[Group]) -> list[tuple[str, str, list[Markup]]]:
    """Title, a sentence, and a picture for each data set and budget."""
    colour = charts.colours(groups)
    sets: dict[tuple[str, str, str], list[Group]] = {}
    for group in groups:
        if "+" not in group.models:
            sets.setdefault((group.suite, group.title, group.budget), []).append(group)
    kinds: list[tuple[str, str, list[str]]] = [
        ("Gain against skew", "Above the line a hospital gains by taking part. Grey: all other methods.", []),
        ("Gain against the size of a hospital", "The same images dealt to more hospitals; mean over skews.", []),
        ("Accuracy against seconds", "Squares: training alone (dark) and baselines. Hollow: not federated.", []),
        ("Accuracy against bytes", "Upload and reply of one hospital.", []),
    ]
    for (suite, title, budget), members in sets.items():
        fewest = min(group.clients for group in members)
        few = [group for group in members if group.clients == fewest]
        name = f"{title}, {fewest} hospitals, {suite}, {budget}"
        kinds[0][2].append(_figure(name, charts.gains_by_skew(few, colour, f"Gain against skew: {name}")))
        every = f"{title}, {suite}, {budget}"
        kinds[1][2].append(_figure(every, charts.gains_by_size(members, colour, f"Gain against size: {every}")))
        for kind, what in ((2, "seconds"), (3, "bytes")):
            drawn = charts.accuracy_against(few, what, colour, f"Accuracy against {what}: {name}")
            kinds[kind][2].append(_figure(name, drawn))
    return [(title, words, [Markup(f) for f in figures if f]) for title, words, figures in kinds if any(figures)]


def _figure(caption: str, drawing: str) -> str:
    return (
        str(Markup("<figure><figcaption>{}</figcaption>{}</figure>").format(caption, Markup(drawing)))
        if drawing
        else ""
    )


def _filters(groups: Sequence[Group]) -> list[tuple[str, list[str]]]:
    """What can be chosen from, by the name of the rows' attribute."""
    columns: dict[str, list[str]] = {
        "data": [group.title for group in groups],
        "skew": [group.skew for group in groups],
        "hospitals": [str(group.clients) for group in groups],
        "budget": [group.budget for group in groups],
        "suite": [group.suite for group in groups],
    }
    return [(name, list(dict.fromkeys(values))) for name, values in columns.items()]


def _row(group: Group, line: Line, published: Sequence[Comparison], out: Path, start: Path) -> dict[str, Any]:
    known = published_for(group, line, published)
    accuracies = [
        (percent_sd(line.accuracy[name]), line.accuracy[name].mean) for name in ("matched", "global", "label_set")
    ]
    return {
        "attributes": {
            "data": group.title,
            "skew": group.skew,
            "hospitals": str(group.clients),
            "budget": group.budget,
            "suite": group.suite,
        },
        "method": line.method,
        "name": Markup(str(escape(line.method)).replace(":", ":<wbr>").replace("_", "_<wbr>")),
        "place": f"{group.title}, {group.skew}, N = {group.clients}; {line.budget}, {count(len(line.seeds), 'seed')}",
        "role": line.role,
        "bold": line.bold,
        "stale": line.stale,
        "loses": (line.gain.mean or 0) < 0 and line.role == "method",
        "cells": [  # text, and the number to sort by
            (gain_text(line.gain), _sort(line.gain)),
            *((shown, "" if value is None else f"{value:.6f}") for shown, value in accuracies),
            (percent_sd(line.worst), _sort(line.worst)),
            (count_text(line.harmed, line.judged), "" if line.harmed is None else str(line.harmed)),
            (count_text(line.helped, line.judged), "" if line.helped is None else str(line.helped)),
            (p_text(line.p), "" if line.p is None else f"{line.p:.6f}"),
            (duration(line.seconds.mean), _sort(line.seconds)),
            (size(line.upload.mean), _sort(line.upload)),
            (size(line.reply.mean), _sort(line.reply)),
        ],
        "budget": line.budget,
        "published": published_text(known),
        "raw": [
            (f"seed {status.cell.seed}", Path(os.path.relpath(file_of(out, status.cell), start)).as_posix())
            for status in line.statuses
        ],
        "command": line.command,
    }


def _sort(value: Stat) -> str:
    return "" if value.mean is None else f"{value.mean:.6f}"


def _pairs(group: Group) -> list[str]:
    """Which methods differ, in words; the better one first."""
    means = {line.method: line.accuracy["matched"].mean or 0.0 for line in group.lines}
    found = sorted((p, pair) for pair, p in group.pairs.items() if p < SIGNIFICANT)
    sentences = []
    for p, (one, other) in found:
        better, worse = (one, other) if means[one] >= means[other] else (other, one)
        sentences.append(f"{better} above {worse}: p {'' if p < 0.001 else '= '}{p_text(p)}")
    tested = count(len(group.pairs), "pair")
    return sentences or [f"no two methods differ beyond chance ({tested} tested)"]


def _not_run(published: Sequence[Comparison]) -> list[tuple[str, str, int]]:
    """Paper, table, and how many of its numbers no stored cell stands beside."""
    found: dict[tuple[str, str], int] = {}
    for c in published:
        if not c.ours:
            found[c.paper, c.table] = found.get((c.paper, c.table), 0) + 1
    return [(paper, table, number) for (paper, table), number in found.items()]
