"""What several verbs print: progress, the result table, JSON."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fedbicross import report, runs
from fedbicross.cli import Stopped

if TYPE_CHECKING:
    from fedbicross.context import Progress


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(value, indent=1, sort_keys=True))


def progress() -> AbstractContextManager[Progress]:
    """Live bars on a terminal, plain lines elsewhere."""
    return runs.progress.shown()


def print_results(results: Mapping[str, Any], as_json: bool) -> None:
    """The result table for people, or the results for programs."""
    if as_json:
        print_json(results)
        return
    # A pipe has no width of its own; a table folded to 80 columns would be unreadable in a log.
    report.terminal.print_all(results, Console() if sys.stdout.isatty() else Console(width=report.terminal.WIDTH))


def run_and_report(work: Callable[[Progress], dict[str, Any]], out: Path, as_json: bool) -> None:
    """Run with progress, write the report, print the table."""
    try:
        with progress() as shown:
            results = work(shown)
        report.write_report(out)
    except KeyboardInterrupt:
        if not (out / "config.toml").is_file():  # nothing was begun, or it lies in parts that only `run` knows of
            raise
        raise Stopped(f"stopped; `fedbicross resume {shlex.quote(str(out))}` continues the run") from None
    print_results(results, as_json)
    if not as_json:
        print(f"report: {out / 'report.html'}")
