"""The sections about single clients: what each holds, gains and loses, confuses, and how its training went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedbicross.report import figures, grids
from fedbicross.report.summary import Row, Summary, clients_of, result_rows, seeds_of
from fedbicross.report.text import (
    PROTOCOL_NAMES,
    PROTOCOLS,
    clean,
    count,
    fixed,
    get,
    mapping,
    number,
    percent,
    plain,
    points,
    sequence,
    short,
)

if TYPE_CHECKING:
    from fedbicross.report.verdict import Verdict

DRAWN = 40  # clients by name in the chart of the best method


def holdings(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Who has what, one chart a seed."""
    classes = sequence(get(results, "dataset", "classes"))
    found = []
    for seed, entries in _by_seed(results, "clients"):
        clients = [mapping(entry) for entry in sequence(entries)]
        if not clients:
            continue
        names = [entry.get("client") for entry in clients]
        counts = [sequence(entry.get("class_counts")) for entry in clients]
        notes = [f"{grids.MOST} of {len(clients)} clients are drawn."] if len(clients) > grids.MOST else []
        excluded = [short(entry.get("client"), 24) for entry in clients if entry.get("excluded") is True]
        if excluded:
            listed = ", ".join(excluded[:12]) + (" and others" if len(excluded) > 12 else "")
            notes.append(f"Excluded from this run ({count(len(excluded), 'client')}): {listed}.")
        notes += _architectures(clients)
        found.append({"seed": short(seed, 12), "chart": grids.class_matrix(names, classes, counts), "notes": notes})
    return found


def _architectures(clients: Sequence[Mapping[str, Any]]) -> list[str]:
    """Who has which architecture, where they differ."""
    owners: dict[str, list[str]] = {}
    for entry in clients:
        if entry.get("model") is not None:
            owners.setdefault(short(entry["model"], 24), []).append(short(entry.get("client"), 24))
    if len(owners) < 2:
        return []
    words = [
        f"{model}: {', '.join(names[:12])}{' and others' if len(names) > 12 else ''}" for model, names in owners.items()
    ]
    return [f"Architectures differ. {'; '.join(words)}."]


def gains(results: Mapping[str, Any], summaries: Sequence[Summary], verdict: Verdict) -> dict[str, Any]:
    """Gains and harms per client: the best method by name, strips over all seeds, matrices, and the harmed by name."""
    local = {item.method for item in summaries if item.is_local}
    rows = [row for row in result_rows(results) if str(row["method"]) not in local]
    methods = list(dict.fromkeys(str(row["method"]) for row in rows))
    strips = {}
    for protocol in PROTOCOLS:
        items = [(method, _gains_of(method, rows, protocol)) for method in methods]
        title = f"Gain over training alone per client, {PROTOCOL_NAMES[protocol]} protocol"
        strips[protocol] = figures.gain_strips([item for item in items if item[1]], title, width=462.0)
    by_seed = []
    for seed in seeds_of(results) if strips["matched"] else []:
        chosen = [row for row in rows if str(row.get("seed")) == seed]
        by_seed.append({"seed": short(seed, 12), "chart": _gain_matrix(chosen), "harmed": _harmed(chosen)})
    return {
        "best": _best(verdict),
        "strips": strips,
        "seeds": [entry for entry in by_seed if entry["chart"]],
    }


def _best(verdict: Verdict) -> dict[str, Any]:
    """What the method of the verdict brings each hospital, one chart a seed."""
    if verdict.best is None:
        return {"method": "", "seeds": []}
    name, charts = short(verdict.best.method), []
    for row in verdict.best.rows:
        found = [_client_gain(client) for client in clients_of(row)]
        note = ""
        if len(found) > DRAWN:
            found = sorted(found, key=lambda c: (c.own is None, c.own or 0.0))[:DRAWN]
            note = f"The {DRAWN} clients with the lowest gain at home; tables/clients.csv has all of them."
        chart = figures.client_gains(found, f"What {name} gains over training alone, client by client")
        if chart:
            charts.append({"seed": short(row.get("seed"), 12), "chart": chart, "note": note})
    return {"method": name, "seeds": charts}


def _client_gain(client: Mapping[str, Any]) -> figures.ClientGain:
    own, everywhere = (number(get(client, "gain_over_local", protocol)) for protocol in ("matched", "global"))
    ends = [number(end) for end in sequence(get(client, "against_alone", "interval"))]
    low, high = ends if len(ends) == 2 else (None, None)
    interval = None if low is None or high is None else (low, high)
    return figures.ClientGain(short(client.get("client"), 24), own, interval, everywhere)


def _gains_of(method: str, rows: Sequence[Row], protocol: str) -> list[tuple[str, object]]:
    pairs = [
        (f"{clean(client.get('client'))} (seed {row.get('seed')})", get(client, "gain_over_local", protocol))
        for row in rows
        if str(row["method"]) == method
        for client in clients_of(row)
    ]
    return [(name, gain) for name, gain in pairs if number(gain) is not None]


def _gain_matrix(rows: Sequence[Row]) -> str:
    tables = [{str(c.get("client")): get(c, "gain_over_local", "matched") for c in clients_of(row)} for row in rows]
    names = list(dict.fromkeys(name for table in tables for name in table))
    kept = [(row["method"], table) for row, table in zip(rows, tables, strict=True) if any(map(_known, table.values()))]
    return grids.gain_matrix([m for m, _ in kept], names, [[t.get(n) for n in names] for _, t in kept])


def _known(value: object) -> bool:
    return number(value) is not None


def _harmed(rows: Sequence[Row]) -> list[tuple[str, list[str], list[str]]]:
    """Who is harmed by what and who is lower by chance, the worst first: the chart in words."""
    found = []
    for row in rows:
        lower = [(number(get(c, "gain_over_local", "matched")), c) for c in clients_of(row) if c.get("harmed") is True]
        lower.sort(key=lambda pair: (pair[0] is None, pair[0] or 0.0))
        harmed = [pair for pair in lower if pair[1].get("clearly_harmed") is not False]
        by_chance = [pair for pair in lower if pair[1].get("clearly_harmed") is False]
        found.append((short(row["method"]), _names(harmed), _names(by_chance)))
    return [entry for entry in found if entry[1] or entry[2]]


def _names(lower: Sequence[tuple[float | None, Mapping[str, Any]]]) -> list[str]:
    names = [f"{short(client.get('client'), 24)} ({points(gain)})" for gain, client in lower]
    return [*names[:10], *([f"and {len(names) - 10} more"] if len(names) > 10 else [])]


def confusions(results: Mapping[str, Any], summaries: Sequence[Summary], verdict: Verdict) -> list[dict[str, Any]]:
    """Confusion matrices per method, summed over clients and seeds; those behind the verdict are unfolded."""
    classes = sequence(get(results, "dataset", "classes"))
    found: list[dict[str, Any]] = []
    for item in summaries:
        charts = []
        for protocol in ("matched", "global"):
            matrix = _summed(item.rows, protocol)
            title = f"Confusion of {short(item.method)}, {protocol} protocol"
            if matrix:
                charts.append((protocol, grids.confusion(matrix, classes, title)))
        if charts:
            opened = item is verdict.best or (verdict.best is None and not found)
            found.append({"method": short(item.method), "charts": charts, "open": opened})
    return found


def _summed(rows: Sequence[Row], protocol: str) -> list[list[float]]:
    total: list[list[float]] = []
    for row in rows:
        for client in clients_of(row):
            matrix = [
                [number(v) or 0.0 for v in sequence(line)] for line in sequence(get(client, "confusion", protocol))
            ]
            if not matrix or any(len(line) != len(matrix) for line in matrix):
                continue
            if not total:
                total = matrix
            elif len(total) == len(matrix):
                total = [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(total, matrix, strict=True)]
    return total


def training(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Validation accuracy and loss of every client, one pair of charts a seed."""
    found = []
    for seed, entries in _by_seed(results, "training"):
        clients = [(name, mapping(entry)) for name, entry in mapping(entries).items()]
        histories = [(name, [mapping(e) for e in sequence(entry.get("history"))]) for name, entry in clients]
        marks = [entry.get("best_epoch") for _, entry in clients]
        charts = []
        for field, factor, title in (
            ("val_accuracy", 100.0, "validation accuracy, %"),
            ("train_loss", 1.0, "training loss"),
        ):
            series = [
                (name, [e.get("epoch") for e in history], [_times(e.get(field), factor) for e in history])
                for name, history in histories
            ]
            charts.append((title, figures.line_chart(series, "epoch", title, f"{title} per epoch", marks=marks)))
        lines = [_training_line(name, entry) for name, entry in clients]
        if lines:
            found.append(
                {"seed": short(seed, 12), "charts": charts, "lines": lines, "many": len(lines) > figures.LABELLED}
            )
    return found


def _times(value: object, factor: float) -> float | None:
    found = number(value)
    return None if found is None else factor * found


def _training_line(name: str, entry: Mapping[str, Any]) -> list[str]:
    history = [mapping(epoch) for epoch in sequence(entry.get("history"))]
    best = next((epoch for epoch in history if epoch.get("epoch") == entry.get("best_epoch")), {})
    numbers = [plain(entry.get(field)) for field in ("train_images", "val_images", "best_epoch")]
    return [
        short(name, 30),
        short(entry.get("model"), 24),
        *numbers,
        percent(best.get("val_accuracy")),
        fixed(best.get("train_loss"), 3),
    ]


def _by_seed(results: Mapping[str, Any], part: str) -> list[tuple[str, Any]]:
    entries = mapping(results.get(part))
    return [(seed, entries[seed]) for seed in seeds_of(results) if seed in entries]
