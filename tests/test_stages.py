"""A stage that is killed anywhere goes on to the same result, with steps or with sources of samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from fedbicross.context import Context, MemoryStore
from small import Killed, Mortal, tiny_context


class Sum:
    """A part: a sum and how often something was added."""

    def __init__(self) -> None:
        self.value, self.count = 0.0, 0

    def add(self, value: float) -> None:
        self.value, self.count = 3 * self.value + value, self.count + 1

    def tensors(self) -> dict[str, Tensor]:
        return {"value": torch.tensor(self.value, dtype=torch.float64), "count": torch.tensor(self.count)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.value, self.count = float(tensors["value"]), int(tensors["count"])


class Source:
    """Hands out ``number * 10 + 1, +2, +3``."""

    def __init__(self, number: int, saved: Mapping[str, Tensor] | None) -> None:
        self.number, self.done = number, 0 if saved is None else int(saved["done"])

    def tensors(self) -> dict[str, Tensor]:
        return {"done": torch.tensor(self.done)}

    def __iter__(self) -> Iterator[float]:
        while self.done < 3:
            self.done += 1
            yield float(self.number * 10 + self.done)


def steps(ctx: Context) -> tuple[Any, ...]:
    total = Sum()
    stage = ctx.stage("count", "counting", 9, total=total)
    for step in stage.steps():
        assert stage.progress == step / 9
        total.add(step)
        stage.numbers["last"] = step
    return total.value, total.count, stage.numbers


def samples(ctx: Context) -> tuple[Any, ...]:
    sums, seen = [Sum(), Sum()], []
    stage = ctx.stage("read", "reading", 9, sums=sums)
    for number, pair in stage.samples("round", 3, [Source, lambda number, saved: Source(number + 5, saved)]):
        assert stage.note == f"round {number + 1}/3"
        for part, value in zip(sums, pair, strict=True):
            part.add(value)
        seen.append(pair)
    return sums[0].value, sums[1].value, sums[0].count, seen[-1]


def kept(store: MemoryStore) -> Context:
    ctx = tiny_context()
    ctx.store, ctx.seconds_between_stages = store, 0
    return ctx


@pytest.mark.parametrize("work", [steps, samples])
@pytest.mark.parametrize("lives", [1, 2, 5])
def test_killed_again_and_again_it_ends_with_the_same(work: Any, lives: int) -> None:
    expected, store, kills = work(kept(MemoryStore())), Mortal(), 0
    for _ in range(20):
        store.budget = lives
        try:
            found = work(kept(store))
            break
        except Killed:
            kills += 1
    assert found == expected
    files = 9 if work is steps else 8  # of samples all but the last, at which methods look again
    assert kills == math.ceil(files / lives) - 1


def test_nothing_is_kept_before_it_is_due() -> None:
    ctx = tiny_context()
    steps(ctx)
    samples(ctx)
    assert ctx.load_stage("count") is None and ctx.load_stage("read") is None


def test_an_end_that_is_worth_it_is_kept_at_once_and_only_once() -> None:
    ctx, total = tiny_context(), Sum()
    for step in ctx.stage("end", "to the end", 4, keep_end=True, total=total).steps():
        total.add(step)
    before, again = ctx.store.load(ctx.stage_file("end")), Sum()
    assert before is not None
    assert list(ctx.stage("end", "to the end", 4, keep_end=True, total=again).steps()) == []
    assert again.value == total.value and ctx.store.load(ctx.stage_file("end")) == before
