"""Time that is told once, whoever asks for it."""

from __future__ import annotations

from typing import Any

import pytest

from fedbicross import surroundings
from fedbicross.surroundings import Stopwatch
from small import tiny_context


class Clock:
    """A time that passes only when told to."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(surroundings, "time", clock)
    return clock


def test_each_second_is_told_once_and_shared_work_is_left_out(clock: Clock) -> None:
    watch = Stopwatch()
    watch.begin("fuse", "server")
    clock.now += 5
    assert watch.lap() == 5
    clock.now += 7
    watch.shared += 3  # of the seven
    assert watch.lap() == 4
    assert watch.lap() == 0
    assert watch.at_work == ("fuse", "server")


@pytest.mark.parametrize("shot", [1, 2])
def test_checkpoints_of_a_shot_are_not_counted_again_at_the_end(clock: Clock, shot: int) -> None:
    """A shot works with a copy of the context; the time of its checkpoints was once told twice."""
    events: list[dict[str, Any]] = []
    ctx = tiny_context()
    ctx.event = lambda **fields: events.append(fields)
    with ctx.measured("fuse", "server"):
        copy = ctx.at_shot(shot)
        clock.now += 30
        copy.save_stage("distillation", {}, {"step": 1})
        clock.now += 12
    assert [(e["event"], e["seconds"]) for e in events] == [("partial", 30), ("fuse", 12)]
    assert ctx.watch.at_work is None
    copy.save_stage("distillation", {}, {"step": 2})  # after the verb: nobody's time
    assert len(events) == 2
