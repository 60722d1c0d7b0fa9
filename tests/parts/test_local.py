from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedbicross.engine.predict import load_model
from fedbicross.exchange import Client
from fedbicross.parts.local import own_model
from small import tiny_clients, tiny_context


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
def test_the_class_mix_is_added_back_where_it_was_kept_out(loss: str) -> None:
    client = tiny_clients(1)[0]
    client = replace(client, labels=np.where(client.labels == 1, 0, client.labels))  # one class is missing
    predictor = own_model(client, tiny_context().with_loss(loss))
    found = predictor.probabilities(client.images[:6])
    assert np.allclose(found, slow(client, loss), atol=1e-9)
    if loss == "balanced":
        assert (found[:, 1] == 0).all(), "a class that the client never had"


def test_a_client_with_one_class_says_so() -> None:
    client = tiny_clients(1)[0]
    client = replace(client, labels=np.full_like(client.labels, 2))
    found = own_model(client, tiny_context(loss="balanced")).probabilities(client.images)
    assert (found[:, 2] == 1).all()


def test_each_loss_has_a_network_of_its_own() -> None:
    client, ctx = tiny_clients(1)[0], tiny_context()
    plain, balanced = (own_model(client, ctx.with_loss(loss)).states[0] for loss in (None, "balanced"))
    assert not all(torch.equal(plain[name], balanced[name]) for name in plain)
    assert ctx.training.loss == "cross_entropy", "the run's own recipe is left alone"
