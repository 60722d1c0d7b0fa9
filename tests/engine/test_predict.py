from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedbicross import models
from fedbicross.context import Task
from fedbicross.engine import predict
from fedbicross.messages import Predictor

TASK = Task(("a", "b", "c"), 8, 3, "resnet8")
IMAGES = np.random.default_rng(0).integers(0, 256, (7, 8, 8, 3), np.uint8)
WEIGHTS = torch.tensor([[0.2, 0.5, 0.0], [0.8, 0.5, 1.0]])


def network(seed: int, architecture: str = "resnet8") -> dict[str, Tensor]:
    model = models.build(architecture, 3, 3, 8)
    models.initialise(model, torch.Generator().manual_seed(seed))
    return model.state_dict()


def pair(**more: Any) -> Predictor:
    return Predictor(TASK, ("resnet8", "cnn"), (network(0), network(1, "cnn")), **more)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Batches of three, and for each pass of a network how many images it saw."""
    passes: list[int] = []

    def counted(networks: list[nn.Module], images: Tensor, precision: str) -> Tensor:
        passes.extend([len(images)] * len(networks))
        return real(networks, images, precision)

    real = predict.member_logits
    monkeypatch.setattr(predict, "BATCH", 3)
    monkeypatch.setattr(predict, "member_logits", counted)
    return passes


@pytest.mark.parametrize(
    "predictor",
    [
        pair(),
        pair(combine="mean_probs", temperature=2.0),
        pair(combine="class_weighted", class_weights=WEIGHTS),
        pair(combine="consensus", class_weights=WEIGHTS, log_prior=torch.tensor([-1.0, -2.0, -0.5])),
        Predictor(TASK, constant=torch.tensor([0.2, 0.3, 0.5])),
    ],
    ids=["mean_logits", "mean_probs", "class_weighted", "consensus", "constant"],
)
def test_shared_answers_are_the_same_bits(predictor: Predictor, asked: list[int]) -> None:
    answers = predict.Answers(IMAGES)
    plain = predict.probabilities(predictor, IMAGES, batch=3)
    for _ in range(2):  # asked, and remembered
        assert answers.probabilities(predictor).tobytes() == plain.tobytes()
    assert predict.Answers(IMAGES[:0]).probabilities(predictor).shape == (0, 3)


def test_a_network_is_asked_once_whoever_uses_it(asked: list[int]) -> None:
    answers, first, second = predict.Answers(IMAGES), network(0), network(1)
    answers.probabilities(Predictor(TASK, ("resnet8",), (first,)))
    assert asked == [3, 3, 1]
    copied = {name: value.clone() for name, value in first.items()}  # as read from another file
    answers.probabilities(Predictor(TASK, ("resnet8", "resnet8"), (second, copied)))
    assert asked == [3, 3, 1] * 2


def test_a_changed_network_is_another_one(asked: list[int]) -> None:
    answers, state = predict.Answers(IMAGES), network(0)
    predictor = Predictor(TASK, ("resnet8",), (state,))
    before = answers.probabilities(predictor)
    state["head.bias"] += torch.tensor([1.0, 0.0, 0.0])
    changed = answers.probabilities(predictor)
    assert (changed[:, 0] > before[:, 0]).all()
    assert changed.tobytes() == predict.probabilities(predictor, IMAGES, batch=3).tobytes()


def test_only_the_latest_answers_are_kept(asked: list[int]) -> None:
    answers = predict.Answers(IMAGES, most=2 * IMAGES.shape[0] * 3 * 4)  # room for two networks
    one, two, three = (Predictor(TASK, ("resnet8",), (network(seed),)) for seed in range(3))
    for predictor in (one, two, one, three, one):
        answers.probabilities(predictor)
    assert asked == [3, 3, 1] * 3
    answers.probabilities(two)  # the oldest had to go
    assert asked == [3, 3, 1] * 4
