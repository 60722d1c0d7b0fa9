"""On a GPU, what runs at once gives the same bits as the same work done one after another."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedbicross.context import Context, MemoryStore, Task
from fedbicross.data import load_dataset
from fedbicross.data.partition import make_partition
from fedbicross.engine import fast
from fedbicross.engine.device import set_precision
from fedbicross.engine.recipe import Training
from fedbicross.errors import DataError
from fedbicross.federation import simulate
from fedbicross.messages import Client
from fedbicross.methods import create
from fedbicross.runs.runner import make_clients

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

RECIPES = {
    "paper": Training(recipe="paper", epochs=6),
    "modern": Training(recipe="modern", epochs=12, init="independent"),
    "small batches": Training(recipe="modern", epochs=4, batch_size=32, schedule="constant", lr=0.03),
}
TRAINED = Training(recipe="modern", epochs=6)
SMALL = {"steps": 40, "batch": 64}
METHODS: dict[str, dict[str, Any]] = {
    "fedbicross:k2": {**SMALL, "trajectories": 2, "epochs_personal": 1},
    "fedbicross:k3": {**SMALL, "epochs_personal": 1},
    "fedbicross:k4": {**SMALL, "epochs_personal": 1},
    "fedbicross": {**SMALL, "clusters": 5, "epochs_personal": 1},
    "e_fedisca": {**SMALL, "memory": 20, "epochs": 2, "steps_distil": 40, "noise_images": 500},
    "fedisca": {**SMALL, "epochs": 3},
    "primum": {**SMALL, "pool": 10, "steps_distil": 40},  # inversions of all five networks at once
    "primum:student": {**SMALL, "pool": 10, "steps_distil": 40},  # whatever the gate decides
    "primum:together": {**SMALL, "pool": 2, "steps_distil": 40, "prior": "uniform"},
    "dense": {"batch": 64, "steps": 10, "epochs": 3},
    "falcon": {"encoder": "tiny", "epochs_generator": 2, "epochs_classifier": 5, "epochs_global": 2},
}


def hospitals(name: str) -> tuple[list[Client], Task]:
    """Five of them, with real images where these are at hand ($FEDBICROSS_DATA), else with drawn cells."""
    try:
        data = load_dataset(name)
    except DataError:
        data = load_dataset("cells", train_size=4000, test_size=100, seed=len(name))
    parts = make_partition(data, "dirichlet", 5, np.random.default_rng(1), alpha=0.5)
    clients, _ = make_clients(data, parts)
    return clients, Task(tuple(data.classes), data.image_size, data.channels, "resnet18")


def context(task: Task, training: Training) -> Context:
    return Context(task, training, device="cuda", precision="bf16", fast=True)


def same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@contextmanager
def eager_collector() -> Iterator[None]:
    """Python's garbage collector runs at every chance: it must not free a recording while another is being made."""
    before = gc.get_threshold()
    gc.set_threshold(50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    set_precision("bf16")
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("data", ["bloodmnist", "dermamnist", "pneumoniamnist"])
def test_local_training(data: str, recipe: str) -> None:
    clients, task = hospitals(data)
    together, alone = (context(task, RECIPES[recipe]) for _ in range(2))
    together.train_local_models(clients)
    with fast.one_at_a_time():
        alone.train_local_models(clients)
    for client in clients:
        ours, theirs = together.local_model(client), alone.local_model(client)
        assert ours.history == theirs.history
        assert same(ours.state, theirs.state)


@pytest.fixture(scope="module")
def trained() -> tuple[list[Client], Task, dict[str, bytes]]:
    """Clients of 800 images each and both kinds of their networks: trained once, whatever the method does with them."""
    clients, task = hospitals("bloodmnist")
    few = [Client(client.name, client.images[:800], client.labels[:800]) for client in clients]
    store, files = MemoryStore(), {}
    for loss in ("cross_entropy", "balanced"):
        ctx = replace(context(task, TRAINED), store=store).with_loss(loss)
        ctx.train_local_models(few)
        for client in few:
            name = f"client_models/{ctx.models.local_model_key(client)}.safetensors"
            files[name] = store.load(name) or b""
    return few, task, files


@pytest.mark.parametrize("method", METHODS)
def test_a_whole_method(method: str, trained: tuple[list[Client], Task, dict[str, bytes]]) -> None:
    clients, task, files = trained
    models = []
    for way in (fast.one_at_a_time, eager_collector):
        ctx = context(task, TRAINED)
        for name, data in files.items():
            ctx.store.save(name, data)
        with way():
            models.append(simulate(create(method, {method: METHODS[method]}), clients, ctx))
    for client in models[0]:
        for ours, theirs in zip(models[0][client].states, models[1][client].states, strict=True):
            assert same(ours, theirs)


def test_a_hundred_recordings_made_and_dropped() -> None:
    """Each refers to itself, so that only the collector frees it, as a rule while the next one is being recorded."""
    layer, x = nn.Linear(64, 64, device="cuda"), torch.randn(32, 64, device="cuda")

    class Owner:
        def __init__(self) -> None:
            self.step = fast.Captured(self.work)

        def work(self, x: Tensor) -> list[Tensor]:
            wakes_the_collector = [[number] for number in range(200)]
            return [layer(x).sum() + len(wakes_the_collector)]

    with eager_collector():
        found = [Owner().step(x)[0] for _ in range(100)]
    assert all(torch.equal(value, found[0]) for value in found)
    assert found[0].item() == pytest.approx(layer(x).sum().item() + 200, rel=1e-4)
