from __future__ import annotations

import pytest
import torch

from fedbicross.exchange import Predictor, Reply, Upload, file_name
from small import tiny_context


def test_bundles_round_trip() -> None:
    task = tiny_context().task
    upload = Upload("a", task, {"w": torch.ones(2)}, class_counts=[1, 2, 3], num_samples=6, extra={"k": 1})
    assert Upload.unpack(upload.pack()).pack() == upload.pack()
    reply = Reply({"w": torch.ones(2)}, {"k": "v"})
    assert Reply.unpack(reply.pack()).pack() == reply.pack()
    predictor = Predictor(task, ("a", "b"), ({"w": torch.ones(1)}, {"w": torch.zeros(1)}), "mean_probs")
    assert Predictor.unpack(predictor.pack()).pack() == predictor.pack()
    weights, prior = torch.tensor([[0.5, 1.0, 0.0], [0.5, 0.0, 0.0]]), torch.tensor([-0.5, -1e4, -2.0])
    mixed = Predictor(task, ("a", "b"), ({"w": torch.ones(1)},) * 2, "consensus", weights, log_prior=prior)
    back = Predictor.unpack(mixed.pack())
    assert back.pack() == mixed.pack() and back.combine == "consensus" and back.constant is None
    assert torch.equal(back.log_prior, prior) and torch.equal(back.class_weights, weights)
    assert Predictor.unpack(predictor.pack()).log_prior is None
    assert Upload("a", task).empty
    assert Reply().empty
    assert not upload.empty


@pytest.mark.parametrize("name", ["a b", "../x", "", ".", "x" * 10_000, "<script>", "é", "a\0b", "con/aux"])
def test_strange_client_names_become_safe_file_names(name: str) -> None:
    safe = file_name(name)
    assert "/" not in safe and len(safe) < 80 and not safe.startswith(".")
    assert safe != file_name(name + "x")
