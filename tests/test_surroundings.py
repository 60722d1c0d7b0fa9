"""Time that is told once, whoever asks for it."""

from __future__ import annotations

from typing import Any

import pytest

from fedbicross import client_models, context, surroundings
from fedbicross.surroundings import Stopwatch
from small import tiny_clients, tiny_context


class Clock:
    """A time that passes only when told to."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (surroundings, context, client_models):
        monkeypatch.setattr(module, "time", clock)
    return clock


def test_each_second_is_told_once_and_shared_work_is_left_out(clock: Clock) -> None:
    watch = Stopwatch()
    watch.begin("fuse", "server")
    clock.now += 5
    assert watch.lap() == 5
    clock.now += 7
    watch.shared_seconds += 3  # of the seven
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


def test_checkpoints_of_shared_work_are_charged_as_shared_work_only(clock: Clock) -> None:
    events: list[dict[str, Any]] = []
    ctx = tiny_context()
    ctx.event = lambda **fields: events.append(fields)

    def make() -> bytes:
        clock.now += 25
        ctx.save_stage("generator", {}, {"epoch": 1})
        clock.now += 15
        return b"made"

    with ctx.measured("upload", "client-0"):
        clock.now += 2
        assert ctx.shared("generator", tiny_clients(1)[0], {}, make) == b"made"
        clock.now += 3
        ctx.save_stage("own", {}, {})
    assert [(e["event"], e["seconds"]) for e in events] == [("trained", 40), ("partial", 5), ("upload", 0)]
