from __future__ import annotations

import torch
from benchmarks.falcon_teachers import REAL, SENDER, UNIFORM, cell, soft_labels
from torch import nn

from fedbicross.context import MemoryStore
from small import TINY_METHODS

COMMON = {
    "model": "resnet8",
    "clients": 3,
    "data": {"name": "cells", "image_size": 12, "train_size": 120, "test_size": 30},
    "partition": {"kind": "dirichlet", "alpha": 0.3},
    "device": "cpu",
}


class Sure(nn.Module):
    """Always gives one class of three."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.which = which

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.eye(3)[self.which].expand(len(tokens), 3) * 10


def test_who_is_listened_to() -> None:
    sequences, labels = [torch.zeros(2, 1, 4), torch.zeros(1, 1, 4)], [torch.tensor([0, 0]), torch.tensor([2])]
    knows = torch.tensor([[9, 0, 0], [0, 0, 1]])
    found = soft_labels([Sure(0), Sure(2)], sequences, labels, knows, 1.0)
    truth = {what: soft[torch.arange(3), torch.cat(labels)] for what, soft in found.items()}
    sure = float((torch.eye(3)[0] * 10).softmax(0)[0])
    assert torch.allclose(truth[SENDER], torch.tensor([sure] * 3))
    assert torch.allclose(truth["only those that have the class"], torch.tensor([sure] * 3))
    assert torch.allclose(truth[UNIFORM], torch.full((3,), (sure + (1 - sure) / 2) / 2), atol=1e-4)
    assert truth["weighted by images"][0] > 0.89 and truth["weighted by images"][2] < 0.11
    for soft in found.values():
        assert torch.allclose(soft.sum(1), torch.ones(3))


def test_teachers_and_students_on_tiny_data() -> None:
    settings = {**TINY_METHODS["falcon"], "send": "sequences", "epochs_classifier": 2}
    rows = cell(0, COMMON, settings, MemoryStore())
    teachers = [row["what"] for row in rows if row["kind"] == "teacher"]
    students = [row["what"] for row in rows if row["kind"] == "student"]
    assert students[1 : 1 + len(teachers)] == teachers and students[0] == "no teacher"
    assert {UNIFORM, SENDER, REAL} <= set(teachers)
    assert all(0 <= row["accuracy"] <= 1 and 0 <= row["balanced"] <= 1 for row in rows)
    again = cell(0, COMMON, settings, MemoryStore())
    assert [row["accuracy"] for row in rows] == [row["accuracy"] for row in again]
