from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from fedbicross.context import Context, MemoryStore
from fedbicross.errors import MethodError
from fedbicross.exchange import Client, Predictor
from fedbicross.federation import in_order, simulate
from fedbicross.methods import METHODS, create
from imports import SOURCE, imports_of, modules_of, reachable
from small import TINY_METHODS, tiny_clients, tiny_context


def test_nothing_reachable_from_any_fuse_imports_the_data_package() -> None:
    files = reachable(modules_of("fedbicross.methods"))
    assert SOURCE / "engine" / "train.py" in files, "the walk must follow lazy imports"
    bad = sorted(str(file.relative_to(SOURCE)) for file in files if (SOURCE / "data") in file.parents)
    assert bad == []


def test_the_walk_would_notice_data() -> None:
    assert (SOURCE / "data" / "partition.py") in reachable(modules_of("fedbicross.runs"))


def test_data_flows_one_way() -> None:
    order = ["cli", "runs", "federation", "methods", "parts", "steps", "engine", "models"]
    for rank, room in enumerate(order):
        below = {f"fedbicross.{name}" for name in order[:rank]}
        for file in modules_of(f"fedbicross.{room}"):
            up = {name for name in imports_of(file) if any(name == b or name.startswith(b + ".") for b in below)}
            assert not up, f"{file.relative_to(SOURCE)} imports {up}"


def rows(predictors: dict[str, Predictor], images: np.ndarray) -> dict[str, np.ndarray]:
    return {name: predictor.probabilities(images) for name, predictor in predictors.items()}


@pytest.mark.parametrize("name", ["fedavg", "ensemble:class_weighted", "local_only", "majority", "centralised"])
def test_client_order_changes_nothing_and_global_random_state_is_untouched(name: str) -> None:
    clients = tiny_clients(3)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # noqa: NPY002
    first = rows(simulate(create(name), clients, tiny_context()), clients[0].images)
    after = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # noqa: NPY002
    assert before == after
    second = rows(simulate(create(name), [clients[2], clients[0], clients[1]], tiny_context()), clients[0].images)
    assert first.keys() == second.keys()
    for client in first:
        assert np.array_equal(first[client], second[client])


def test_client_models_are_trained_once_for_all_methods() -> None:
    ctx, trained = tiny_context(), []
    ctx.event = lambda **fields: trained.append(fields["client"]) if fields["event"] == "trained" else None
    clients = tiny_clients(2)
    for scope, name in enumerate(["local_only", "fedavg", "ensemble"]):
        ctx.scope = f"seed-0/{scope}"
        simulate(create(name), clients, ctx)
    assert trained == ["client-0", "client-1"]


def test_killed_anywhere_goes_on_where_it_stopped() -> None:
    clients = tiny_clients(2)
    whole = rows(simulate(create("fedavg"), clients, tiny_context()), clients[0].images)

    class Killed(Exception):
        pass

    class Mortal(MemoryStore):
        budget = 0

        def save(self, name: str, data: bytes) -> None:
            if self.budget == 0:
                raise Killed
            self.budget -= 1
            super().save(name, data)

    for lives in range(3, 9):
        store = Mortal()
        for _ in range(50):
            store.budget = lives
            ctx = tiny_context()
            ctx.store = store
            try:
                again = rows(simulate(create("fedavg"), clients, ctx), clients[0].images)
                break
            except Killed:
                continue
        else:
            pytest.fail("no progress was made between kills")
        assert all(np.array_equal(whole[name], again[name]) for name in whole)


def test_many_rounds_equal_a_plain_loop_and_keep_only_the_newest() -> None:
    from fedbicross.methods.fedavg import average

    clients, method = tiny_clients(2), create("fedavg", {"fedavg": {"rounds": 3}})
    ctx = tiny_context()
    result = simulate(method, clients, ctx)
    state: Any = None
    for done in range(3):
        visits = [tiny_context().train_further(c, state, epochs=1, first_epoch=done, total_epochs=3) for c in clients]
        state = average(visits, [len(c.labels) for c in clients])
    assert all(torch.equal(result["client-0"].states[0][name], value) for name, value in state.items())
    assert ctx.store.load("uploads/seed-0/method/round-002/client-0.safetensors") is None
    assert ctx.store.load("uploads/seed-0/method/round-003/client-0.safetensors") is not None


def test_refusals() -> None:
    client = tiny_clients(1)[0]
    with pytest.raises(MethodError, match="at least one"):
        in_order([])
    with pytest.raises(MethodError, match="names must differ"):
        in_order([client, client])
    with pytest.raises(MethodError) as caught:
        create("centralised").upload(client, tiny_context())
    assert caught.value.code == "not_federated"


@pytest.mark.parametrize("name", [*METHODS])
@pytest.mark.parametrize("kind", ["one client", "one image, one class and strange names"])
def test_odd_federations_give_finite_answers(name: str, kind: str) -> None:
    clients = tiny_clients(1 if kind == "one client" else 3)
    if kind != "one client":
        first, second, third = clients
        clients = [
            Client("a b", first.images, first.labels),
            Client("<script>", second.images[:1], second.labels[:1]),
            Client("x" * 10_000, third.images, np.zeros_like(third.labels)),
        ]
    ctx: Context = tiny_context()
    for probabilities in rows(simulate(create(name, TINY_METHODS), clients, ctx), clients[0].images).values():
        assert np.isfinite(probabilities).all()
        assert np.allclose(probabilities.sum(1), 1, atol=1e-4)
