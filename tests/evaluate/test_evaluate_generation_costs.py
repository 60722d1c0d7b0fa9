from __future__ import annotations

import torch
from torch import nn

from fedbicross.evaluate import generation_costs as costs

MIB = 1 << 20


def test_the_papers_numbers() -> None:
    assert costs.sequence_bytes(1, 5, 768) == 15 * 1024
    limit = costs.break_even(round(144.33 * MIB), 5, 768)
    assert 9_840 < limit < 9_860  # "about 9,850"
    assert costs.upload_size(limit, 5, 768, round(144.33 * MIB)).cheaper == "sequences"
    assert costs.upload_size(limit + 1, 5, 768, round(144.33 * MIB)).cheaper == "generator"


def test_the_cheaper_one_bounds_the_cost() -> None:
    for count in (0, 1, 50, 100, 1000):
        size = costs.upload_size(count, 2, 4, 2000)
        assert size.sequences == count * 32
        assert getattr(size, size.cheaper) == min(size.sequences, size.generator)


def test_bytes_of_a_module_are_those_of_its_tensors() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    assert costs.module_bytes(module) == 4 * (6 + 2 + 2 + 2 + 2 + 2) + 8  # and an int64 counter


def test_flops_per_sample_do_not_depend_on_how_many_are_made() -> None:
    weight = torch.ones(10, 20)
    for count in (1, 5):
        assert costs.flops_per_sample(lambda n: torch.ones(n, 10) @ weight, count) == 2 * 10 * 20
