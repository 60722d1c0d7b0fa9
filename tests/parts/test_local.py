"""What a client has without a federation, against its answers image by image."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedbicross.bundle import validate
from fedbicross.engine.predict import load_model
from fedbicross.messages import Client
from fedbicross.parts.local import own_model
from small import tiny_clients, tiny_context


def lacking_a_class() -> Client:
    client = tiny_clients(1)[0]
    return replace(client, labels=np.where(client.labels == 1, 0, client.labels))


def slow(client: Client, loss: str) -> np.ndarray:
    """Image by image: what the network says, times the client's class mix where its training kept that out."""
    state = tiny_context().with_loss(loss).local_model(client).state
    network, counts, out = load_model("resnet8", state, 3, 3, 12), client.class_counts(3), []
    for image in client.images[:6]:
        x = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 127.5 - 1
        said = network(x)[0].detach().softmax(0)
        answer = [float(said[c]) * (counts[c] if loss == "balanced" else 1) for c in range(3)]
        out.append([value / sum(answer) for value in answer])
    return np.array(out)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("loss", ["cross_entropy", "balanced"])
def test_the_class_mix_is_added_back_where_it_was_kept_out(loss: Any) -> None:
    client = lacking_a_class()
    found = own_model(client, tiny_context(), loss).probabilities(client.images[:6])
    assert np.allclose(found, slow(client, loss), atol=1e-9)
    if loss == "balanced":
        assert (found[:, 1] == 0).all(), "a class that the client never had"


@pytest.mark.usefixtures("float64")
def test_two_networks_answer_by_the_mean_of_their_log_probabilities() -> None:
    client, ctx = lacking_a_class(), tiny_context()
    pair = own_model(client, ctx, "both")
    validate.check_predictor(pair)
    found, expected = pair.probabilities(client.images[:6]), np.zeros((6, 3))
    for row, (plain, balanced) in enumerate(zip(slow(client, "cross_entropy"), slow(client, "balanced"), strict=True)):
        scores = [math.exp((math.log(a) + math.log(b)) / 2) if b else 0.0 for a, b in zip(plain, balanced, strict=True)]
        expected[row] = [score / sum(scores) for score in scores]
    assert np.allclose(found, expected, atol=1e-9)
    assert (found[:, 1] == 0).all(), "one of the two rules the class out"


@pytest.mark.parametrize("recipe", ["cross_entropy", "balanced"])
def test_without_a_loss_it_is_that_of_the_recipe_and_both_are_both_by_any_recipe(recipe: Any) -> None:
    client, ctx = tiny_clients(1)[0], tiny_context(loss=recipe)
    assert own_model(client, ctx, None).pack() == own_model(client, ctx, recipe).pack()
    pair = own_model(client, ctx, "both")
    singles = [own_model(client, ctx, loss).states[0] for loss in ("cross_entropy", "balanced")]
    for state, expected in zip(pair.states, singles, strict=True):
        assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert ctx.training.loss == recipe, "the run's own recipe is left alone"


def test_each_loss_has_a_network_of_its_own() -> None:
    client, ctx = tiny_clients(1)[0], tiny_context()
    plain, balanced = own_model(client, ctx, "both").states
    assert not all(torch.equal(plain[name], balanced[name]) for name in plain)


@pytest.mark.parametrize("loss", ["balanced", "both"])
def test_a_client_with_one_class_says_so(loss: Any) -> None:
    client = tiny_clients(1)[0]
    client = replace(client, labels=np.full_like(client.labels, 2))
    found = own_model(client, tiny_context(), loss).probabilities(client.images)
    assert (found[:, 2] == 1).all()
