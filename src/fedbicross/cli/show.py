"""What several verbs print: progress, the result table, JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedbicross import report, runs

if TYPE_CHECKING:
    from fedbicross.context import Progress


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(value, indent=1, sort_keys=True))


def progress() -> AbstractContextManager[Progress]:
    """Live bars on a terminal, plain lines elsewhere."""
    if not sys.stderr.isatty():
        return nullcontext(runs.progress.PlainProgress())
    return runs.progress.RichProgress(Console(stderr=True))


def print_results(results: Mapping[str, Any], as_json: bool) -> None:
    """The result table for people, or the results for programs."""
    if as_json:
        print_json(results)
        return
    header = report.tables.HEADER
    columns = [number for number, title in enumerate(header) if title != "verdict"]  # the report has it in full
    title = Text(f"{results['name']}: accuracy in %, mean over clients")  # a name is no markup
    table = Table(title=title, title_justify="left")
    for number in columns:
        table.add_column(header[number], justify="left" if number == 0 else "right", no_wrap=number == 0)
    for cells in report.tables.result_table(results):
        table.add_row(*(cells[number] for number in columns))
    # A pipe has no width of its own; a table folded to 80 columns would be unreadable in a log.
    console = Console() if sys.stdout.isatty() else Console(width=150)
    console.print(table, markup=False)
    for line in report.rounds.lines(results):
        console.print(line, markup=False, highlight=False)
    for warning in results.get("warnings", []):
        console.print(f"note: {warning}", markup=False, highlight=False)
    verdict = report.verdict.judge(results, report.summary.summarise(results))
    console.print(f"verdict: {verdict.headline}", markup=False, highlight=False)


def run_and_report(work: Callable[[Progress], dict[str, Any]], out: Path, as_json: bool) -> None:
    """Run with progress, write the report, print the table."""
    with progress() as shown:
        results = work(shown)
    report.write_report(out)
    print_results(results, as_json)
    if not as_json:
        print(f"report: {out / 'report.html'}")
