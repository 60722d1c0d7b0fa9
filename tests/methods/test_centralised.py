from __future__ import annotations

import numpy as np
import torch

from fedbicross.federation import simulate
from fedbicross.messages import Client
from fedbicross.methods import create
from small import tiny_clients, tiny_context


def test_trains_on_everybodys_images_at_one_imaginary_client() -> None:
    clients = tiny_clients(3)
    predictors = simulate(create("centralised"), clients, tiny_context())
    pooled = Client(
        "all-sites-pooled",
        np.concatenate([client.images for client in clients]),
        np.concatenate([client.labels for client in clients]),
    )
    expected = tiny_context().local_model(pooled).state
    for client in clients:
        state = predictors[client.name].states[0]
        assert all(torch.equal(state[name], value) for name, value in expected.items())
