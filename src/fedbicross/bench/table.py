"""From stored cells to lines of a table: a group is everything that may be compared, a line one of its methods."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbicross.bench import cells, statistics
from fedbicross.bench.cells import CellStatus
from fedbicross.bench.suite import Suite, expand, load
from fedbicross.evaluate.summary import is_alone
from fedbicross.report.tables import LATEX_ESCAPES, MARKDOWN_ESCAPES, csv_number, csv_text
from fedbicross.report.text import PROTOCOLS, Stat, duration, fixed, percent_sd, points, size, stat

WITHIN = 5.0  # points within which a published number counts as reproduced


@dataclass(frozen=True)
class Line:
    """One method of a group over its seeds. Accuracies and gains are fractions."""

    method: str
    spec: str
    role: str  # alone, baseline, method or upper_bound
    seeds: tuple[int, ...]
    gain: Stat  # matched, over the best way of training alone
    accuracy: Mapping[str, Stat]
    balanced: Mapping[str, Stat]
    worst: Stat
    harmed: int | None
    helped: int | None
    judged: int
    p: float | None  # against the best way of training alone, Holm over the methods of the group
    bold: bool
    seconds: Stat
    server_seconds: Stat
    upload: Stat
    reply: Stat
    budget: str
    stale: bool
    devices: tuple[str, ...]
    client_gains: Mapping[tuple[int, str], float]
    statuses: tuple[CellStatus, ...]

    @property
    def ablation(self) -> bool:
        """Whether it only shows what a part of a method is worth."""
        return self.statuses[0].cell.ablation

    @property
    def command(self) -> str:
        """What makes it."""
        cell = self.statuses[0].cell
        rules = [f"data={cell.data}", f"partition={cell.partition}"]
        rules += [] if cell.alpha is None else [f"alpha={cell.alpha:g}"]
        rules += [f"clients={cell.clients}", f"method={cell.method}"]
        return f"fedbicross bench run {cell.suite} --budget {cell.budget} --cells '{','.join(rules)}'"


@dataclass(frozen=True)
class Group:
    """A federation under all its seeds and a budget."""

    suite: str
    data: str
    title: str
    partition: str
    alpha: float | None
    clients: int
    models: str
    budget: str
    images: float  # training images of a client, mean
    lines: tuple[Line, ...]
    pairs: Mapping[tuple[str, str], float]

    @property
    def skew(self) -> str:
        """``IID`` or ``α = 0.1``, in words where it is neither."""
        if self.partition == "dirichlet":
            return f"α = {self.alpha:g}"
        return "IID" if self.partition == "iid" else f"{self.partition} {'' if self.alpha is None else self.alpha}"

    @property
    def partition_text(self) -> str:
        """``iid`` or ``dirichlet:0.1``, as suites write it."""
        return self.partition if self.alpha is None else f"{self.partition}:{self.alpha:g}"

    @property
    def name(self) -> str:
        """For a heading."""
        mixed = ", mixed networks" if "+" in self.models else ""
        return f"{self.title}, {self.skew}, {self.clients} hospitals{mixed}"


def stored_cells(names: Iterable[str | Path], out: Path) -> tuple[dict[str, Suite], list[CellStatus]]:
    """The suites, and every cell of theirs that is stored, under whatever budget."""
    suites: dict[str, Suite] = {}
    found: list[CellStatus] = []
    for given in names:
        name, suite = load(given)
        suites[name] = suite
        folder = out / "cells" / name
        for budget in sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else ():
            statuses = (cells.status_of(cell, out) for cell in expand(name, suite, budget))
            found += [status for status in statuses if status.stored is not None]
    return suites, found


def groups(statuses: Sequence[CellStatus]) -> list[Group]:
    """What may be compared with what: in the order of the suites and their data, then by hospitals and skew."""
    found: dict[tuple[Any, ...], list[CellStatus]] = {}
    for status in statuses:
        c = status.cell
        key = (c.suite, c.budget, c.data, c.partition, c.alpha, c.clients, c.models)
        found.setdefault(key, []).append(status)
    names = list(dict.fromkeys((suite, budget, data) for suite, budget, data, *_ in found))

    def place(group: Group) -> tuple[int, int, str, float]:
        alpha = math.inf if group.alpha is None else group.alpha
        return names.index((group.suite, group.budget, group.data)), group.clients, group.models, alpha

    return sorted((_group(members) for members in found.values()), key=place)


def _row(status: CellStatus) -> Mapping[str, Any]:
    assert status.stored is not None
    row: Mapping[str, Any] = status.stored["row"]
    return row


def _group(statuses: Sequence[CellStatus]) -> Group:
    cell = statuses[0].cell
    pairable = [status for status in statuses if not status.other_images]
    bars = _bars(pairable)
    by_method: dict[str, list[CellStatus]] = {}
    for status in statuses:
        by_method.setdefault(status.cell.method, []).append(status)
    same = {method: [status for status in pairable if status.cell.method == method] for method in by_method}
    gains = {method: _gains(members, bars) for method, members in same.items()}
    clients = {method: _client_values(members, bars) for method, members in same.items()}
    judged = {method: p for method in by_method if (p := _p_alone(by_method[method], clients[method])) is not None}
    adjusted = statistics.holm(judged)
    ranked = {m: list(g.values()) for m, g in gains.items() if _role(by_method[m][0]) != "upper_bound" and g}
    best = statistics.clearly_best(ranked)
    compared = {m: _accuracies(same[m]) for m, members in by_method.items() if _role(members[0]) != "upper_bound"}
    images = stat(entry["num_samples"] for status in statuses for entry in (status.stored or {})["clients"])
    return Group(
        cell.suite,
        cell.data,
        cell.title,
        cell.partition,
        cell.alpha,
        cell.clients,
        cell.models,
        cell.budget,
        images.mean or 0.0,
        tuple(
            _line(members, gains[method], clients[method], adjusted.get(method), method == best)
            for method, members in by_method.items()
        ),
        statistics.pairwise(compared),
    )


def _bars(statuses: Sequence[CellStatus]) -> dict[int, Mapping[str, Any]]:
    """The best way of training alone of each seed: its row. Chosen by the test images, which makes the bar higher."""
    bars: dict[int, Mapping[str, Any]] = {}
    for status in statuses:
        row = _row(status)
        value = row["accuracy"]["matched"]
        if is_alone(status.cell.spec) and value is not None:
            before = bars.get(status.cell.seed)
            if before is None or value > before["accuracy"]["matched"]:
                bars[status.cell.seed] = row
    return bars


def _gains(statuses: Sequence[CellStatus], bars: Mapping[int, Mapping[str, Any]]) -> dict[int, float]:
    """By seed, of the mean over clients."""
    found = {}
    for status in statuses:
        value, bar = _row(status)["accuracy"]["matched"], bars.get(status.cell.seed)
        if value is not None and bar is not None:
            found[status.cell.seed] = value - bar["accuracy"]["matched"]
    return found


def _accuracies(statuses: Sequence[CellStatus]) -> dict[tuple[int, str], float]:
    """By seed and client."""
    return {
        (status.cell.seed, client["client"]): client["accuracy"]["matched"]
        for status in statuses
        for client in _row(status)["clients"]
        if client["accuracy"]["matched"] is not None
    }


def _client_values(
    statuses: Sequence[CellStatus], bars: Mapping[int, Mapping[str, Any]]
) -> dict[tuple[int, str], float]:
    """Gains by seed and client."""
    own = {
        (seed, client["client"]): client["accuracy"]["matched"]
        for seed, bar in bars.items()
        for client in bar["clients"]
        if client["accuracy"]["matched"] is not None
    }
    return {key: value - own[key] for key, value in _accuracies(statuses).items() if key in own}


def _p_alone(statuses: Sequence[CellStatus], values: Mapping[tuple[int, str], float]) -> float | None:
    return None if _role(statuses[0]) in ("alone", "upper_bound") else statistics.wilcoxon(list(values.values()))


def _role(status: CellStatus) -> str:
    return "alone" if is_alone(status.cell.spec) else str(_row(status)["role"])


def _line(
    statuses: Sequence[CellStatus],
    gains: Mapping[int, float],
    clients: Mapping[tuple[int, str], float],
    p: float | None,
    bold: bool,
) -> Line:
    rows = [_row(status) for status in statuses]
    everyone = [client for row in rows for client in row["clients"]]
    judged = [client for client in everyone if client.get("clearly_harmed") is not None]
    role = _role(statuses[0])
    measured = bool(judged) and role != "alone"
    return Line(
        statuses[0].cell.method,
        statuses[0].cell.spec,
        role,
        tuple(status.cell.seed for status in statuses),
        stat(gains.values()),
        {protocol: stat(row["accuracy"][protocol] for row in rows) for protocol in PROTOCOLS},
        {protocol: stat(row["balanced_accuracy"][protocol] for row in rows) for protocol in PROTOCOLS},
        stat(row["worst_client"]["matched"]["accuracy"] for row in rows),
        sum(client["clearly_harmed"] for client in judged) if measured else None,
        sum(client["clearly_helped"] for client in judged) if measured else None,
        len(judged),
        p,
        bold,
        stat(row["seconds"] for row in rows),
        stat(row["seconds_by_stage"].get("fuse") for row in rows),
        stat(row["upload_bytes"] / row["num_clients"] for row in rows),
        stat(row["reply_bytes"] / row["num_clients"] for row in rows),
        statuses[0].cell.budget,
        any(status.state == "stale" for status in statuses),
        tuple(dict.fromkeys(str((status.stored or {}).get("device")) for status in statuses)),
        clients,
        tuple(statuses),
    )


# --- what papers report ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """A published number beside ours. ``ours`` is empty where no cell is stored."""

    paper: str
    table: str
    page: int | None
    data: str
    skew: str
    clients: int
    mixed: bool
    method: str
    metric: str
    protocol: str | None
    published: float  # percent
    budget: str
    seeds: int
    ours: Mapping[str, float]  # percent, by protocol
    within: tuple[str, ...]  # protocols under which it is within 5 points
    reason: str


def comparisons(
    suites: Mapping[str, Suite], found: Sequence[Group], reasons: Sequence[Mapping[str, Any]] = ()
) -> list[Comparison]:
    """Every published number of these suites beside the suite's own cells on the same federation, once a budget.

    Cells of other suites have other client training and are no reproduction, however near they come.
    """
    lines: dict[tuple[str, str, str, int, bool, str], list[Line]] = {}
    for group in found:
        for line in group.lines:
            key = (group.suite, group.data, group.partition_text, group.clients, "+" in group.models, line.method)
            lines.setdefault(key, []).append(line)
    out = []
    for name, suite in suites.items():
        for table in suite.published:
            for method, values in table.rows.items():
                for column, value in zip(table.columns, values, strict=True):
                    data, skew, clients = column.split()
                    mixed = bool(table.client_models)
                    parts = [lines.get((name, data, part, int(clients), mixed, method), []) for part in skew.split("+")]
                    place = (suite.paper or name, table.table, table.page, data, skew, int(clients), mixed, method)
                    what = (table.metric, table.protocol, value)
                    made = _same_budget(parts)
                    if not made or table.metric not in MEASURED:
                        out.append(Comparison(*place, *what, "", 0, {}, (), ""))
                        continue
                    for budget, members in made.items():
                        ours = _ours(members, table.metric, table.protocol)
                        within = tuple(p for p, mine in ours.items() if abs(mine - value) <= WITHIN)
                        reason = "" if within else _reason(reasons, name, table.table, data, skew, method, budget)
                        seeds = min(len(line.seeds) for line in members)
                        out.append(Comparison(*place, *what, budget, seeds, ours, within, reason))
    return out


MEASURED = ("accuracy", "balanced_accuracy")


def _same_budget(parts: Sequence[Sequence[Line]]) -> dict[str, list[Line]]:
    """By budget one line for each part of a mean; only where none is missing or there twice, with two networks."""
    budgets = dict.fromkeys(line.budget for part in parts for line in part)
    found = {budget: [[line for line in part if line.budget == budget] for part in parts] for budget in budgets}
    return {b: [line for (line,) in members] for b, members in found.items() if all(len(m) == 1 for m in members)}


def headlines(found: Sequence[Comparison]) -> list[str]:
    """How many published numbers are reproduced: each counts once a budget, and those of unknown protocol apart."""
    out = []
    for budget in dict.fromkeys(c.budget for c in found if c.ours):
        for known, words in (
            (True, ""),
            (False, " under at least one of three protocols (the paper does not say which)"),
        ):
            numbers = [c for c in found if c.ours and c.budget == budget and (c.protocol is not None) == known]
            hits = sum(bool(c.within) for c in numbers)
            if numbers:
                out.append(
                    f"budget {budget}: {hits} of {len(numbers)} published numbers within {WITHIN:g} points{words}"
                )
    return out


def _ours(lines: Sequence[Line], metric: str, protocol: str | None) -> dict[str, float]:
    """Percent by protocol, the mean over these lines."""
    found = {}
    for name in PROTOCOLS if protocol is None else (protocol,):
        values = [(line.balanced if metric == "balanced_accuracy" else line.accuracy)[name].mean for line in lines]
        mean = stat(values)
        if mean.mean is not None and mean.count == len(lines):
            found[name] = 100 * mean.mean
    return found


def _reason(reasons: Sequence[Mapping[str, Any]], suite: str, *place: str) -> str:
    """The first reason whose fields fit; a field that it leaves out fits anything."""
    facts = dict(zip(("suite", "table", "data", "partition", "method", "budget"), (suite, *place), strict=True))
    for reason in reasons:
        if all(facts[key] == value for key, value in reason.items() if key in facts):
            return str(reason["reason"])
    return ""


# --- text ------------------------------------------------------------------------------------------------

HEADER = (
    "method",
    "gain over alone",
    "matched %",
    "global %",
    "label-set %",
    "worst client %",
    "harms",
    "helps",
    "p (Holm)",
    "seconds",
    "upload",
    "reply",
    "seeds",
    "budget",
    "published %",
)


def gain_text(value: Stat) -> str:
    """``+1.2 ± 0.3`` points."""
    return points(value.mean) + ("" if value.sd is None else f" ± {fixed(100 * value.sd)}")


def p_text(value: float | None) -> str:
    """Three digits, or what they would hide."""
    return "" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def count_text(number: int | None, judged: int) -> str:
    """``3 of 15``."""
    return "" if number is None else f"{number} of {judged}"


def published_text(values: Sequence[Comparison]) -> str:
    """``87.99 (FedISCA, Table 1)`` for each paper that has the number."""
    return "; ".join(dict.fromkeys(f"{c.published:.2f} ({c.paper}, Table {c.table})" for c in values))


def published_for(group: Group, line: Line, found: Sequence[Comparison]) -> list[Comparison]:
    """What papers report for a line."""
    place = (group.data, group.partition_text, group.clients, "+" in group.models, line.method)
    return [c for c in found if (c.data, c.skew, c.clients, c.mixed, c.method) == place]


def line_cells(group: Group, line: Line, found: Sequence[Comparison]) -> list[str]:
    """In the order of ``HEADER``."""
    return [
        line.method + (" (stale)" if line.stale else ""),
        gain_text(line.gain),
        *(percent_sd(line.accuracy[protocol]) for protocol in ("matched", "global", "label_set")),
        percent_sd(line.worst),
        count_text(line.harmed, line.judged),
        count_text(line.helped, line.judged),
        p_text(line.p),
        duration(line.seconds.mean),
        size(line.upload.mean),
        size(line.reply.mean),
        str(len(line.seeds)),
        line.budget,
        published_text(published_for(group, line, found)),
    ]


def missing_data(suites: Mapping[str, Suite], found: Sequence[Group]) -> list[str]:
    """Data of these suites of which no cell is stored: not at hand where the cells were made, or not made yet."""
    there = {(group.suite, group.data) for group in found}
    begun = {group.suite for group in found}
    return list(
        dict.fromkeys(
            entry.title or data
            for name, suite in suites.items()
            for data, entry in suite.data.items()
            if name in begun and (name, data) not in there
        )
    )


def markdown(found: Sequence[Group], published: Sequence[Comparison], missing: Sequence[str] = ()) -> str:
    """A heading and a table for each group, then the published numbers."""
    parts = []
    rule = [":---", *["---:"] * 11, *[":---"] * 3]
    for group in found:
        parts += [f"### {group.name} ({group.suite})\n", _md(HEADER), _md(rule)]
        for line in group.lines:
            texts = [text.translate(MARKDOWN_ESCAPES) for text in line_cells(group, line, published)]
            if line.bold:
                texts[:2] = [f"**{text}**" for text in texts[:2]]
            parts.append(_md(texts))
        parts.append("")
    measured = [c for c in published if c.ours]
    if measured:
        parts += ["### Published numbers\n", *(f"- {text}" for text in headlines(published)), ""]
        parts += [_md(REPRODUCTION), _md([":---"] * len(REPRODUCTION))]
        parts += [_md(text.translate(MARKDOWN_ESCAPES) for text in comparison_cells(c)) for c in measured]
        parts.append("")
    if missing:
        parts.append(f"Not available here, or not made yet: {', '.join(missing)}.".translate(MARKDOWN_ESCAPES))
    return "\n".join(parts).rstrip("\n") + "\n" if parts else "No cells are stored.\n"


REPRODUCTION = (
    "paper",
    "table",
    "federation",
    "method",
    "published %",
    "ours %",
    "budget",
    "within 5 points",
    "reason",
)


def comparison_cells(c: Comparison) -> list[str]:
    """In the order of ``REPRODUCTION``."""
    where = f"{c.table}" + (f", p. {c.page}" if c.page else "")
    mixed = ", mixed networks" if c.mixed else ""
    ours = ", ".join(f"{value:.1f} {name.replace('_', '-')}" for name, value in c.ours.items())
    yes = f"yes ({', '.join(name.replace('_', '-') for name in c.within)})" if c.within else "no"
    return [
        c.paper,
        where,
        f"{c.data} {c.skew} N={c.clients}{mixed}",
        c.method,
        f"{c.published:.2f}" + (" balanced" if c.metric == "balanced_accuracy" else ""),
        f"{ours} ({c.seeds} seed{'' if c.seeds == 1 else 's'})",
        c.budget,
        yes,
        c.reason,
    ]


def _md(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def latex(found: Sequence[Group], published: Sequence[Comparison]) -> str:
    """A booktabs tabular for each group; put them into table environments of your own."""
    out = ["% written by fedbicross; needs \\usepackage{booktabs} and \\usepackage[T1]{fontenc}"]
    for group in found:
        out += [f"% {group.name} ({group.suite}, {group.budget})".translate(LATEX_ESCAPES).replace("\\%", "%", 1)]
        out += [f"\\begin{{tabular}}{{l{'r' * 11}lll}}", "\\toprule", _tex(HEADER), "\\midrule"]
        for line in group.lines:
            texts = [text.translate(LATEX_ESCAPES) for text in line_cells(group, line, published)]
            if line.bold:
                texts[:2] = [f"\\textbf{{{text}}}" for text in texts[:2]]
            out.append(" & ".join(texts) + r" \\")
        out += ["\\bottomrule", "\\end{tabular}", ""]
    return "\n".join(out).rstrip("\n") + "\n"


def _tex(texts: Iterable[str]) -> str:
    return " & ".join(text.translate(LATEX_ESCAPES) for text in texts) + r" \\"


def as_csv(found: Sequence[Group], published: Sequence[Comparison]) -> str:
    """One line a method and group, unrounded."""
    places = ["suite", "data", "partition", "alpha", "clients", "models", "budget", "images_per_client"]
    numbers = ["gain_points", "matched_percent", "global_percent", "label_set_percent", "worst_client_percent"]
    spread = [column for name in numbers for column in (name, f"{name}_sd")]
    costs = ["seconds", "server_seconds", "upload_bytes_per_client", "reply_bytes_per_client"]
    more = ["clearly_harmed", "clearly_helped", "judged_clients", "p_holm", "clearly_best"]
    header = [*places, "method", "role", "seeds", "stale", *spread, *more, *costs, "published", "command"]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(header)
    for group in found:
        alpha = "" if group.alpha is None else csv_number(group.alpha)
        where = [csv_text(group.suite), csv_text(group.data), csv_text(group.partition), alpha, str(group.clients)]
        where += [csv_text(group.models), csv_text(group.budget), csv_number(group.images)]
        for line in group.lines:
            protocols = [line.accuracy[name] for name in ("matched", "global", "label_set")]
            values = [
                csv_number(None if part is None else round(100 * part, 10))
                for value in (line.gain, *protocols, line.worst)
                for part in (value.mean, value.sd)
            ]
            judged = [csv_number(line.harmed), csv_number(line.helped), str(line.judged), csv_number(line.p)]
            times = [csv_number(v.mean) for v in (line.seconds, line.server_seconds, line.upload, line.reply)]
            known = published_text(published_for(group, line, published))
            facts = [csv_text(line.method), line.role, str(len(line.seeds)), "yes" if line.stale else "no"]
            writer.writerow(
                [*where, *facts, *values, *judged, "yes" if line.bold else "no", *times, csv_text(known), line.command]
            )
    return stream.getvalue()
