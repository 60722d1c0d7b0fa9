from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.fedisca_student import cell, federation, measured_anew

from benchmarks import fedisca_student
from fedbicross.parts import students

COMMON = {
    "model": "resnet8",
    "clients": 2,
    "data": {"name": "cells", "image_size": 12, "train_size": 60, "test_size": 30},
    "training": {"recipe": "modern", "epochs": 1, "batch_size": 16},
    "device": "cpu",
}
TINY = {"steps": 3, "batch": 8, "epochs": 2, "lr": 0.1}


def test_every_way_on_tiny_data() -> None:
    bench = federation({"kind": "iid"}, 0, COMMON)
    found = {teacher["way"]: rows for rows, teacher in cell(bench, TINY, fedisca_student.WAYS)}
    assert list(found) == list(fedisca_student.WAYS)
    for way, rows in found.items():
        assert [row["trajectory"] for row in rows] == [1, 2]
        for row in rows:
            assert sum(row["given"]) == 30 and 0 <= row["accuracy"] <= 1, way
            assert set(row["statistics"]) >= {"real training images", "finished, all trajectories"}
    plain = found["rate 0.1, no memory"]
    assert plain[0]["agreement"]["earlier"] is None and plain[1]["agreement"]["earlier"] is not None
    assert plain[0]["accuracy"] == found["the first trajectory every time"][0]["accuracy"], "the same until there"


def test_a_memory_is_learnt_from_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[bool]] = {}
    learn = students.learn

    def counted(student: Any, sample: Any, config: Any, lr: float, track: bool = True) -> Any:
        seen[way].append(track)
        return learn(student, sample, config, lr, track)

    monkeypatch.setattr(students, "learn", counted)
    bench = federation({"kind": "iid"}, 0, COMMON)
    for way in ("rate 0.1, no memory", "memory of 300, one replay"):
        seen[way] = []
        list(cell(bench, TINY, {way: fedisca_student.WAYS[way]}))
    plain, memory = seen.values()
    new = 6  # two trajectories of three steps
    assert plain == [True] * new and memory.count(True) == new and memory.count(False) > 0


def test_only_statistics_are_measured_anew() -> None:
    bench = federation({"kind": "iid"}, 0, COMMON)
    model = bench.ctx.new_model(torch.Generator().manual_seed(0))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    images = torch.randn(96, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    after = measured_anew(model, images, torch.Generator().manual_seed(2))
    names = dict(model.named_parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items()), "a copy was changed"
    assert all(torch.equal(before[name], dict(after.named_parameters())[name]) for name in names)
    first = next(module for module in after.modules() if isinstance(module, torch.nn.BatchNorm2d))
    seen = next(module for module in after.modules() if isinstance(module, torch.nn.Conv2d))(images)
    assert torch.allclose(first.running_mean, seen.mean((0, 2, 3)), atol=1e-5)
