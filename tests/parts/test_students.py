from __future__ import annotations

import pytest
import torch

from fedbicross.parts.students import new_student, rate
from small import tiny_context


def test_rates() -> None:
    assert [rate("step", p) for p in (0.0, 0.49, 0.5, 0.75)] == pytest.approx([1, 1, 0.1, 0.01])
    assert [rate("cosine", p) for p in (0.0, 0.5, 1.0)] == pytest.approx([1, 0.5, 0])
    assert rate("constant", 0.9) == 1
    assert [rate("step", p, milestones=(0.4, 0.8)) for p in (0.3, 0.4, 0.8)] == pytest.approx([1, 0.1, 0.01])


def test_students_differ_by_number_and_by_seed() -> None:
    ctx = tiny_context()
    first, again, other = (new_student(ctx, k, passes=0) for k in (0, 0, 1))
    ctx.seed = 1
    weights = [student.state()["head.weight"] for student in (first, again, other, new_student(ctx, 0, passes=0))]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2]) and not torch.equal(weights[0], weights[3])
