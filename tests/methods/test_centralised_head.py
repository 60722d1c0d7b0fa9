from __future__ import annotations

import numpy as np
import pytest

from fedbicross.errors import MethodError
from fedbicross.federation import simulate
from fedbicross.messages import Client
from fedbicross.methods import create
from small import TINY_METHODS, tiny_clients, tiny_context


def test_it_is_the_local_head_of_one_imaginary_site() -> None:
    clients, ctx = tiny_clients(3), tiny_context()
    made = simulate(create("centralised_head", TINY_METHODS), clients, ctx)
    assert list(made) == [client.name for client in clients] and made["client-0"] is made["client-2"]
    pooled = Client(
        "all-sites-pooled", np.concatenate([c.images for c in clients]), np.concatenate([c.labels for c in clients])
    )
    alone = simulate(create("local_head", TINY_METHODS), [pooled], tiny_context())["all-sites-pooled"]
    assert alone.pack() == made["client-0"].pack()


def test_it_is_no_federation() -> None:
    method = create("centralised_head", TINY_METHODS)
    with pytest.raises(MethodError, match="only inside a simulation"):
        method.upload(tiny_clients(1)[0], tiny_context())
    with pytest.raises(MethodError, match="only inside a simulation"):
        method.fuse([], tiny_context())
