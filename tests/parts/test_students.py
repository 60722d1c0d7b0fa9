from __future__ import annotations

import torch

from fedbicross.parts.students import new_student
from small import tiny_context


def test_students_differ_by_number_and_by_seed() -> None:
    ctx = tiny_context()
    first, again, other = (new_student(ctx, k, passes=0) for k in (0, 0, 1))
    ctx.seed = 1
    weights = [student.state()["head.weight"] for student in (first, again, other, new_student(ctx, 0, passes=0))]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2]) and not torch.equal(weights[0], weights[3])
