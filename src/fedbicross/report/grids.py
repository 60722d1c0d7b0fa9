"""Matrices of shaded cells: who has what, confusion, gains per client, and any heat map of a method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fedbicross.report.svg import CHARACTER, every, label_width, line, rect, svg, tag, text
from fedbicross.report.text import NA, fixed, number, percent, plain, points, short

WIDTH = 940.0
MANY = 16  # more rows than this and a clients-by-classes chart is turned on its side
MOST = 200  # more clients than this are named in a note, not drawn
TIPS = 3000  # more cells than this and tooltips would weigh more than they help


class GridCell(NamedTuple):
    """``shade`` runs from −1 (harm) over 0 (blank) to 1; None is crossed out as "no value"."""

    shade: float | None
    text: str
    tip: str


def grid(
    cells: Sequence[Sequence[GridCell]],
    rows: Sequence[object],
    columns: Sequence[object],
    label: str,
    *,
    width: float = WIDTH,
    largest: float = 100.0,
    row_title: str = "",
    column_title: str = "",
    bars: Sequence[float] | None = None,
) -> str:
    """A matrix with labelled sides; ``bars`` adds a total to the right of each row."""
    if not rows or not columns:
        return ""
    left = max(label_width(rows, 26), CHARACTER * len(row_title)) + 12
    right = 100.0 if bars else 4.0
    wide = min(largest, max((width - left - right) / len(columns), 2.0))
    flat = label_width(columns, 22) <= wide - 4
    if not flat:
        right = max(right, 60.0)  # slanted labels lean out to the right
        wide = min(largest, max((width - left - right) / len(columns), 2.0))
    tall = 26.0 if len(rows) <= 24 else max(520.0 / len(rows), 3.0)
    top = (22.0 if column_title else 4.0) + (18.0 if flat else min(label_width(columns, 22) * 0.72 + 14, 120.0))
    inner, depth = wide * len(columns), tall * len(rows)
    body = [rect(left, top, inner, depth, "void")]
    tips = len(rows) * len(columns) <= TIPS
    for i, row in enumerate(cells[: len(rows)]):
        for j, cell in enumerate(row[: len(columns)]):
            body.append(_cell(cell, left + j * wide, top + i * tall, wide, tall, tips))
    step = every(len(rows), tall, 12.0)
    body += [
        text(left - 8, top + (i + 0.5) * tall + 4, rows[i], 26, "end", class_="label")
        for i in range(0, len(rows), step)
    ]
    body += _column_labels(columns, left, top, wide, flat)
    if row_title:
        body.append(text(left - 8, top - 6, row_title, 40, "end", class_="axis"))
    if column_title:
        body.append(text(left + inner / 2, 12, column_title, 60, "middle", class_="axis"))
    if bars:
        body += _bars(bars, left + inner + 12, top, tall)
    return svg(left + inner + right, top + depth + 4, body, label)


def _cell(cell: GridCell, x: float, y: float, wide: float, tall: float, tips: bool) -> str:
    tip = cell.tip if tips else ""
    gap = 1.0 if wide > 8 and tall > 8 else 0.0
    parts = []
    if cell.shade is None:
        parts.append(line(x + 2, y + tall - 2, x + wide - 2, y + 2, "none"))
    elif cell.shade:
        strength = min(max(abs(cell.shade), 0.0), 1.0)
        kind = "heat" if cell.shade > 0 else "heat harm"
        opacity = f"{0.06 + 0.94 * strength:.2f}"
        parts.append(rect(x, y, wide - gap, tall - gap, kind, fill_opacity=opacity))
    elif tip and cell.text:
        parts.append(rect(x, y, wide - gap, tall - gap, "blank"))
    if cell.text and len(cell.text) * 6.4 <= wide - 2 and tall >= 14:
        strong = cell.shade is not None and abs(cell.shade) > 0.55
        parts.append(
            text(x + wide / 2, y + tall / 2 + 4, cell.text, 12, "middle", class_="value on" if strong else "value")
        )
    if not parts:
        return ""
    return tag("g", "".join(parts), tip=tip) if tip else "".join(parts)


def _column_labels(columns: Sequence[object], left: float, top: float, wide: float, flat: bool) -> list[str]:
    if flat:
        return [
            text(left + (j + 0.5) * wide, top - 6, name, 22, "middle", class_="label") for j, name in enumerate(columns)
        ]
    labels = []
    for j in range(0, len(columns), every(len(columns), wide, 18.0)):
        x, y = left + (j + 0.5) * wide, top - 6
        turn = f"rotate(-42 {x:.1f} {y:.1f})"
        labels.append(text(x, y, columns[j], 22, "start", class_="label", transform=turn))
    return labels


def _bars(values: Sequence[float], left: float, top: float, tall: float) -> list[str]:
    largest = max(*values, 1.0)
    parts = [text(left, top - 6, "images", class_="axis")]
    for i, value in enumerate(values):
        length = 40.0 * value / largest
        parts.append(rect(left, top + i * tall + 0.25 * tall, length, tall * 0.5, "bar"))
        if tall >= 12:
            parts.append(text(left + length + 5, top + (i + 0.5) * tall + 4, fixed(value, 0), class_="value"))
    return parts


def class_matrix(clients: Sequence[object], classes: Sequence[object], counts: Sequence[Sequence[object]]) -> str:
    """Who has what: images per client and class, shaded by the class's share of the client."""
    clients, counts = clients[:MOST], counts[:MOST]
    classes = [*classes, *(f"class {j}" for j in range(len(classes), max(map(len, counts), default=0)))]
    table = [[number(value) or 0.0 for value in [*row, *[0] * (len(classes) - len(row))]] for row in counts]
    totals = [sum(row) for row in table]
    cells = [
        [
            GridCell(
                value / total if total > 0 and value > 0 else 0.0,
                fixed(value, 0) if value else "",
                f"{short(client)}, {short(name)}: {fixed(value, 0)} images, {percent(value / (total or 1))} %",
            )
            for name, value in zip(classes, row, strict=True)
        ]
        for client, row, total in zip(clients, table, totals, strict=True)
    ]
    label = f"Training images of {len(clients)} clients in {len(classes)} classes"
    if len(clients) <= MANY:
        return grid(cells, clients, classes, label, bars=totals, largest=52.0)
    turned = [[row[j] for row in cells] for j in range(len(classes))]
    return grid(turned, classes, clients, label, row_title="class", column_title="client")


def gain_matrix(methods: Sequence[object], clients: Sequence[object], gains: Sequence[Sequence[object]]) -> str:
    """Points gained or lost against training alone: methods down, clients across, with signs."""
    clients = clients[:MOST]
    known = [abs(value) for row in gains for item in row if (value := number(item)) is not None]
    largest = max([*known, 0.01])
    cells = [
        [
            GridCell(
                None if (value := number(item)) is None else value / largest,
                NA if value is None else points(value),
                f"{short(method)}, {short(client)}: {points(value)} points against training alone",
            )
            for client, item in zip(clients, row, strict=False)
        ]
        for method, row in zip(methods, gains, strict=True)
    ]
    return grid(
        cells, methods, clients, "Gain over training alone, per method and client", row_title="method", largest=58.0
    )


def confusion(matrix: Sequence[Sequence[float]], classes: Sequence[object], label: str) -> str:
    """Counts, shaded by their share of the true class."""
    size = len(matrix)
    # Two matrices stand side by side: long names must not eat the cells.
    names = [short(classes[j], 16) if j < len(classes) else f"class {j}" for j in range(size)]
    cells = []
    for i, row in enumerate(matrix):
        total = sum(row)
        cells.append(
            [
                GridCell(
                    value / total if total > 0 else 0.0,
                    plain(value) if value else "",
                    f"true {short(names[i])}, predicted {short(names[j])}: {plain(value)} of {plain(total)}",
                )
                for j, value in enumerate(row)
            ]
        )
    return grid(cells, names, names, label, width=462.0, largest=44.0, row_title="true", column_title="predicted class")


def heatmap(values: Sequence[object], rows: Sequence[object], columns: Sequence[object], label: str) -> str:
    """Any matrix: shaded by size relative to the largest, negative values in the colour of harm."""
    table = [[number(value) for value in row] if isinstance(row, list | tuple) else [] for row in values]
    high = max((len(row) for row in table), default=0)
    rows = [*rows[: len(table)], *range(len(rows), len(table))]
    columns = [*columns[:high], *range(len(columns), high)]
    largest = max((abs(value) for row in table for value in row if value is not None), default=0.0) or 1.0
    cells = [
        [
            GridCell(
                None if value is None else value / largest,
                NA if value is None else f"{value:.3g}".replace("-", "\u2212"),
                f"{short(name)}, {short(column)}: {plain(value)}",
            )
            for column, value in zip(columns, row, strict=False)
        ]
        for name, row in zip(rows, table, strict=True)
    ]
    return grid(cells, rows, columns, label)
