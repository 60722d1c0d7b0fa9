"""Pages made of stored cells: written as a whole or into a block of their own, and checked against the cells."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from fedbicross.atomic import write_atomic
from fedbicross.bench import page, table
from fedbicross.errors import ConfigError, RunError
from fedbicross.settings import read_toml

BLOCK = re.compile(r"(<!-- bench -->\n).*?(<!-- end -->)", re.DOTALL)
MOST_LINES = 20


def reasons() -> list[dict[str, Any]]:
    """Why published numbers are not reproduced, as far as it is known: the package's `reasons.toml`."""
    file = Path(str(resources.files("fedbicross.bench") / "reasons.toml"))
    found = read_toml(file).get("reason", [])
    if not isinstance(found, list) or not all(isinstance(item, dict) and "reason" in item for item in found):
        raise ConfigError("bad_reasons", f"{file}: expected [[reason]] tables, each with a reason")
    return found


def render(names: Sequence[str | Path], form: str, out: Path, to: Path | None = None) -> str:
    """The table of these suites; ``to`` is the page that it will stand in, from which links start."""
    suites, statuses = table.stored_cells(names, out)
    found = table.groups(statuses)
    published = table.comparisons(suites, found, reasons())
    if form == "html":
        return page.render(suites, found, published, out, to)
    if form == "md":
        return table.markdown(found, published, table.missing_data(suites, found))
    return table.as_csv(found, published) if form == "csv" else table.latex(found, published)


def _whole(to: Path, text: str, form: str) -> str:
    """What the file should hold: in Markdown with a block of ours all that stands around it stays."""
    if form == "md" and to.exists():
        before = to.read_text(encoding="utf-8")
        if BLOCK.search(before):
            return BLOCK.sub(lambda found: f"{found[1]}{text}{found[2]}", before)
    return text


def write(to: Path, text: str, form: str) -> None:
    """Write the page, or the block of it that is ours."""
    try:
        write_atomic(to, _whole(to, text, form).encode())
    except OSError as error:
        raise RunError("cannot_write", f"{to} cannot be written: {error.strerror}") from None


def differences(to: Path, text: str, form: str) -> list[str]:
    """Lines of the page that are not what the cells say; empty if it is."""
    try:
        before = to.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError("page_unreadable", f"{to} cannot be read: {error}") from None
    wanted = _whole(to, text, form)
    lines = [
        line[:300]
        for line in difflib.unified_diff(before.splitlines(), wanted.splitlines(), "page", "cells", lineterm="", n=0)
        if not line.startswith(("---", "+++", "@@"))
    ]
    if len(lines) > MOST_LINES:
        lines = [*lines[:MOST_LINES], f"and {len(lines) - MOST_LINES} lines more"]
    return lines or (["the line endings differ"] if before != wanted else [])
