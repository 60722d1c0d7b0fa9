"""`fedbicross check`: look at images before anything is trained on them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbicross import data
from fedbicross.atomic import write_atomic
from fedbicross.cli.common import AcceptOption, print_table
from fedbicross.cli.show import print_json, progress
from fedbicross.errors import DataError, printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedbicross.data.check import Checked

REFUSED = 1
LAYOUTS = {
    "class_folders": "a folder for each class",
    "split_folders": "a folder for each set, in it one for each class",
    "class_then_split": "a folder for each class, in it one for each set",
    "manifest": "a CSV manifest",
    "arrays": "arrays",
    "unknown": "not recognised",
}


def check(
    path: Annotated[str, typer.Argument(help="a folder, CSV manifest or .npz file, or a known data set")],
    grid: Annotated[Path | None, typer.Option(help="also write a PNG with examples of every class")] = None,
    accept: AcceptOption = None,
    json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Look at every image: sets, classes, copies, patients, unreadable files. Ends with 1 if `run` would refuse."""
    codes = accept or []
    data.check.check_accept(codes)
    with progress() as shown:
        found = data.check.check(path, shown)
    if grid is not None and found.examples:
        try:
            write_atomic(grid, data.grid.example_grid(found.examples))
        except OSError as error:
            raise DataError("cannot_write", f"cannot write {grid}: {error.strerror}") from None
    if json:
        print_json(found.as_json(codes))
    else:
        _print(found, codes)
        if grid is not None and found.examples:
            print(f"examples: {grid}")
    if found.refused(codes):
        raise typer.Exit(REFUSED)


def _print(found: Checked, accept: list[str]) -> None:
    _say(f"{found.path}: {LAYOUTS[found.layout]}")
    if found.classes:
        title = f"images ({'your own test set' if found.test_set == 'given' else 'test set held out, as `run` would'})"
        rows = [(name, found.train[name], found.test[name]) for name in found.classes]
        rows.append(("all", sum(found.train.values()), sum(found.test.values())))
        print_table(title, ("class", "train", "test"), rows)
        _say(f"formats: {_counts(found.kinds)}")
        _say(f"pixels: {_counts(found.sizes)}")
        _say(f"modes: {_counts(found.modes)}")
        patients = found.patients
        known = "unknown" if patients is None else f"{patients['train']} in train, {patients['test']} in test"
        _say(f"patients: {known}")
    for title, problems in (("cannot be read", found.unreadable), ("passed over", found.skipped)):
        if problems:
            _say(f"{title} ({len(problems)}):")
        for problem in problems:
            _say(f"  {problem.where}: {problem.reason.removeprefix(f'{problem.where} ')} [{problem.code}]")
    if found.copies:
        _say(f"copies, pixel for pixel ({len(found.copies)}; near copies are not searched):")
    for group in found.copies:
        _say(f"  {group['where']}: {' = '.join(group['images'])}")
    for finding in found.findings:
        level = "accepted" if finding.code in accept else finding.level
        _say(f"{level}[{finding.code}]: {finding}")
    _say("refused: `fedbicross run` would stop here" if found.refused(accept) else "fine: `fedbicross run` would go on")


def _counts(values: Mapping[str, int]) -> str:
    """The most frequent ones; a folder of photographs may have hundreds of sizes."""
    shown = ", ".join(f"{name} ({count:,})" for name, count in list(values.items())[:6])
    return shown if len(values) <= 6 else f"{shown} and {len(values) - 6} more"


def _say(line: str) -> None:
    print(printable(line))
