from __future__ import annotations

import torch

from fedbicross.federation import simulate
from fedbicross.methods import create
from small import tiny_clients, tiny_context


def test_every_client_keeps_its_own_network_and_nothing_leaves() -> None:
    clients, ctx, method = tiny_clients(2), tiny_context(), create("local_only")
    predictors = simulate(method, clients, ctx)
    for client in clients:
        own = ctx.local_model(client).state
        assert all(torch.equal(predictors[client.name].states[0][name], value) for name, value in own.items())
        assert method.upload(client, ctx).empty
