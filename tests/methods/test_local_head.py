from __future__ import annotations

import pytest
import torch

from fedbicross.federation import simulate
from fedbicross.methods import create
from small import TINY_METHODS, tiny_clients, tiny_context


def test_the_classifier_that_falcon_sends_is_what_stays_here() -> None:
    ctx, clients = tiny_context(), tiny_clients(2)
    shared = {key: TINY_METHODS["local_head"][key] for key in TINY_METHODS["local_head"]}
    alone = simulate(create("local_head", {"local_head": shared}), clients, ctx)
    sent = create("falcon", {"falcon": {**TINY_METHODS["falcon"], **shared}}).upload(clients[1], tiny_context())
    state = alone["client-1"].states[0]
    assert all(torch.equal(sent.tensors[f"classifier.{name}"], value) for name, value in state.items())
    assert ctx.store.size("uploads/seed-0/method/client-0.safetensors") < 2000, "a manifest and nothing else"


@pytest.mark.slow
def test_it_learns_its_own_images() -> None:
    client = tiny_clients(1, per_client=60)[0]
    settings = {**TINY_METHODS["local_head"], "epochs_classifier": 20}
    made = simulate(create("local_head", {"local_head": settings}), [client], tiny_context())[client.name]
    test = tiny_clients(1, per_client=90, seed=5)[0]
    assert (made.probabilities(test.images).argmax(1) == test.labels).mean() > 0.9
