"""The few marks that the charts are made of.

Charts are written as SVG by hand rather than by a plotting library: colours are classes of the page's style sheet, so
they follow light and dark; every mark can carry a tooltip; text stays text; and no ids are needed, so none collide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from fedbicross.report.text import clean, short

SERIES = 8  # colours s0 ... s7 in the style sheet
CHARACTER = 7.2  # width of an average character at the charts' 12 px, for reserving space


def coordinate(value: float) -> str:
    """A coordinate to a tenth of a pixel, without trailing zeros: pages stay small and bytes stay equal."""
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


def tag(name: str, content: str = "", tip: str = "", **attributes: object) -> str:
    """An element; ``content`` is markup already, ``tip`` and attribute values are escaped here."""
    parts = [name]
    for key, value in attributes.items():
        if value is None:
            continue
        shown = coordinate(value) if isinstance(value, float) else str(value)
        parts.append(f'{key.rstrip("_").replace("_", "-")}="{escape(shown)}"')
    inside = content + (f"<title>{escape(clean(tip)[:300])}</title>" if tip else "")
    return f"<{' '.join(parts)}>{inside}</{name}>"


def text(x: float, y: float, value: object, limit: int = 40, anchor: str | None = None, **attributes: object) -> str:
    """A label, cut to ``limit`` columns; what was cut is kept as its tooltip."""
    shown = short(value, limit)
    tip = clean(str(value)[:300]) if shown.endswith("…") else ""
    return tag("text", escape(shown), tip=tip, x=float(x), y=float(y), text_anchor=anchor, **attributes)


def rect(x: float, y: float, width: float, height: float, class_: str, **attributes: object) -> str:
    """A rectangle; never of negative size."""
    size = {"width": max(float(width), 0.0), "height": max(float(height), 0.0)}
    return tag("rect", x=float(x), y=float(y), class_=class_, **size, **attributes)  # type: ignore[arg-type]


def line(x1: float, y1: float, x2: float, y2: float, class_: str, **attributes: object) -> str:
    """A straight line."""
    return tag("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=class_, **attributes)  # type: ignore[arg-type]


def triangle(x: float, y: float, size: float, up: bool, class_: str, tip: str = "") -> str:
    """A pointer up or down: direction says what colour alone must not."""
    tall = size if up else -size
    points = [(x, y - tall), (x - size, y + 0.75 * tall), (x + size, y + 0.75 * tall)]
    shape = " ".join(f"{coordinate(a)},{coordinate(b)}" for a, b in points)
    return tag("polygon", points=shape, class_=class_, tip=tip)


def svg(width: float, height: float, body: Sequence[str], label: str, narrow: float | None = None) -> str:
    """The whole drawing; a screen shrinks it to ``narrow``, as far as its text stays readable, then it scrolls."""
    if narrow is None:
        narrow = 340.0 if width < 600 else 0.72 * width
    narrow = min(width, narrow)
    return (
        f'<svg class="chart" role="img" aria-label="{escape(short(label, 200))}" '
        f'viewBox="0 0 {coordinate(width)} {coordinate(height)}" width="{coordinate(width)}" '
        f'height="{coordinate(height)}" style="min-width:{coordinate(narrow)}px">{"".join(body)}</svg>'
    )


def ticks(low: float, high: float, wanted: int = 5, whole: bool = False) -> list[float]:
    """Round numbers that cover ``low`` to ``high``; ``whole`` ones where nothing lies between two, as of epochs."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low]
    raw = max(span / max(wanted, 1), 1.0 if whole else 0.0)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(
        power * factor for factor in ((1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)) if power * factor >= raw * 0.999
    )
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def tick_text(value: float) -> str:
    """A short tick label with a true minus sign."""
    return ("0" if value == 0 else f"{value:.4g}").replace("-", "\u2212")


def spaced(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Label positions as near to ``values`` as a minimum ``gap`` allows, kept within ``low`` and ``high``."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    placed = [0.0] * len(values)
    floor = low
    for index in order:
        placed[index] = max(values[index], floor)
        floor = placed[index] + gap
    ceiling = high
    for index in reversed(order):
        placed[index] = min(placed[index], ceiling)
        ceiling = placed[index] - gap
    return placed


def label_width(labels: Sequence[object], limit: int) -> float:
    """Space for the longest of these labels."""
    return CHARACTER * max((len(short(label, limit)) for label in labels), default=0)


def every(number: int, room: float, each: float) -> int:
    """Show one label in how many, so that labels ``each`` wide fit into steps ``room`` wide."""
    return max(1, math.ceil(each / max(room, 0.01))) if number > 1 else 1
