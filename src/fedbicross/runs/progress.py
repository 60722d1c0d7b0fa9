"""Progress for people: live bars on a terminal, one line that is rewritten in a notebook, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichBars

from fedbicross.errors import printable
from fedbicross.report.text import duration

if TYPE_CHECKING:
    from fedbicross.context import Progress

SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_DRAWINGS = 0.2
WIDTH = 100  # of the line in a notebook


def shown() -> AbstractContextManager[Progress]:
    """The progress that suits where this process runs."""
    if in_notebook():
        return nullcontext(LineProgress(sys.stdout))
    if sys.stderr.isatty():
        return RichProgress(Console(stderr=True))
    return nullcontext(PlainProgress())


def in_notebook() -> bool:
    """Whether this process answers the cells of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")  # None outside of IPython


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


class TimeLeft:
    """How long a piece of work will still take, by its mean pace since it was first heard of."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.first: tuple[float, int] | None = None  # what was done before, in an earlier process, says nothing

    def words(self, done: int, now: float) -> str:
        """Such as ``, about 3 min 05 s left``; nothing as long as there is no pace."""
        if self.first is None:
            self.first = now, done
        began, before = self.first
        if not before < done < self.total:
            return ""
        seconds = max(1, round((now - began) / (done - before) * (self.total - done)))
        return f", about {f'{seconds} s' if seconds < 99 else duration(seconds)} left"


class PlainProgress:
    """One line when a piece of work ends, and now and then while it lasts."""

    def start(self, label: str, total: int) -> Callable[[int, str], None]:
        """Begin a piece of work."""
        last, left = time.monotonic(), TimeLeft(total)

        def update(done: int, note: str) -> None:
            nonlocal last
            now = time.monotonic()
            words = left.words(done, now)
            if done >= total or now - last >= SECONDS_BETWEEN_LINES:
                last = now
                self.say(f"{label}: {done}/{total}{words}" + (f"  {note}" if note else ""))

        return update

    def say(self, message: str) -> None:
        """One line on standard error, so that standard output stays for results."""
        print(printable(message), file=sys.stderr, flush=True)


class LineProgress:
    """All work at hand on one line that is rewritten, above it the lines that were said: for notebooks."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.parts: dict[int, str] = {}  # in the order in which they began
        self.begun, self.drawn = 0, 0.0

    def start(self, label: str, total: int) -> Callable[[int, str], None]:
        """Begin a piece of work."""
        left, number = TimeLeft(total), self.begun
        self.begun += 1

        def update(done: int, note: str) -> None:
            del note
            now = time.monotonic()
            self.parts[number] = printable(f"{label}: {done}/{total}{left.words(done, now)}")
            if done >= total:
                self.parts.pop(number)
            if now - self.drawn >= SECONDS_BETWEEN_DRAWINGS or not self.parts:
                self.drawn = now
                self._draw("  ".join(self.parts.values()))

        return update

    def say(self, message: str) -> None:
        """One line that stays."""
        self._draw("")
        print(printable(message), file=self.stream, flush=True)

    def _draw(self, text: str) -> None:
        self.stream.write(f"\r{text[:WIDTH]:<{WIDTH}}\r")
        self.stream.flush()


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
        # The pace of the last hour: a method takes longer than the 30 seconds that rich would look back.
        self.bars = RichBars(*columns, console=console, transient=True, speed_estimate_period=3600)

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
