from __future__ import annotations

import math

import pytest
import torch

from fedbicross.steps.head_counts import SMALLEST_TURN, counts_from_head

from .tiny import noise


def slow_counts(head: list[list[float]], first: list[list[float]]) -> list[float]:
    """The squared distance of each row from the line through what it was; 0 where the angle is next to nothing."""
    out = []
    for now, before in zip(head, first, strict=True):
        dot = sum(a * b for a, b in zip(now, before, strict=True))
        scale = dot / sum(b * b for b in before)
        across = sum((a - scale * b) ** 2 for a, b in zip(now, before, strict=True))
        turned = math.sqrt(across) > SMALLEST_TURN * math.sqrt(sum(a * a for a in now))
        out.append(across if turned else 0.0)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_that_only_became_shorter_counts_as_nothing(dtype: torch.dtype) -> None:
    first = noise(5, 8, seed=0).to(dtype)
    head = 0.97 * first
    head[1] += 0.1 * noise(8, seed=1).to(dtype)
    head[3] += 0.001 * noise(8, seed=2).to(dtype)
    found = counts_from_head(head, first)
    assert (found > 0).tolist() == [False, True, False, True, False]
    assert found.tolist() == pytest.approx(slow_counts(head.tolist(), first.tolist()))
    assert found[1] > 100 * found[3]


def test_many_steps_of_weight_decay_in_float32_turn_no_row() -> None:
    first = noise(4, 64, seed=3).float()
    head = first.clone()
    for _ in range(20_000):
        head -= 1e-2 * 5e-4 * head
    assert not torch.equal(head, first) and not bool(counts_from_head(head, first).any())


def test_rows_of_zeros_are_no_error() -> None:
    head = noise(3, 8, seed=4)
    assert counts_from_head(head, torch.zeros(3, 8)).tolist() == pytest.approx(head.double().square().sum(1).tolist())
    assert counts_from_head(torch.zeros(3, 8), head).tolist() == [0.0] * 3
