"""Progress for people: live bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichBars

from fedbicross.errors import printable

if TYPE_CHECKING:
    from fedbicross.context import Progress

SECONDS_BETWEEN_LINES = 5.0


class RememberLast:
    """Wraps a progress and remembers which work started last, for error messages."""

    def __init__(self, inner: Progress) -> None:
        self.inner, self.last = inner, "reading the data"

    def start(self, label: str, total: int) -> Callable[[int, str], None]:
        """Begin a piece of work."""
        self.last = label
        return self.inner.start(label, total)

    def say(self, message: str) -> None:
        """One line for the person."""
        self.inner.say(message)


class PlainProgress:
    """One line when a piece of work ends, and now and then while it lasts."""

    def start(self, label: str, total: int) -> Callable[[int, str], None]:
        """Begin a piece of work."""
        last = time.monotonic()

        def update(done: int, note: str) -> None:
            nonlocal last
            now = time.monotonic()
            if done >= total or now - last >= SECONDS_BETWEEN_LINES:
                last = now
                self.say(f"{label}: {done}/{total}" + (f"  {note}" if note else ""))

        return update

    def say(self, message: str) -> None:
        """One line on standard error, so that standard output stays for results."""
        print(printable(message), file=sys.stderr, flush=True)


class RichProgress:
    """Live bars that vanish when done, above them the lines that were said."""

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[note]}"),
        )
        self.bars = RichBars(*columns, console=console, transient=True)

    def __enter__(self) -> RichProgress:
        self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.stop()

    def start(self, label: str, total: int) -> Callable[[int, str], None]:
        """Begin a piece of work."""
        task = self.bars.add_task(escape(printable(label)), total=total, note="")

        def update(done: int, note: str) -> None:
            self.bars.update(task, completed=done, note=escape(note))
            if done >= total:
                self.bars.remove_task(task)
                self.say(f"{label}: done" + (f"  ({note})" if note else ""))

        return update

    def say(self, message: str) -> None:
        """One line above the bars."""
        self.console.print(printable(message), markup=False, highlight=False)
