"""The result table and the verdict as text, for a terminal, a log or a Python prompt."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedbicross.report import rounds, tables
from fedbicross.report.metric import NAMES, judged_by
from fedbicross.report.summary import summarise
from fedbicross.report.text import clean
from fedbicross.report.verdict import judge

WIDTH = 100  # columns, where the reader has not got a width of his own
NAME = 25  # columns of a method's name; a longer one is broken after its colons
# Short titles of the first columns of the table in the report; it has the others, and every row's verdict.
COLUMNS = ("method", "global", "matched", "label-set", "worst", "harms", "upload", "reply")


def table(results: Mapping[str, Any]) -> Table:
    """One line a method, aggregated over seeds."""
    made = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        made.add_column(column, justify="left" if column == "method" else "right", vertical="bottom")
    for cells in tables.result_table(results):
        row = dict(zip(COLUMNS, cells, strict=False))
        if len(row["method"]) > NAME:
            row["method"] = row["method"].replace(":", ":\n")
        for column, details in (("worst", " ±"), ("harms", " (")):
            row[column] = row[column].partition(details)[0]
        made.add_row(*(Text(row[column]) for column in COLUMNS))  # a name is no markup
    return made


def print_all(results: Mapping[str, Any], console: Console) -> None:
    """The table, what changed from round to round, notes and the verdict."""
    results = judged_by(results)
    metric = NAMES[str(results["judged_by"])]
    title = f"{metric} in %, mean over clients and their worst (matched); bytes per client"
    console.print(f"{clean(results.get('name'))}: {title}", markup=False, highlight=False, emoji=False)
    console.print(table(results))
    for line in rounds.lines(results):
        console.print(line, markup=False, highlight=False)
    for warning in results.get("warnings", []):
        console.print(f"note: {warning}", markup=False, highlight=False)
    verdict = judge(results, summarise(results))
    for line in (*verdict.beside, f"verdict: {verdict.headline}"):
        console.print(line, markup=False, highlight=False)


def text(results: Mapping[str, Any]) -> str:
    """The same as plain text."""
    stream = io.StringIO()
    print_all(results, Console(file=stream, width=WIDTH, color_system=None))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())
