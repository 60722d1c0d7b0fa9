"""The section about single classes: sensitivity and its kin, ROC and precision–recall curves, reliability."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from fedbicross.evaluate.metrics import rates
from fedbicross.report import figures
from fedbicross.report.summary import Row, Summary, result_rows
from fedbicross.report.tables import csv_file, csv_number, csv_text
from fedbicross.report.text import get, number, percent, sequence, short
from fedbicross.report.verdict import Verdict

CELLS = ("tp", "fp", "fn", "tn")
DECISIONS = {"classes": "most probable class", "at_threshold": "threshold"}
TITLES = ("class", "images", "sensitivity %", "specificity %", "PPV %", "AUC %", "average precision %")
AT_THRESHOLD = tuple(f"{title} at threshold" for title in ("sensitivity %", "specificity %", "PPV %"))
SHOWN = 40  # classes of a table, those with the lowest sensitivity first
LEAST = 10  # images of a bin whose accuracy is drawn
HEADER = ("method", "seed", "protocol", "class", "decision", "images")
RATES = ("sensitivity", "specificity", "ppv", "npv")
AREAS = ("auc", "average_precision")


def class_csv(results: Mapping[str, Any]) -> str:
    """One line per method, seed, protocol, class and way to decide, unrounded."""
    return csv_file((*HEADER, *RATES, *AREAS), _lines(results))


def _lines(results: Mapping[str, Any]) -> Iterator[list[str]]:
    names = sequence(get(results, "dataset", "classes"))
    for row in result_rows(results):
        for protocol in ("matched", "global"):
            for decision, said in DECISIONS.items():
                for c, cells in enumerate(_cells([row], protocol, decision)):
                    found = rates(*cells)
                    areas = [_areas([row], protocol, area, c) for area in AREAS]
                    start = [row["method"], row.get("seed"), protocol, names[c] if c < len(names) else c, said]
                    numbers = [cells[0] + cells[2], *(found[rate] for rate in RATES), *areas]
                    yield [*map(csv_text, start), *map(csv_number, numbers)]


def _cells(rows: Sequence[Row], protocol: str, decision: str) -> list[list[float]]:
    """Four counts a class, summed over rows; empty where they were not stored."""
    total: list[list[float]] = []
    for row in rows:
        found = get(row, "clinical", protocol, decision)
        columns = [[number(n) or 0.0 for n in sequence(get(found, cell))] for cell in CELLS]
        counts = [list(cells) for cells in zip(*columns, strict=False)]
        if not total:
            total = counts
        elif len(counts) == len(total):
            total = [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(total, counts, strict=True)]
    return total


def _areas(rows: Sequence[Row], protocol: str, area: str, c: int) -> float | None:
    values = [sequence(get(row, "clinical", protocol, "curves", area)) for row in rows]
    known = [found for value in values if c < len(value) and (found := number(value[c])) is not None]
    return fmean(known) if known else None


def section(results: Mapping[str, Any], summaries: Sequence[Summary], verdict: Verdict) -> dict[str, Any]:
    """Curves and reliability of training alone and the best, and the best class by class, for own patients."""
    names = [short(name, 24) for name in sequence(get(results, "dataset", "classes"))]
    best = verdict.best or next((item for item in summaries if item.is_reference), None)
    shown = [item for item in summaries if item.is_reference and item is not best][:2] + ([best] if best else [])
    return {
        "method": short(best.method) if best else "",
        "overview": [chart for chart in (_mean_roc(shown), _reliability(shown)) if chart],
        "curves": [chart for chart in (_by_class(best, names, "roc"), _by_class(best, names, "pr")) if chart],
        **_table(best, names),
    }


def _curve(rows: Sequence[Row], kind: str, c: int) -> list[float] | None:
    """The mean over seeds, in percent."""
    found: list[list[float]] = []
    for row in rows:
        by_class = sequence(get(row, "clinical", "matched", "curves", kind))
        points = [number(y) for y in sequence(by_class[c])] if c < len(by_class) else []
        known = [y for y in points if y is not None]
        if len(known) == len(points) > 1 and (not found or len(known) == len(found[0])):
            found.append(known)
    return [100 * fmean(ys) for ys in zip(*found, strict=True)] if found else None


def _steps(points: Sequence[float]) -> list[float]:
    return [100 * index / (len(points) - 1) for index in range(len(points))]


def _classes(item: Summary) -> int:
    return max((len(sequence(get(row, "clinical", "matched", "curves", "roc"))) for row in item.rows), default=0)


def _mean_roc(items: Sequence[Summary]) -> dict[str, str] | None:
    series = []
    for item in items:
        known = [curve for c in range(_classes(item)) if (curve := _curve(item.rows, "roc", c))]
        if known:
            mean = [fmean(ys) for ys in zip(*known, strict=False)]
            series.append((short(item.method, 20), _steps(mean), mean))
    areas = [f"{short(item.method)} {percent(item.scores['macro_auc']['matched'].mean)}" for item in items]
    chart = figures.square_chart(series, "false positive rate, %", "sensitivity, %", "ROC curves, mean over classes")
    note = f"ROC, mean over classes and hospitals. Area under it (AUC, %): {', '.join(areas)}."
    return {"chart": chart, "note": note} if chart else None


def _reliability(items: Sequence[Summary]) -> dict[str, str] | None:
    series, errors = [], []
    for item in items:
        bins = [_bins(row) for row in item.rows]
        total = [[sum(cells) for cells in zip(*parts, strict=True)] for parts in zip(*bins, strict=False)]
        kept = [(100 * c / n, 100 * a / n) for n, c, a in total if n >= LEAST]
        if kept:
            series.append((short(item.method, 20), [x for x, _ in kept], [y for _, y in kept]))
            gap = sum(abs(c - a) for _, c, a in total) / sum(n for n, _, _ in total)
            errors.append(f"{short(item.method)} {percent(gap)}")
    chart = figures.square_chart(series, "stated confidence, %", "right answers, %", "Reliability", dots=True)
    note = f"Reliability: on the dashed line answers are as often right as they are sure. ECE, %: {', '.join(errors)}."
    return {"chart": chart, "note": note} if chart else None


def _bins(row: Row) -> list[tuple[float, float, float]]:
    """Images, and sums of confidence and right answers, of every bin."""
    found = get(row, "clinical", "matched", "reliability")
    columns = [[number(v) or 0.0 for v in sequence(get(found, key))] for key in ("images", "confidence", "accuracy")]
    return [(n, n * confidence, n * right) for n, confidence, right in zip(*columns, strict=False)]


def _by_class(best: Summary | None, names: Sequence[str], kind: str) -> dict[str, str] | None:
    if best is None:
        return None
    curves = [(names[c] if c < len(names) else f"class {c}", _curve(best.rows, kind, c)) for c in range(_classes(best))]
    series = [(name, _steps(curve), curve) for name, curve in curves if curve]
    if kind == "roc":
        title, axes = "ROC curves by class", ("false positive rate, %", "sensitivity, %")
    else:
        title, axes = "Precision–recall curves by class", ("sensitivity (recall), %", "precision (PPV), %")
    chart = figures.square_chart(series, *axes, title, diagonal=kind == "roc")
    return {"chart": chart, "note": f"{title}, means over hospitals."} if chart else None


def _table(best: Summary | None, names: Sequence[str]) -> dict[str, Any]:
    """Each class by its most probable answers and, where there are thresholds, by these; many: the worst first."""
    if best is None:
        return {"titles": [], "rows": [], "left_out": 0, "thresholds": False}
    plain, cut = (_cells(best.rows, "matched", decision) for decision in DECISIONS)
    found = []
    for c, cells in enumerate(plain):
        mine = rates(*cells)
        other = rates(*cut[c]) if c < len(cut) and any(cut[c]) else dict.fromkeys(RATES)
        areas = [_areas(best.rows, "matched", area, c) for area in AREAS]
        values = [*(mine[rate] for rate in RATES[:3]), *areas, *(other[rate] for rate in RATES[:3])]
        name = names[c] if c < len(names) else f"class {c}"
        found.append((mine["sensitivity"], [name, f"{cells[0] + cells[2]:,.0f}", *map(percent, values)]))
    if len(found) > SHOWN:
        found.sort(key=lambda pair: (pair[0] is None, pair[0] or 0.0))
    thresholds = any(sum(cells) > 0 for cells in cut)
    titles = [*TITLES, *(AT_THRESHOLD if thresholds else ())]
    rows = [line[: len(titles)] for _, line in found[:SHOWN]]
    return {"titles": titles, "rows": rows, "left_out": len(found) - len(rows), "thresholds": thresholds}
