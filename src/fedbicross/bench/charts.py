"""The pictures of the page. Each function returns an SVG string, or nothing where there is nothing to draw."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from statistics import fmean

from fedbicross.bench.table import Group, Line
from fedbicross.report.figures import gain_strips
from fedbicross.report.svg import SERIES, coordinate, line, rect, spaced, svg, tag, text, tick_text, ticks, triangle
from fedbicross.report.text import duration, points, short, size

WIDTH, LEFT, RIGHT, TOP, HEIGHT = 484.0, 40.0, 164.0, 26.0, 236.0
LETTERS = 24  # of a method's name at the right
FLOOR = -0.15  # gains below are drawn there: a method that loses 80 points must not flatten all others
NARROW = 354.0
SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20)
TIMES = (*SECONDS, 60, 120, 300, 600, 1200, 3600, 7200, 18_000, 36_000, 72_000, 180_000, 360_000)  # minutes, hours
WHOLE = re.compile(r"\.0+(?!\d)| 00 (s|min)$")  # the end of 1.00 s and of 2 min 00 s, not of 0.01 s
SIZES = (0, 250, 500, 1000, 2000, 4000)  # images of a hospital


def colours(groups: Sequence[Group]) -> dict[str, int]:
    """A colour for each of the methods that gain most on average; all others stay grey. The same in every picture."""
    gains: dict[str, list[float]] = {}
    for group in groups:
        for item in group.lines:
            if item.role == "method" and item.gain.mean is not None:
                gains.setdefault(item.method, []).append(item.gain.mean)
    best = sorted(gains, key=lambda method: (-fmean(gains[method]), method))[: SERIES - 1]
    return {method: index for index, method in enumerate(sorted(best))}


Places = Sequence[tuple[float, str]]  # where on the axis, and what is written there
Paths = Mapping[str, Sequence[tuple[float, float]]]  # by method: place and gain


def gain_lines(paths: Paths, places: Places, xlabel: str, label: str, colour: Mapping[str, int]) -> str:
    """Gain over training alone, one line a method; coloured ones are named at their right end."""
    values = [max(gain, FLOOR) for path in paths.values() for _, gain in path]
    if not values:
        return ""
    low, high = min([*values, -0.01]), max([*values, 0.01])
    margin = 0.05 * (high - low)
    low, high = low - margin, high + margin
    first, last = places[0][0], places[-1][0]
    wide = WIDTH - LEFT - RIGHT

    def at(x: float, gain: float) -> tuple[float, float]:
        across = 0.5 if first == last else (x - first) / (last - first)
        return LEFT + 12 + (wide - 24) * across, TOP + HEIGHT * (high - max(gain, FLOOR)) / (high - low)

    zero = at(first, 0.0)[1]
    body = [
        text(2, 12, "gain over training alone, points", class_="axis"),
        text(WIDTH - RIGHT, TOP + HEIGHT + 34, xlabel, 40, "end", class_="axis"),
        rect(LEFT, zero, wide, TOP + HEIGHT - zero, "harmside"),
    ]
    for tick in ticks(100 * low, 100 * high):
        y = at(first, tick / 100)[1]
        body.append(line(LEFT, y, LEFT + wide, y, "zero" if tick == 0 else "rule"))
        body.append(text(LEFT - 6, y + 4, ("+" if tick > 0 else "") + tick_text(tick), anchor="end", class_="tick"))
    for x, name in places:
        body.append(text(at(x, 0)[0], TOP + HEIGHT + 17, name, 16, "middle", class_="tick"))
    ends = []
    for method in sorted(paths, key=lambda name: name in colour):  # grey ones below
        path = sorted(paths[method])
        kind = f"s{colour[method]}" if method in colour else "faint"
        spots = [(*at(x, gain), gain) for x, gain in path]
        if len(spots) > 1:
            d = "M" + "L".join(f"{coordinate(x)} {coordinate(y)}" for x, y, _ in spots)
            body.append(tag("path", d=d, class_=f"line {kind}", tip=method))
        for (x, y, gain), (_, _) in zip(spots, path, strict=True):
            tip = f"{method}: {points(gain)} points"
            shape = f"point {kind}" if method in colour else "dot level"
            lost = gain < FLOOR
            body.append(triangle(x, y, 4, False, shape, tip) if lost else _dot(x, y, 3.4, shape, tip))
        if method in colour:
            ends.append((method, spots[-1][1]))
    heights = spaced([y for _, y in ends], 14.0, TOP + 4, TOP + HEIGHT)
    for (method, _), y in zip(ends, heights, strict=True):
        body.append(text(LEFT + wide + 6, y + 4, method, LETTERS, class_=f"name s{colour[method]}"))
    return svg(WIDTH, TOP + HEIGHT + 42, body, label, narrow=NARROW)


def _dot(x: float, y: float, radius: float, shape: str, tip: str) -> str:
    return tag("circle", cx=x, cy=y, r=radius, class_=shape, tip=tip)


def gains_by_skew(groups: Sequence[Group], colour: Mapping[str, int], label: str) -> str:
    """Of one data set and number of hospitals."""
    skews = sorted(groups, key=lambda group: math.inf if group.alpha is None else group.alpha)
    places = [(float(index), group.skew) for index, group in enumerate(skews)]
    paths: dict[str, list[tuple[float, float]]] = {}
    for index, group in enumerate(skews):
        for item in _methods(group):
            paths.setdefault(item.method, []).append((float(index), item.gain.mean or 0.0))
    return gain_lines(paths, places, "skew", label, colour) if places else ""


def gains_by_size(groups: Sequence[Group], colour: Mapping[str, int], label: str) -> str:
    """Of one data set: the mean over skews for each number of hospitals, of which there must be two.

    Only skews count that were made with every number of hospitals: a mean over others is another thing.
    """
    skews: dict[int, set[str]] = {}
    for group in groups:
        skews.setdefault(group.clients, set()).add(group.skew)
    common = set[str].intersection(*skews.values()) if skews else set()
    found: dict[int, list[Group]] = {}
    for group in groups:
        if group.skew in common:
            found.setdefault(group.clients, []).append(group)
    sizes = {n: fmean(group.images for group in members) for n, members in found.items()}
    places = sorted((math.log10(max(images, 1)), f"{images:,.0f}") for images in sizes.values())
    paths: dict[str, list[tuple[float, float]]] = {}
    for n, members in found.items():
        gains: dict[str, list[float]] = {}
        for group in members:
            for item in _methods(group):
                gains.setdefault(item.method, []).append(item.gain.mean or 0.0)
        for method, values in gains.items():
            if len(values) == len(members):
                paths.setdefault(method, []).append((math.log10(max(sizes[n], 1)), fmean(values)))
    return gain_lines(paths, places, "images per hospital", label, colour) if len(places) > 1 else ""


def _methods(group: Group) -> list[Line]:
    return [item for item in group.lines if item.role == "method" and item.gain.mean is not None]


def accuracy_against(groups: Sequence[Group], what: str, colour: Mapping[str, int], label: str) -> str:
    """Matched accuracy against ``seconds`` or ``bytes`` on a logarithmic axis; means over groups that all have."""
    shown: list[tuple[str, str, float, float]] = []
    for method in dict.fromkeys(item.method for group in groups for item in group.lines):
        items = [item for group in groups for item in group.lines if item.method == method]
        costs = [_cost(item, what) for item in items]
        accuracies = [item.accuracy["matched"].mean for item in items]
        if len(items) == len(groups) and None not in costs and None not in accuracies:
            mean_cost = fmean(cost for cost in costs if cost is not None)
            shown.append((method, items[0].role, mean_cost, fmean(a for a in accuracies if a is not None)))
    if len(shown) < 2:
        return ""
    floor = 0.01 if what == "seconds" else 1000.0  # what costs less stands at the left edge
    show = duration if what == "seconds" else size
    logs = [math.log10(max(cost, floor)) for _, _, cost, _ in shown]
    low_x, high_x = min(logs) - 0.1, max(max(logs), min(logs) + 0.5) + 0.1
    accuracies_all = [accuracy for *_, accuracy in shown]
    low, high = min(accuracies_all), max(accuracies_all)
    margin = 0.06 * (high - low) or 0.02
    low, high = low - margin, high + margin
    wide = WIDTH - LEFT - RIGHT

    def at(cost: float, accuracy: float) -> tuple[float, float]:
        across = (math.log10(max(cost, floor)) - low_x) / (high_x - low_x)
        return LEFT + wide * across, TOP + HEIGHT * (high - accuracy) / (high - low)

    roles = {role for _, role, _, _ in shown} & {"alone", "upper_bound"}  # the best of each is named
    unit = "seconds of all, training included" if what == "seconds" else "bytes there and back, per hospital"
    body = [
        text(2, 12, "matched accuracy, %", class_="axis"),
        text(WIDTH - RIGHT, TOP + HEIGHT + 34, unit, 40, "end", class_="axis"),
    ]
    for tick in ticks(100 * low, 100 * high):
        y = at(floor, tick / 100)[1]
        body.append(line(LEFT, y, LEFT + wide, y, "rule"))
        body.append(text(LEFT - 6, y + 4, tick_text(tick), anchor="end", class_="tick"))
    for value in _time_ticks(low_x, high_x) if what == "seconds" else _log_ticks(low_x, high_x):
        x = at(value, low)[0]
        body.append(line(x, TOP, x, TOP + HEIGHT, "rule"))
        name = "0" if value == floor and min(cost for _, _, cost, _ in shown) < floor else show(value)
        body.append(text(x, TOP + HEIGHT + 17, WHOLE.sub("", name), anchor="middle", class_="tick"))
    names = []
    named = {max((item for item in shown if item[1] == role), key=lambda item: item[3])[0] for role in roles}
    for method, role, cost, accuracy in shown:
        x, y = at(cost, accuracy)
        tip = f"{short(method)}: {100 * accuracy:.1f} %, {show(cost)}"
        if method in colour:
            body.append(_dot(x, y, 5, f"point s{colour[method]}", tip))
        elif role in ("alone", "baseline"):
            kind = "local" if role == "alone" else "baseline"
            body.append(tag("g", rect(x - 4.5, y - 4.5, 9, 9, f"dot {kind}"), tip=tip))
        else:
            body.append(_dot(x, y, 4.5, f"dot {'upper_bound' if role == 'upper_bound' else 'level'}", tip))
        if method in colour or method in named:
            names.append((method, y))
    heights = spaced([y for _, y in names], 14.0, TOP + 4, TOP + HEIGHT)
    for (method, _), y in zip(names, heights, strict=True):
        kind = f"name s{colour[method]}" if method in colour else "label"
        body.append(text(LEFT + wide + 6, y + 4, method, LETTERS, class_=kind))
    return svg(WIDTH, TOP + HEIGHT + 42, body, label, narrow=NARROW)


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 10, 100 … between two powers of ten, with 2 and 5 where these are few, and fewer where they are many."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    steps = (1, 2, 5) if high - low < 2 else (1,)
    found = [step * 10.0**power for power in powers for step in steps if low <= math.log10(step) + power <= high]
    return _few(found)


def _time_ticks(low: float, high: float) -> list[float]:
    """Whole seconds, minutes and hours between two powers of ten: 100 s would be 1 min 40 s, too wide for its place."""
    return _few([value for value in TIMES if low <= math.log10(value) <= high])


def _few(values: list[float]) -> list[float]:
    return values[:: max(1, math.ceil(len(values) / 6))]


def _cost(item: Line, what: str) -> float | None:
    if what == "seconds":
        return item.seconds.mean
    up, down = item.upload.mean, item.reply.mean
    return None if up is None or down is None else up + down


def client_strips(group: Group, label: str) -> str:
    """One mark a client and seed."""
    return gain_strips(
        [
            (item.method, [(f"seed {seed}, {client}", gain) for (seed, client), gain in item.client_gains.items()])
            for item in group.lines
            if item.role in ("method", "baseline", "upper_bound") and item.client_gains
        ],
        label,
    )


def when_it_pays(groups: Sequence[Group]) -> str:
    """Hospital size against skew: in each field the best method, and how many of them win and lose on average.

    ``groups`` are those of one suite and budget.
    """
    fields: dict[tuple[int, float], list[Group]] = {}
    for group in groups:
        if group.partition in ("iid", "dirichlet") and _methods(group):
            column = sum(group.images >= least for least in SIZES) - 1
            fields.setdefault((column, math.inf if group.alpha is None else group.alpha), []).append(group)
    if not fields:
        return ""
    columns = sorted({column for column, _ in fields})
    rows = sorted({alpha for _, alpha in fields})
    left, top, tall = 70.0, 44.0, 78.0
    wide = min(200.0, (940.0 - left - 4) / len(columns))
    body = [text(left, 14, "images of a hospital", class_="axis"), text(0, top - 8, "skew", class_="axis")]
    for j, column in enumerate(columns):
        body.append(text(left + (j + 0.5) * wide, top - 8, _size_name(column), 24, "middle", class_="tick"))
    for i, alpha in enumerate(rows):
        name = "IID" if math.isinf(alpha) else f"α = {alpha:g}"
        body.append(text(left - 8, top + (i + 0.5) * tall + 4, name, 10, "end", class_="label"))
        for j, column in enumerate(columns):
            x, y = left + j * wide, top + i * tall
            members = fields.get((column, alpha))
            body.append(_field(x, y, wide, tall, members) if members else rect(x, y, wide - 3, tall - 3, "void"))
    return svg(left + wide * len(columns) + 4, top + tall * len(rows) + 4, body, "When does it pay?", narrow=560.0)


def _size_name(column: int) -> str:
    least = SIZES[column]
    return f"{least:,} and more" if column == len(SIZES) - 1 else f"{least:,} to {SIZES[column + 1] - 1:,}"


def _field(x: float, y: float, wide: float, tall: float, groups: Sequence[Group]) -> str:
    gains: dict[str, list[float]] = {}
    for group in groups:
        for item in _methods(group):
            gains.setdefault(item.method, []).append(item.gain.mean or 0.0)
    # A mean over fewer federations is another thing.
    means = {method: fmean(values) for method, values in gains.items() if len(values) == len(groups)}
    if not means:
        return rect(x, y, wide - 3, tall - 3, "void")
    best = max(means, key=lambda method: means[method])
    wins, losses = sum(mean > 0 for mean in means.values()), sum(mean < 0 for mean in means.values())
    shade = min(abs(means[best]) / 0.05, 1.0) * 0.55
    where = ", ".join(dict.fromkeys(group.title for group in groups))
    tip = f"{where}: {best} {points(means[best])} points; {wins} of {len(means)} methods win, {losses} lose"
    harm = "heat" if means[best] > 0 else "heat harm"
    marks = [
        rect(x, y, wide - 3, tall - 3, "void"),
        rect(x, y, wide - 3, tall - 3, harm, fill_opacity=f"{shade:.2f}"),
        triangle(x + 16, y + 20, 5, means[best] > 0, "dot helped" if means[best] > 0 else "dot harmed"),
        text(x + 28, y + 24, points(means[best]), 8, class_="label strong"),
        text(x + 10, y + 43, best, max(int((wide - 16) / 6.8), 8), class_="label"),
        text(x + 10, y + 62, f"{wins} win, {losses} lose", max(int((wide - 16) / 6.4), 8), class_="value"),
    ]
    return tag("g", "".join(marks), tip=tip)
