"""Accuracy after each of several rounds, for methods that go round more than once; the table has the last round's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedbicross.report import figures
from fedbicross.report.summary import result_rows
from fedbicross.report.text import PROTOCOL_NAMES, PROTOCOLS, get, mapping, number, percent, sequence, short, stat

LANDMARKS = (1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 500, 1000)  # of many rounds, those that a table names
Curve = dict[int, dict[str, float | None]]  # round → protocol → mean over seeds


def curves(results: Mapping[str, Any]) -> dict[str, Curve]:
    """Accuracy by method, round and protocol, means over the seeds; only methods of several rounds."""
    found: dict[str, dict[int, dict[str, list[Any]]]] = {}
    for row in result_rows(results):
        for entry in map(mapping, sequence(row.get("accuracy_by_round"))):
            at = number(entry.get("round"))
            if at is not None:
                values = found.setdefault(str(row["method"]), {}).setdefault(int(at), {p: [] for p in PROTOCOLS})
                for protocol in PROTOCOLS:
                    values[protocol].append(get(entry, "accuracy", protocol))
    return {
        method: {at: {p: stat(values[p]).mean for p in PROTOCOLS} for at, values in sorted(rounds.items())}
        for method, rounds in found.items()
    }


def shown(rounds: Mapping[int, object]) -> list[int]:
    """All of a few rounds; of many, landmarks and the last."""
    return [at for at in rounds if len(rounds) <= 6 or at in LANDMARKS or at == max(rounds)]


def section(results: Mapping[str, Any]) -> dict[str, Any]:
    """Charts and a table; empty where every method is one-shot."""
    found = curves(results)
    columns = sorted({at for rounds in found.values() for at in shown(rounds)})
    charts = []
    for protocol in PROTOCOLS:
        title = f"{PROTOCOL_NAMES[protocol]} accuracy, %"
        series = [(short(m), list(r), [_percent(v[protocol]) for v in r.values()]) for m, r in found.items()]
        charts.append((title, figures.line_chart(series, "round", title, f"{title} after each round")))
    tables = [
        (
            PROTOCOL_NAMES[protocol],
            [
                [short(method), *(percent(rounds[at][protocol]) if at in rounds else "" for at in columns)]
                for method, rounds in found.items()
            ],
        )
        for protocol in PROTOCOLS
    ]
    return {"charts": [c for c in charts if c[1]] if found else [], "columns": columns, "tables": tables}


def lines(results: Mapping[str, Any]) -> list[str]:
    """One line a method for the terminal."""
    found = []
    for method, rounds in curves(results).items():
        words = [f"{percent(rounds[at]['matched'])} after {at}" for at in shown(rounds)]
        found.append(f"{short(method)}: matched accuracy in % by rounds: {', '.join(words)}")
    return found


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value
