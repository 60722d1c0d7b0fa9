"""Values as a reader sees them: numbers with units, names made safe and short, and "n/a" where there is no number."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from fedbicross.evaluate.names import PROTOCOLS as PROTOCOLS

NA = "n/a"
PROTOCOL_NAMES = {name: name.replace("_", "-") for name in PROTOCOLS}


@dataclass(frozen=True)
class Stat:
    """Mean and sample standard deviation over seeds; ``sd`` is None with fewer than two values."""

    mean: float | None
    sd: float | None
    count: int


def number(value: object) -> float | None:
    """A finite float, or None for null, NaN, infinity, booleans and text; nothing measured here exceeds 1e100."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # The bound keeps sums, squares and chart coordinates finite whatever a file holds.
    return float(value) if abs(value) < 1e100 else None


def get(value: Any, *keys: str) -> Any:
    """``value[k1][k2]...``, or None as soon as a step is missing: a partial run still gets its page."""
    for key in keys:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def mapping(value: object) -> dict[str, Any]:
    """``value`` if it is a mapping, with text keys, else an empty one."""
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}


def sequence(value: object) -> list[Any]:
    """``value`` if it is a list, else an empty one."""
    return list(value) if isinstance(value, list | tuple) else []


def stat(values: Iterable[object]) -> Stat:
    """Mean and sample standard deviation of the values that are numbers."""
    numbers = [found for value in values if (found := number(value)) is not None]
    if not numbers:
        return Stat(None, None, 0)
    return Stat(fmean(numbers), stdev(numbers) if len(numbers) > 1 else None, len(numbers))


def clean(value: object) -> str:
    """One line of printable text: control, bidirectional-override and unpaired surrogate characters are replaced."""
    text = NA if value is None else str(value)
    return "".join(c if c.isprintable() else (" " if c.isspace() else "\ufffd") for c in text).strip()


def short(value: object, limit: int = 48) -> str:
    """``clean`` text cut to ``limit`` columns (wide characters count two), with an ellipsis where it was cut."""
    text = clean(str(value)[: 4 * limit] if value is not None else None)
    width = 0
    for index, character in enumerate(text):
        width += 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if width > limit:
            return text[: max(index - 1, 0)] + "…"
    # What the first slice removed must show as removed, even where cleaning then shortened the rest.
    return text + "…" if value is not None and len(str(value)) > 4 * limit else text


def fixed(value: object, digits: int = 1) -> str:
    """A plain decimal with a true minus sign; never "-0.0"."""
    found = number(value)
    if found is None:
        return NA
    rounded = f"{found:,.{digits}f}" if abs(found) < 1e12 else f"{found:.3g}"
    if rounded.strip("-0.,") == "":
        rounded = rounded.lstrip("-")
    return rounded.replace("-", "\u2212")


def percent(fraction: object, digits: int = 1) -> str:
    """A fraction as a percentage without its sign, e.g. ``96.1``."""
    found = number(fraction)
    return NA if found is None else fixed(100 * found, digits)


def percent_sd(value: Stat, digits: int = 1) -> str:
    """``96.1`` or, with several seeds, ``96.1 ± 0.4``."""
    return percent(value.mean, digits) + (f" ± {percent(value.sd, digits)}" if value.sd is not None else "")


def points(fraction: object, digits: int = 1) -> str:
    """A signed difference in percentage points, e.g. ``+1.2``."""
    found = number(fraction)
    if found is None:
        return NA
    text = fixed(100 * found, digits)
    return text if text.startswith("\u2212") or text.strip("0.") == "" else f"+{text}"


def scaled(value: object, units: tuple[str, ...], step: float = 1000.0) -> str:
    """Three significant digits with the unit that fits."""
    found = number(value)
    if found is None:
        return NA
    index = 0
    while abs(found) >= 999.5 and index < len(units) - 1:
        found, index = found / step, index + 1
    digits = 0 if (index == 0 and found == int(found)) or abs(found) >= 99.95 else 1 if abs(found) >= 9.995 else 2
    return f"{fixed(found, digits)} {units[index]}"


def size(value: object) -> str:
    """Bytes in decimal units."""
    return scaled(value, ("B", "kB", "MB", "GB", "TB"))


def flops(value: object) -> str:
    """Floating-point operations in decimal units."""
    return scaled(value, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def duration(value: object) -> str:
    """Seconds, or minutes and hours when there are many."""
    found = number(value)
    if found is None:
        return NA
    if found < 99.5:
        return f"{fixed(found, 1 if found >= 9.95 else 2)} s"
    minutes = round(found / 60)
    if minutes < 100:
        return f"{int(found // 60)} min {int(found % 60):02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def plain(value: object) -> str:
    """Any scalar for a table cell: integers with thousands separators, other numbers to four significant digits."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        found = number(value)
        if found is None:
            return NA
        if found == int(found) and abs(found) < 1e12:
            return fixed(found, 0)
        return f"{found:.4g}".replace("-", "\u2212")
    return short(value, 120)


def count(quantity: int, singular: str, plural: str | None = None) -> str:
    """``1 client``, ``5 clients``."""
    return f"{quantity:,} {singular if quantity == 1 else plural or singular + 's'}"
