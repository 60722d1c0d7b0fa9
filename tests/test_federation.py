from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedbicross.context import Context, MemoryStore
from fedbicross.errors import MethodError
from fedbicross.federation import in_order, simulate
from fedbicross.messages import Client, Predictor
from fedbicross.methods import METHODS, create
from imports import SOURCE, imports_of, modules_of, reachable
from small import TINY_METHODS, Killed, Mortal, refuses, survive, tiny_clients, tiny_context


def test_nothing_reachable_from_any_fuse_imports_the_data_package() -> None:
    files = reachable(modules_of("fedbicross.methods"))
    assert SOURCE / "engine" / "train.py" in files, "the walk must follow lazy imports"
    bad = sorted(str(file.relative_to(SOURCE)) for file in files if (SOURCE / "data") in file.parents)
    assert bad == []
    whole = [file for file in files if re.search(r"^\s*import fedbicross$", file.read_text(), re.MULTILINE)]
    assert whole == [], "names that the package loads lazily would escape the walk"


def test_the_walk_would_notice_data() -> None:
    assert (SOURCE / "data" / "partition.py") in reachable(modules_of("fedbicross.runs"))


def test_data_flows_one_way() -> None:
    order = ["cli", "bench", "runs", "federation", "pipeline", "methods", "parts", "steps", "engine", "models"]
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

    for lives in range(3, 9):
        store = Mortal()

        def work(store: Mortal = store) -> dict[str, np.ndarray]:
            return rows(simulate(create("fedavg"), clients, replace(tiny_context(), store=store)), clients[0].images)

        again = survive(store, lives, work)
        assert all(np.array_equal(whole[name], again[name]) for name in whole)


def test_many_rounds_equal_a_plain_loop_and_keep_only_the_newest() -> None:
    from fedbicross.methods.fedavg import average

    clients, method = tiny_clients(2), create("fedavg", {"fedavg": {"rounds": 3}})
    ctx = tiny_context()
    result = simulate(method, clients, ctx)
    state: Any = None
    for done in range(3):
        visits = [
            tiny_context().models.train_further(c, state, epochs=1, first_epoch=done, total_epochs=3) for c in clients
        ]
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
    with refuses(MethodError, "not_federated"):
        create("centralised").upload(client, tiny_context())


@pytest.mark.slow
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


# --- variants that share the server's work ----------------------------------------------------------------


def sharing(store: MemoryStore, spec: str, events: list[dict[str, Any]] | None = None, seed: int = 0) -> Context:
    ctx = tiny_context(epochs=1)
    ctx.store, ctx.scope, ctx.seed = store, f"seed-{seed}/{spec.replace(':', '-')}", seed
    if events is not None:
        ctx.event = lambda **fields: events.append(fields)
    return ctx


@pytest.fixture
def fusions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The scopes in which a server worked."""
    plain, done = METHODS["primum"].fuse, list[str]()

    def fuse(self: Any, uploads: Any, ctx: Context) -> Any:
        done.append(ctx.scope)
        return plain(self, uploads, ctx)

    monkeypatch.setattr(METHODS["primum"], "fuse", fuse)
    return done


def test_variants_with_the_same_work_at_the_server_share_one_fusion(fusions: list[str]) -> None:
    clients, store, events = tiny_clients(2), MemoryStore(), list[dict[str, Any]]()
    for spec in ("primum", "primum:student"):
        simulate(create(spec, TINY_METHODS), clients, sharing(store, spec, events))
    assert fusions == ["seed-0/primum"]
    for name in ("client-0", "client-1"):
        paths = [f"replies/seed-0/{scope}/{name}.safetensors" for scope in ("primum", "primum-student")]
        assert store.load(paths[0]) == store.load(paths[1]) is not None
    costs = [store.load(f"records/fuse/seed-0/{scope}/server.json") for scope in ("primum", "primum-student")]
    assert costs[0] == costs[1] is not None, "each row is charged in full"
    told = {event["name"]: event["seconds"] for event in events if event["event"] == "fuse"}
    assert set(told) == {"seed-0/primum/server", "seed-0/primum-student/server"} and min(told.values()) > 0
    alone = simulate(create("primum:student", TINY_METHODS), clients, sharing(MemoryStore(), "primum:student"))
    again = simulate(create("primum:student", TINY_METHODS), clients, sharing(store, "primum:student"))
    assert {name: p.pack() for name, p in alone.items()} == {name: p.pack() for name, p in again.items()}


@pytest.mark.parametrize("change", ["settings", "seed", "uploads", "loss"])
def test_other_settings_seeds_or_uploads_are_fused_anew(change: str, fusions: list[str]) -> None:
    clients, store = tiny_clients(2), MemoryStore()
    simulate(create("primum", TINY_METHODS), clients, sharing(store, "primum"))
    spec = {"settings": "primum:no_cutmix", "loss": "primum:cross_entropy"}.get(change, "primum:student")
    if change == "uploads":
        clients = [clients[0], Client("client-1", clients[1].images[:20], clients[1].labels[:20])]
    simulate(create(spec, TINY_METHODS), clients, sharing(store, spec, seed=int(change == "seed")))
    assert len(fusions) == 2


def test_a_deleted_reply_is_made_again(fusions: list[str]) -> None:
    """What the error for a damaged file advises: delete it and resume."""
    clients, store = tiny_clients(2), MemoryStore()
    whole = simulate(create("primum", TINY_METHODS), clients, sharing(store, "primum"))
    store.drop("replies/seed-0/primum/client-1.safetensors")
    store.drop("models/seed-0/primum/client-1.safetensors")
    again = simulate(create("primum", TINY_METHODS), clients, sharing(store, "primum"))
    assert {name: p.pack() for name, p in again.items()} == {name: p.pack() for name, p in whole.items()}
    assert fusions == ["seed-0/primum"] * 2
    store.drop("replies/seed-0/primum/client-1.safetensors")
    other = simulate(create("primum:student", TINY_METHODS), clients, sharing(store, "primum:student"))
    assert len(other) == 2 and fusions[2:] == ["seed-0/primum-student"], "nothing whole to copy"


@pytest.mark.slow
def test_killed_while_it_copies_a_fusion_it_ends_with_the_same_files(fusions: list[str]) -> None:
    clients = tiny_clients(2)

    def finished(store: MemoryStore) -> dict[str, bytes | None]:
        kinds = ("records/fuse/seed-0/primum-student/server.json", "replies/seed-0/primum-student/client-0.safetensors")
        last = "models/seed-0/primum-student/client-1.safetensors"
        return {name: store.load(name) for name in (*kinds, last)}

    whole = MemoryStore()
    for spec in ("primum", "primum:student"):
        simulate(create(spec, TINY_METHODS), clients, sharing(whole, spec))
    assert None not in finished(whole).values()
    for budget in range(10):  # uploads, their records, the copied record, replies, models
        store = Mortal(10**6)
        simulate(create("primum", TINY_METHODS), clients, sharing(store, "primum"))
        store.budget = budget
        with pytest.raises(Killed):
            simulate(create("primum:student", TINY_METHODS), clients, sharing(store, "primum:student"))
        store.budget = 10**6
        simulate(create("primum:student", TINY_METHODS), clients, sharing(store, "primum:student"))
        assert finished(store) == finished(whole), f"killed after {budget} files"
    assert "seed-0/primum-student" not in fusions


def test_killed_after_its_last_reply_its_fusion_is_still_shared(fusions: list[str]) -> None:
    clients, whole = tiny_clients(2), Mortal(10**6)
    simulate(create("primum", TINY_METHODS), clients, sharing(whole, "primum"))
    store = Mortal(whole.names.index("replies/seed-0/primum/client-1.safetensors") + 1)
    with pytest.raises(Killed):
        simulate(create("primum", TINY_METHODS), clients, sharing(store, "primum"))
    store.budget = 10**6
    for spec in ("primum", "primum:student"):
        simulate(create(spec, TINY_METHODS), clients, sharing(store, spec))
    assert set(fusions) == {"seed-0/primum"}
