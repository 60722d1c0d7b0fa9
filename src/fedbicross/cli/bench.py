"""`fedbicross bench`: many methods on many federations, as cells of a table."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fedbicross import bench
from fedbicross.cli.run import Engine
from fedbicross.cli.show import print_json, progress
from fedbicross.errors import ConfigError, RunError

app = typer.Typer(help="Tables of many methods on many federations.", no_args_is_help=True, rich_markup_mode=None)

SuiteArgument = Annotated[str, typer.Argument(help="a suite of `bench list`, or a TOML file")]
Suites = Annotated[list[str] | None, typer.Argument(help="suites of `bench list`, or TOML files (default: all)")]
Out = Annotated[Path, typer.Option(help="folder of the cells")]
DataDir = Annotated[Path | None, typer.Option(help="where .npz files and folders of images lie")]
BudgetName = Annotated[str | None, typer.Option(help="paper, tenth, minute or smoke (default: the suite's)")]
Cells = Annotated[str | None, typer.Option("--cells", help="only these, e.g. data=blood*,alpha=0.1|0.3,method=primum")]

STATES = ("done", "stale", "failed", "missing", "not available here")  # in the order of the columns


class Format(StrEnum):
    """How a table is written."""

    md = "md"
    csv = "csv"
    latex = "latex"
    html = "html"


@app.command("list")
def listing(json: Annotated[bool, typer.Option("--json", help="for programs")] = False) -> None:
    """List the suites that come with the package."""
    found = {}
    for name in bench.suite.builtin():
        suite = bench.suite.load(name)[1]
        cells = bench.suite.expand(name, suite)
        federations = {cell.federation for cell in cells}
        found[name] = {
            "title": suite.title,
            "budget": suite.budget,
            "cells": len(cells),
            "federations": len(federations),
            "published": sum(len(values) for table in suite.published for values in table.rows.values()),
        }
    if json:
        print_json(found)
        return
    table = Table(box=None, pad_edge=False)
    for title in ("suite", "what", "budget", "federations", "cells", "published numbers"):
        table.add_column(title, justify="left" if title in ("suite", "what", "budget") else "right")
    for name, facts in found.items():
        numbers = (str(facts[key]) for key in ("federations", "cells", "published"))
        table.add_row(name, str(facts["title"]), str(facts["budget"]), *numbers)
    Console().print(table, markup=False)


@app.command("run")
def run(
    suite: SuiteArgument,
    cells: Cells = None,
    budget: BudgetName = None,
    budget_minutes: Annotated[float | None, typer.Option(min=0, help="stop after so long; it goes on later")] = None,
    data_dir: DataDir = None,
    out: Out = Path("bench"),
    engine: Annotated[Engine, typer.Option(help="local, or ray: cells spread over its workers")] = Engine.local,
    workers: Annotated[int, typer.Option(min=1, help="processes on this machine; they share its GPU")] = 1,
    keep_work: Annotated[bool, typer.Option("--keep-work", help="keep client models of finished federations")] = False,
) -> None:
    """Make the cells that are not there or stale; the same command again goes on where it stopped."""
    if workers > 1 and engine is Engine.ray:
        raise ConfigError("ray_or_workers", "--workers is for this machine alone; --engine ray has workers of its own")
    name, content = bench.suite.load(suite)
    everything = bench.suite.expand(name, content, budget)
    wanted = bench.suite.choose(everything, cells)
    make = bench.work.run_on_ray if engine is Engine.ray else bench.work.run
    if workers > 1:
        make = partial(bench.work.run_in_processes, workers=workers)
    with progress() as shown:
        done = make(
            wanted, out, data_dir, suite=everything, progress=shown, minutes=budget_minutes, keep_work=keep_work
        )
    facts = [f"{len(done.made)} cells made"]
    facts += [f"{len(done.left)} left, the same command goes on"] if done.left else []
    facts += [f"{len(done.failed)} failed"] if done.failed else []
    facts += [f"{len(done.unavailable)} not available here"] if done.unavailable else []
    print(f"{name}: {', '.join(facts)}")
    for key, error in done.failed.items():
        typer.echo(f"{key}: {error}", err=True)
    if done.failed:
        raise next(iter(done.failed.values()))


@app.command("status")
def status(
    suites: Suites = None,
    cells: Cells = None,
    budget: BudgetName = None,
    data_dir: DataDir = None,
    out: Out = Path("bench"),
    json: Annotated[bool, typer.Option("--json", help="every cell, for programs")] = False,
) -> None:
    """Say which cells are done, stale, missing, failed or not available here."""
    statuses = []
    for given in suites or list(bench.suite.builtin()):
        name, content = bench.suite.load(given)
        chosen = bench.suite.choose(bench.suite.expand(name, content, budget), cells)
        statuses += bench.cells.statuses_of(chosen, out, data_dir)
    if json:
        print_json([{**status.cell.identity(), "state": status.state, "reason": status.reason} for status in statuses])
        return
    table = Table(box=None, pad_edge=False)
    for title in ("suite", "budget", "federation", *STATES):
        table.add_column(title, justify="left" if title in ("suite", "budget", "federation") else "right")
    rows: dict[tuple[str, str, str], Counter[str]] = {}
    for status in statuses:
        cell = status.cell
        rows.setdefault((cell.suite, cell.budget, cell.federation), Counter())[status.state] += 1
    for key, counts in rows.items():
        table.add_row(*key, *(str(counts[name]) if counts[name] else "" for name in STATES))
    total = sum(rows.values(), Counter[str]())
    Console(width=160).print(table, markup=False)
    print(", ".join(f"{total[name]} {name}" for name in STATES))
    for status in statuses:
        if status.state in ("stale", "failed"):
            print(f"{status.state}: {status.cell.key}: {status.reason}")


@app.command("pack")
def pack(
    to: Annotated[Path, typer.Option(help="the file, e.g. cells.jsonl.gz")],
    suites: Suites = None,
    out: Out = Path("bench"),
) -> None:
    """Put all stored cells into one file, to carry them to another machine."""
    found = bench.carry.pack(suites or list(bench.suite.builtin()), out, to)
    print(f"{len(found)} cells in {to} ({to.stat().st_size:,} bytes)")


@app.command("unpack")
def unpack(
    file: Annotated[Path, typer.Argument(help="what `bench pack` wrote")],
    suites: Suites = None,
    out: Out = Path("bench"),
) -> None:
    """Put the cells of a packed file into the folder; those that are what the suite asks for replace others."""
    done = bench.carry.unpack(file, suites or list(bench.suite.builtin()), out)
    print(f"{len(done.written)} cells written, {len(done.kept)} kept as they were, {len(done.refused)} refused")
    for problem in done.refused:
        typer.echo(problem, err=True)
    if done.refused:
        raise RunError("cells_refused", f"{len(done.refused)} lines of {file} are no cells of these suites")


@app.command("table")
def table(
    suites: Suites = None,
    form: Annotated[Format, typer.Option("--format", help="md, csv, latex or html")] = Format.md,
    out: Out = Path("bench"),
    to: Annotated[
        Path | None, typer.Option(help="write to this file; a page with a block of its own gets only that")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="write nothing; exit with 1 if --to differs from the stored cells")
    ] = False,
) -> None:
    """Make the table of all stored cells, or check one that was made. The smoke suite is left out unless named."""
    if check and to is None:
        raise ConfigError("no_page", "--check needs --to: the page that is to be checked")
    wanted = suites or [name for name in bench.suite.builtin() if name != "smoke"]  # whose numbers mean nothing
    text = bench.publish.render(wanted, form.value, out, to)
    if to is None:
        print(text, end="")
        return
    if not check:
        bench.publish.write(to, text, form.value)
        return
    differences = bench.publish.differences(to, text, form.value)
    for line in differences:
        typer.echo(line, err=True)
    if differences:
        typer.echo(f"{to} is not what the stored cells say; make it again without --check", err=True)
        raise typer.Exit(1)
