"""What a person sees while a run lasts."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from fedbicross.runs import progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress.time, "monotonic", made)
    return made


def test_plain_lines_come_now_and_then_and_say_how_long_it_will_take(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    update = progress.PlainProgress().start("training north", 10)
    for done in range(1, 11):
        update(done, "loss 0.5")
        clock.now += 2
    assert capsys.readouterr().err.splitlines() == [
        "training north: 4/10, about 12 s left  loss 0.5",
        "training north: 7/10, about 6 s left  loss 0.5",
        "training north: 10/10  loss 0.5",
    ]


def test_what_an_earlier_process_did_does_not_count_as_pace(clock: Clock) -> None:
    left = progress.TimeLeft(1000)
    assert left.words(900, clock.now) == ""
    assert left.words(901, clock.now + 60) == ", about 99 min 00 s left"


def test_one_line_in_a_notebook(clock: Clock) -> None:
    stream = io.StringIO()
    shown = progress.LineProgress(stream)
    shown.say("== fedavg, seed 0 (method 1 of 2)")
    methods = shown.start("all methods", 2)
    methods(0, "fedavg")
    clock.now += 1
    training = shown.start("training\x1b north", 4)
    training(1, "")
    clock.now += 10
    training(2, "")
    training(3, "")  # too soon to be drawn
    training(4, "")
    clock.now += 10
    methods(1, "")
    methods(2, "")
    drawn = [text.strip() for text in stream.getvalue().replace("\n", "\r").split("\r") if text.strip()]
    assert drawn == [
        "== fedavg, seed 0 (method 1 of 2)",
        "all methods: 0/2",
        "all methods: 0/2  training\\x1b north: 1/4",
        "all methods: 0/2  training\\x1b north: 2/4, about 20 s left",
        "all methods: 1/2, about 21 s left",
    ]
    assert stream.getvalue().rstrip("\r").endswith(" " * progress.WIDTH), "at the end the line is empty"
    assert shown.parts == {}


def test_bars_on_a_terminal_look_back_further_than_one_method(clock: Clock) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with progress.RichProgress(console) as shown:
        update = shown.start("all methods", 4)
        shown.bars.get_time = clock  # type: ignore[method-assign]
        shown.bars.tasks[0].get_time = clock  # type: ignore[misc]
        for done in range(4):
            update(done, f"method {done}")
            clock.now += 120
        assert shown.bars.tasks[0].time_remaining == 120
        update(4, "")
        assert not shown.bars.tasks
    assert "all methods: done" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("shell", "terminal", "kind"),
    [
        (SimpleNamespace(kernel=None), True, progress.LineProgress),
        (SimpleNamespace(), True, progress.RichProgress),  # IPython on a terminal
        (None, True, progress.RichProgress),
        (None, False, progress.PlainProgress),
    ],
)
def test_the_place_decides(shell: object, terminal: bool, kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(progress.sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: terminal, raising=False)
    with progress.shown() as found:
        assert isinstance(found, kind)
    monkeypatch.delitem(progress.sys.modules, "IPython")
    assert not progress.in_notebook()
