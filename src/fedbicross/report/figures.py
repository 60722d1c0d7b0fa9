"""Charts along an axis: accuracies, gains, training curves and costs. Each function returns an SVG string."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from fedbicross.report.grids import WIDTH
from fedbicross.report.svg import (
    SERIES,
    coordinate,
    label_width,
    line,
    rect,
    spaced,
    svg,
    tag,
    text,
    tick_text,
    ticks,
    triangle,
)
from fedbicross.report.text import Stat, number, percent_sd, points, short

Series = tuple[str, Sequence[object], Sequence[object]]
LABELLED = 8  # more lines than this cannot be told apart by colour: they turn grey and their median is drawn
LONGEST = 240  # points kept of a line; a screen shows no more


def score_dots(
    methods: Sequence[tuple[str, str, Stat]], alone: Stat | None, title: str, label: str, width: float = 462.0
) -> str:
    """One score of every method; the dashed line is training alone. Items: name, kind, score."""
    if not methods:
        return ""
    left = label_width([name for name, _, _ in methods], 24) + 14
    right = 84.0 if any(score.sd for *_, score in methods) else 44.0
    tall, top = 24.0, 40.0
    wide, bottom = width - left - right, top + tall * len(methods)
    body = [text(2, 14, title, 60, class_="axis")]
    for tick in (0, 25, 50, 75, 100):
        x = left + wide * tick / 100
        body.append(line(x, top, x, bottom, "rule"))
        body.append(text(x, top - 6, str(tick), anchor="middle", class_="tick"))
    if alone is not None and alone.mean is not None:
        body.append(line(left + wide * alone.mean, top - 2, left + wide * alone.mean, bottom, "reference"))
    for i, (name, kind, score) in enumerate(methods):
        y = top + (i + 0.5) * tall
        strong = "label strong" if kind == "local" else "label"
        body.append(text(left - 10, y + 4, name, 24, "end", class_=strong))
        body.append(_score_dot(left, wide, y, name, kind, score))
        body.append(text(width - 2, y + 4, percent_sd(score), anchor="end", class_="value"))
    return svg(width, bottom + 8, body, label, narrow=330.0)


def _score_dot(x0: float, wide: float, y: float, name: str, kind: str, value: Stat) -> str:
    if value.mean is None:
        return text(x0 + 4, y + 4, "n/a", class_="tick")
    x = x0 + wide * min(max(value.mean, 0.0), 1.0)
    tip = f"{short(name)}: {percent_sd(value)} %"
    low, high = (x0 + wide * min(max(value.mean + sign * (value.sd or 0), 0.0), 1.0) for sign in (-1, 1))
    whisker = line(low, y, high, y, "whisker") if value.sd else ""
    # Upper bounds are hollow and baselines square, so that roles differ in shape as well as in colour.
    if kind in ("baseline", "local"):
        mark = rect(x - 4.5, y - 4.5, 9, 9, f"dot {kind}")
    else:
        mark = tag("circle", cx=x, cy=y, r=5, class_=f"dot {kind}")
    return tag("g", whisker + mark, tip=tip)


@dataclass(frozen=True)
class ClientGain:
    """What one client gains over training alone: fractions, or None where that was not measured."""

    client: str
    own: float | None
    interval: tuple[float, float] | None  # of ``own``, 95 %
    everywhere: float | None


def client_gains(clients: Sequence[ClientGain], label: str) -> str:
    """Two marks a client: what it gains for its own patients, with an interval, and for patients from everywhere."""
    shown = [value for c in clients for value in (c.own, c.everywhere, *(c.interval or ())) if value is not None]
    if not shown:
        return ""
    low: float = min([*shown, -0.01])
    high: float = max([*shown, 0.01])
    margin = 0.04 * (high - low)
    low, high = low - margin, high + margin
    # Narrow enough for a telephone, where it is the first picture that a hospital looks for.
    width, tall, top, right = 500.0, 30.0, 58.0, 142.0
    left = label_width([c.client for c in clients], 16) + 14
    wide, bottom = width - left - right, top + tall * len(clients)

    def place(gain: float) -> float:
        return left + wide * (gain - low) / (high - low)

    body = [
        triangle(8, 12, 4.5, True, "dot helped"),
        text(18, 16, "own patients, with a 95 % interval", class_="axis"),
        tag("circle", cx=272, cy=12, r=4.5, class_="dot everywhere"),
        text(282, 16, "patients from everywhere", class_="axis"),
        rect(left, top, place(0.0) - left, bottom - top, "harmside"),
        text(width - right + 50, top - 8, "own", anchor="end", class_="axis"),
        text(width - 4, top - 8, "everywhere", anchor="end", class_="axis"),
    ]
    for tick in ticks(100 * low, 100 * high, 5):
        x = place(tick / 100)
        body.append(line(x, top, x, bottom, "zero" if tick == 0 else "rule"))
        body.append(text(x, top - 8, ("+" if tick > 0 else "") + tick_text(tick), anchor="middle", class_="tick"))
    for i, c in enumerate(clients):
        y = top + (i + 0.5) * tall
        body += [line(left, y + tall / 2, width, y + tall / 2, "rule"), *_client_gain(c, y, place)]
        body.append(text(left - 10, y + 4, c.client, 16, "end", class_="label"))
        body.append(text(width - right + 50, y + 4, points(c.own), anchor="end", class_="value"))
        body.append(text(width - 4, y + 4, points(c.everywhere), anchor="end", class_="value"))
    return svg(width, bottom + 4, body, label, narrow=340.0)


def _client_gain(c: ClientGain, y: float, place: Callable[[float], float]) -> list[str]:
    marks, name = [], short(c.client)
    if c.everywhere is not None:
        tip = f"{name}, patients from everywhere: {points(c.everywhere)} points"
        marks.append(tag("circle", cx=place(c.everywhere), cy=y + 6, r=4.5, class_="dot everywhere", tip=tip))
    if c.own is None:
        return marks
    tip = f"{name}, own patients: {points(c.own)} points"
    if c.interval is not None:
        tip += f", 95 % interval {points(c.interval[0])} to {points(c.interval[1])}"
        marks.append(line(place(c.interval[0]), y - 6, place(c.interval[1]), y - 6, "whisker"))
    if c.own == 0:
        return [*marks, tag("circle", cx=place(0.0), cy=y - 6, r=3.5, class_="dot level", tip=tip)]
    return [*marks, triangle(place(c.own), y - 6, 4.5, c.own > 0, "dot helped" if c.own > 0 else "dot harmed", tip)]


def gain_strips(methods: Sequence[tuple[str, Sequence[tuple[str, object]]]], label: str, width: float = WIDTH) -> str:
    """One strip a method, one mark a client, left of zero harmed and right of it helped."""
    known = [[(name, v) for name, gain in items if (v := number(gain)) is not None] for _, items in methods]
    largest = 100 * max((abs(gain) for items in known for _, gain in items), default=0.0)
    if not any(known):
        return ""
    reach = max(largest * 1.06, 1.0)
    narrow = width < WIDTH / 1.5
    left, right, top = label_width([name for name, _ in methods], 26) + 14, 72.0 if narrow else 150.0, 40.0
    wide = width - left - right
    zero = left + wide / 2

    def place(gain: float) -> float:
        return zero + wide / 2 * (100 * gain) / reach

    strips, y = [], top
    for (method, _), items in zip(methods, known, strict=True):
        marks, height = _strip(items, place, y)
        middle = y + height / 2
        strips += [text(left - 10, middle + 4, method, 26, "end", class_="label"), *marks]
        harmed = sum(gain < 0 for _, gain in items)
        helped = sum(gain > 0 for _, gain in items)
        counted = f"{harmed} ▼ {helped} ▲" if narrow else f"{harmed} worse, {helped} better"
        strips.append(text(width - right + 12, middle + 4, counted, class_="value"))
        strips.append(line(left, y + height, width, y + height, "rule"))
        y += height
    body = [rect(left, top, wide / 2, y - top, "harmside")]
    for tick in ticks(-reach, reach, 4 if narrow else 8):
        x = place(tick / 100)
        body.append(line(x, top, x, y, "zero" if tick == 0 else "rule"))
        sign = "+" if tick > 0 else ""
        body.append(text(x, top - 6, sign + tick_text(tick), anchor="middle", class_="tick"))
    body.append(text(zero - 8, 14, "◀ worse" if narrow else "◀ worse than training alone", anchor="end", class_="axis"))
    body.append(text(zero + 8, 14, "better, points ▶", class_="axis"))
    return svg(width, y + 6, body + strips, label)


def _strip(items: Sequence[tuple[str, float]], place: Callable[[float], float], top: float) -> tuple[list[str], float]:
    """Marks that would overlap are stacked; the strip grows with the tallest stack."""
    radius = 4.5 if len(items) <= 24 else 3.2
    pitch = 2.3 * radius
    lanes: list[float] = []  # where the last mark of each lane stands
    placed = []
    for name, gain in sorted(items, key=lambda item: item[1]):
        x = place(gain)
        lane = next((index for index, last in enumerate(lanes) if x - last >= pitch), len(lanes))
        lanes[lane : lane + 1] = [x]
        placed.append((name, gain, lane))
    step = min(pitch, 60.0 / max(len(lanes), 1))
    height = max(30.0, step * len(lanes) + 14)
    marks = []
    for name, gain, lane in placed:
        # Lanes go outwards from the middle, so that a lone mark stands on the line of its label.
        y = top + height / 2 + step * (lane // 2 + lane % 2) * (1 if lane % 2 else -1)
        tip = f"{short(name)}: {points(gain)} points"
        if gain == 0:
            marks.append(tag("circle", cx=place(gain), cy=y, r=radius - 1, class_="dot level", tip=tip))
        else:
            marks.append(triangle(place(gain), y, radius, gain > 0, "dot helped" if gain > 0 else "dot harmed", tip))
    if len(items) > 1:
        mean = place(sum(gain for _, gain in items) / len(items))
        marks.append(line(mean, top + 4, mean, top + height - 4, "mean"))
    return marks, height


def line_chart(
    series: Sequence[Series],
    xlabel: str,
    ylabel: str,
    label: str,
    *,
    width: float = 462.0,
    marks: Sequence[object] = (),
) -> str:
    """Lines over a common axis, named at their ends; ``marks`` holds one x per series to be pointed out."""
    lines = [(name, _points(xs, ys)) for name, xs, ys in series]
    everything = [point for _, path in lines for point in path if point[1] is not None]
    if not everything:
        return ""
    xs_all, ys_all = [x for x, _ in everything], [y for _, y in everything if y is not None]
    many = len(lines) > LABELLED
    left, top, height = 52.0, 24.0, 230.0
    right = 58.0 if many else label_width([name for name, _ in lines], 14) + 18
    x_low, x_high = _range(xs_all)
    y_low, y_high = _range(ys_all)

    def place(x: float, y: float) -> tuple[float, float]:
        inner = width - left - right
        return left + inner * (x - x_low) / (x_high - x_low), top + height * (1 - (y - y_low) / (y_high - y_low))

    body = [
        text(2, 12, ylabel, class_="axis"),
        text(width - right, top + height + 34, xlabel, 40, "end", class_="axis"),
    ]
    for tick in ticks(y_low, y_high):
        y = place(x_low, tick)[1]
        body += [
            line(left, y, width - right, y, "rule"),
            text(left - 6, y + 4, tick_text(tick), 12, "end", class_="tick"),
        ]
    for tick in ticks(x_low, x_high, whole=all(x.is_integer() for x in xs_all)):
        x = place(tick, y_low)[0]
        body.append(text(x, top + height + 17, tick_text(tick), anchor="middle", class_="tick"))
    ends = []
    for index, (name, path) in enumerate(lines):
        kind = "line faint" if many else f"line s{index % SERIES}"
        body.append(tag("path", d=_path(path, place), class_=kind, tip=name))
        shown = [(x, y) for x, y in path if y is not None]
        if shown and not many:
            ends.append((index, name, place(*shown[-1])))
            body += _mark(shown, marks[index] if index < len(marks) else None, place, index)
    if many:
        middle = _median(lines)
        body.append(tag("path", d=_path(middle, place), class_="line s0 bold", tip=f"median of {len(lines)}"))
        x, y = place(middle[-1][0], middle[-1][1] or 0.0)
        ends.append((0, "median", (x, y)))
    heights = spaced([y for _, _, (_, y) in ends], 14.0, top + 4, top + height)
    for (index, name, (x, _)), y in zip(ends, heights, strict=True):
        body.append(text(x + 7, y + 4, name, 14, class_=f"name s{index % SERIES}"))
    return svg(width, top + height + 42, body, label)


def square_chart(
    series: Sequence[Series], xlabel: str, ylabel: str, label: str, *, diagonal: bool = True, dots: bool = False
) -> str:
    """Lines over 0 to 100 both ways, named below: they all end in one corner. The diagonal is chance, or honesty."""
    lines = [(name, _points(xs, ys)) for name, xs, ys in series[: 3 * LABELLED]]
    if not any(y is not None for _, path in lines for _, y in path):
        return ""
    width, left, top, side = 440.0, 46.0, 24.0, 330.0
    bottom = top + side

    def place(x: float, y: float) -> tuple[float, float]:
        return left + side * min(max(x, 0.0), 100.0) / 100, bottom - side * min(max(y, 0.0), 100.0) / 100

    body = [text(2, 12, ylabel, class_="axis"), text(left + side, bottom + 34, xlabel, 40, "end", class_="axis")]
    for tick in (0.0, 25.0, 50.0, 75.0, 100.0):
        (x, _), (_, y) = place(tick, 0.0), place(0.0, tick)
        body += [line(left, y, left + side, y, "rule"), line(x, top, x, bottom, "rule")]
        body.append(text(left - 6, y + 4, tick_text(tick), 12, "end", class_="tick"))
        body.append(text(x, bottom + 17, tick_text(tick), anchor="middle", class_="tick"))
    if diagonal:
        body.append(line(left, bottom, left + side, top, "reference"))
    row, x = bottom + 58, left
    for index, (name, path) in enumerate(lines):
        kind = f"s{index % SERIES}" + (" dashed" if index >= SERIES else "")
        body.append(tag("path", d=_path(path, place), class_=f"line {kind}", tip=name))
        shown = [place(a, b) for a, b in path if b is not None]
        if dots:
            body += [tag("circle", cx=a, cy=b, r=3, class_=f"point s{index % SERIES}") for a, b in shown]
        needed = 24 + label_width([name], 22) + 12
        if x + needed > width and x > left:
            row, x = row + 18, left
        body += [line(x, row - 4, x + 18, row - 4, f"line {kind}"), text(x + 24, row, name, 22, class_="label")]
        x += needed
    return svg(width, row + 10, body, label, narrow=320.0)


def _points(xs: Sequence[object], ys: Sequence[object]) -> list[tuple[float, float | None]]:
    """Pairs with a usable x; a missing y is kept, and breaks the line. Long lines are thinned evenly."""
    pairs = [(x, number(y)) for raw, y in zip(xs, ys, strict=False) if (x := number(raw)) is not None]
    step = math.ceil(len(pairs) / LONGEST) if pairs else 1
    return pairs if step == 1 else [*pairs[:-1:step], pairs[-1]]


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = 0.04 * (high - low) or max(abs(low) * 0.1, 0.5)
    return (low - margin, high + margin) if low == high else (low, high)


def _path(path: Sequence[tuple[float, float | None]], place: Callable[[float, float], tuple[float, float]]) -> str:
    pieces, pen = [], "M"
    for x, y in path:
        if y is None:
            pen = "M"
            continue
        a, b = place(x, y)
        pieces.append(f"{pen}{coordinate(a)} {coordinate(b)}")
        pen = "L"
    return "".join(pieces) + ("h.1" if len(pieces) == 1 else "")


def _mark(
    shown: Sequence[tuple[float, float]], at: object, place: Callable[[float, float], tuple[float, float]], index: int
) -> list[str]:
    found = [place(x, y) for x, y in shown if x == number(at)]
    return [tag("circle", cx=x, cy=y, r=4, class_=f"point s{index % SERIES}", tip=f"kept: {at}") for x, y in found[:1]]


def _median(lines: Sequence[tuple[str, Sequence[tuple[float, float | None]]]]) -> list[tuple[float, float | None]]:
    columns: dict[float, list[float]] = {}
    for _, path in lines:
        for x, y in path:
            if y is not None:
                columns.setdefault(x, []).append(y)
    return [(x, median(columns[x])) for x in sorted(columns)]


def stacked_bars(
    rows: Sequence[tuple[str, Sequence[object]]],
    parts: Sequence[str],
    show: Callable[[object], str],
    label: str,
    width: float = 462.0,
) -> str:
    """Horizontal bars made of named parts, with the total written at the end."""
    tables = [(name, [max(number(value) or 0.0, 0.0) for value in values]) for name, values in rows]
    largest = max((sum(values) for _, values in tables), default=0.0)
    if largest <= 0:
        return ""
    left, right, tall, top = label_width([name for name, _ in rows], 24) + 14, 84.0, 26.0, 34.0
    wide = width - left - right
    body, x = [], 2.0
    for index, part in enumerate(parts):
        needed = 16 + label_width([part], 40) + 14
        if x > 2 and x + needed > width:
            x, top = 2.0, top + 18
        body += [rect(x, top - 28, 11, 11, f"fill s{index % SERIES}"), text(x + 16, top - 18, part, class_="label")]
        x += needed
    for i, (name, values) in enumerate(tables):
        y, x = top + i * tall, left
        body.append(text(left - 10, y + tall / 2 + 4, name, 24, "end", class_="label"))
        for index, (part, value) in enumerate(zip(parts, values, strict=False)):
            length = wide * value / largest
            tip = f"{short(name)}, {part}: {show(value)}"
            if value:
                body.append(rect(x, y + 4, max(length, 0.5), tall - 9, f"fill s{index % SERIES}", tip=tip))
            x += length
        measured = any(number(value) is not None for value in rows[i][1])
        body.append(text(x + 7, y + tall / 2 + 4, show(sum(values)) if measured else "n/a", class_="value"))
    return svg(width, top + tall * len(rows) + 4, body, label)
