"""What the tests of several methods begin with: trained clients."""

from __future__ import annotations

import pytest

from fedbicross.context import Context
from fedbicross.messages import Upload
from fedbicross.methods import create
from small import tiny_clients, tiny_context


@pytest.fixture(scope="module")
def trained() -> Context:
    """A context whose store holds the networks of three clients."""
    ctx = tiny_context()
    ctx.train_local_models(tiny_clients(3))
    return ctx


@pytest.fixture(scope="module")
def uploads(trained: Context) -> list[Upload]:
    """Their networks, and nothing else."""
    return [create("dense").upload(client, trained) for client in tiny_clients(3)]
