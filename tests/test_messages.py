from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from fedbicross.messages import Predictor, Reply, Upload
from small import tiny_clients, tiny_context


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
    assert back.referral is None and Predictor.unpack(predictor.pack()).log_prior is None
    assert Upload("a", task).empty
    assert Reply().empty
    assert not upload.empty


def test_a_model_with_a_referral_answers_the_same_after_a_round_trip() -> None:
    clients, ctx = tiny_clients(2), tiny_context(epochs=1)
    states, images = tuple(ctx.local_model(client).state for client in clients), clients[0].images
    weights, prior = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]), torch.tensor([-0.5, -1.0, -1e4])
    alone = Predictor(ctx.task, ("resnet8", "resnet8"), states, "consensus", weights, log_prior=prior)
    scores = np.log(Predictor(ctx.task, ("resnet8",), states[1:]).probabilities(images))
    odds = np.sort(scores[:, 2] - scores[:, :2].max(1))
    at = 6 + int(np.diff(odds)[6:18].argmax())  # where no rounding can change which images are referred
    referral = torch.tensor([1e4, 1e4, float(odds[at] + odds[at + 1]) / 2])
    model = replace(alone, referral=referral)
    back = Predictor.unpack(model.pack())
    assert back.pack() == model.pack() != alone.pack()
    for table, expected in ((back.referral, referral), (back.log_prior, prior), (back.class_weights, weights)):
        assert table is not None and torch.equal(table, expected)
    found = back.probabilities(images)
    assert np.array_equal(found, model.probabilities(images))
    assert ((found != alone.probabilities(images)).any(1)).sum() == 23 - at
