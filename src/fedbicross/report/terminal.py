"""The result table and the verdict as text, for a terminal, a log or a Python prompt."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedbicross.report import rounds, tables
from fedbicross.report.summary import summarise
from fedbicross.report.text import clean
from fedbicross.report.verdict import judge

WIDTH = 100  # columns, where the reader has not got a width of his own
NAME = 25  # columns of a method's name; a longer one is broken after its colons
COLUMNS = {  # of the table in the report, and their short titles here; it has the others, and every row's verdict
    "method": "method",
    "global %": "global",
    "matched %": "matched",
    "label-set %": "label-set",
    "worst client (matched) %": "worst",
    "harms": "harms",
    "upload per client": "upload",
    "reply per client": "reply",
}


def table(results: Mapping[str, Any]) -> Table:
    """One line a method, aggregated over seeds."""
    made = Table(box=None, pad_edge=False)
    for column in COLUMNS.values():
        made.add_column(column, justify="left" if column == "method" else "right", vertical="bottom")
    for cells in tables.result_table(results):
        row = dict(zip(tables.HEADER, cells, strict=True))
        if len(row["method"]) > NAME:
            row["method"] = row["method"].replace(":", ":\n")
        for column, details in (("worst client (matched) %", " ±"), ("harms", " (")):
            row[column] = row[column].partition(details)[0]
        made.add_row(*(Text(row[column]) for column in COLUMNS))  # a name is no markup
    return made


def print_all(results: Mapping[str, Any], console: Console) -> None:
    """The table, what changed from round to round, notes and the verdict."""
    title = "accuracy in %, mean over clients and their worst (matched); bytes per client"
    console.print(f"{clean(results.get('name'))}: {title}", markup=False, highlight=False, emoji=False)
    console.print(table(results))
    for line in rounds.lines(results):
        console.print(line, markup=False, highlight=False)
    for warning in results.get("warnings", []):
        console.print(f"note: {warning}", markup=False, highlight=False)
    console.print(f"verdict: {judge(results, summarise(results)).headline}", markup=False, highlight=False)


def text(results: Mapping[str, Any]) -> str:
    """The same as plain text."""
    stream = io.StringIO()
    print_all(results, Console(file=stream, width=WIDTH, color_system=None))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())
