"""Clients, contexts and settings small enough for a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest
from torch import Tensor

from fedbicross.bundle import pack
from fedbicross.context import Context, MemoryStore, Task
from fedbicross.engine.recipe import Training
from fedbicross.errors import FedBiCrossError
from fedbicross.messages import Client, Predictor, Reply, Upload

T = TypeVar("T")

# Settings with which a method finishes in a fraction of a second; what is not here is as quick by default.
TINY_METHODS: dict[str, dict[str, Any]] = {
    "fedavg:multi_round": {"rounds": 3},
    "dafl": {"steps": 3, "batch": 12, "epochs": 2, "latent": 8, "width": 8},
    "dafl:cifar10": {"batch": 12, "epochs": 2, "latent": 8},
    "dafl:cifar100": {"batch": 12, "epochs": 2, "latent": 8},
    "dafl:cmi": {"steps": 3, "batch": 12, "latent": 8},
    "dense": {"steps": 3, "batch": 12, "epochs": 3, "latent": 8, "width": 8},
    "co_boosting": {"steps": 3, "batch": 12, "epochs": 3, "latent": 8, "width": 8},
    "fedisca": {"steps": 3, "batch": 12, "epochs": 2},
    "e_fedisca": {"steps": 3, "batch": 12, "memory": 2, "epochs": 2, "steps_distil": 3, "noise_images": 20},
    "fedbicross": {"steps": 3, "batch": 12, "trajectories": 2, "probes": 8, "epochs_personal": 1, "clusters": 2},
    "primum": {"pool": 3, "steps": 3, "batch": 12, "steps_distil": 4, "lr": 0.2, "storage": "fp32"},
    "fedisca:five_shots": {"shots": 3},
    "e_fedisca:five_shots": {"shots": 3},
    "fedbicross:repeated": {"trajectories": 3},
    "local_head": {"encoder": "tiny", "batch": 12, "head_hidden": 16, "epochs_classifier": 3},
    "centralised_head": {"encoder": "tiny", "batch": 12, "head_hidden": 16, "epochs_classifier": 3},
    "falcon": {
        "encoder": "tiny",
        "width": 16,
        "layers": 1,
        "heads": 2,
        "feedforward": 16,
        "components": 2,
        "batch": 12,
        "epochs_generator": 3,
        "lr_generator": 1e-2,
        "head_hidden": 16,
        "epochs_classifier": 3,
        "epochs_global": 2,
        "epochs_personal": 2,
    },
    "falcon:released": {"epochs_generator": 3, "epochs_global": 2, "batch_global": 16},
    "fedpft": {"encoder": "tiny", "components": 3, "epochs": 3, "lr": 1e-2},
    "fedpft:private": {"epsilon": 100.0},  # two dozen images are lost in the noise of more privacy
    "fedcgs": {"encoder": "tiny"},
    "fedcgs:private": {"epsilon": 100.0},
    "analytic": {"encoder": "tiny"},
    "analytic:private": {"epsilon": 100.0},
    "fedlmg": {"images_per_class": 4, "steps": 3, "bn_steps": 1, "epochs": 2, "batch_synthesis": 12},
}


def later(*cases: Any) -> list[Any]:
    """Cases for `make test` only, beside others of the same test that `make check` runs too."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


def first_in_check(cases: list[Any]) -> list[Any]:
    """Every case in `make test`, only the first one in `make check`."""
    return [cases[0], *later(*cases[1:])]


def variants_later(specs: list[str]) -> list[Any]:
    """Methods and their variants in `make test`, only the methods in `make check`."""
    return [case for spec in specs for case in (later(spec) if ":" in spec else [spec])]


def tiny_clients(count: int = 3, per_client: int = 24, classes: int = 3, size: int = 12, seed: int = 0) -> list[Client]:
    """Clients whose classes differ in brightness, so that a network learns something in a few steps."""
    rng = np.random.default_rng(seed)
    clients = []
    for index in range(count):
        labels = rng.integers(0, classes, per_client)
        images = rng.normal(60 + 60 * labels[:, None, None, None], 25, (per_client, size, size, 3)).clip(0, 255)
        clients.append(Client(f"client-{index}", images.astype(np.uint8), labels.astype(np.int64)))
    return clients


def dealt(whole: Client, owner: np.ndarray) -> list[Client]:
    """A client's images dealt out: ``owner`` is the number of the client that gets each."""
    everyone = [(f"client-{i}", owner == i) for i in range(int(owner.max()) + 1)]
    return [Client(name, whole.images[mine], whole.labels[mine]) for name, mine in everyone if mine.any()]


def with_tensor(upload: Upload, name: str, value: Tensor) -> Upload:
    return replace(upload, tensors={**upload.tensors, name: value})


def tiny_context(classes: int = 3, size: int = 12, model: str = "resnet8", **training: object) -> Context:
    values = {"recipe": "modern", "epochs": 2, "batch_size": 8, **training}
    task = Task(tuple(f"class-{c}" for c in range(classes)), size, 3, model)
    return Context(task, Training(**values))


@contextmanager
def refuses(kind: type[FedBiCrossError], code: str, match: str | None = None) -> Iterator[pytest.ExceptionInfo[Any]]:
    """What is tried inside is refused in one line, with this code."""
    with pytest.raises(kind, match=match) as caught:
        yield caught
    assert caught.value.code == code and "\n" not in str(caught.value)


def code_of(kind: type[FedBiCrossError], call: Callable[..., object], *args: Any, **options: Any) -> str:
    """The code with which a call is refused, in one line."""
    with pytest.raises(kind) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
    return caught.value.code


def packed_unchecked(message: Upload | Reply | Predictor) -> bytes:
    """Its bytes, even where it holds NaN, which our own writer refuses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedbicross.messages.pack", partial(pack, finite=False))
        return message.pack()


class Killed(Exception):
    pass


class Mortal(MemoryStore):
    """Refuses everything after so many files."""

    def __init__(self, budget: int = 0) -> None:
        super().__init__()
        self.budget, self.names = budget, list[str]()

    def save(self, name: str, data: bytes) -> None:
        if self.budget == 0:
            raise Killed
        self.budget -= 1
        self.names.append(name)
        super().save(name, data)


def survive(store: Mortal, lives: int, work: Callable[[], T]) -> T:
    """What ``work`` returns in the end, killed after every ``lives`` files and begun again on the same store."""
    for _ in range(200):
        store.budget = lives
        try:
            return work()
        except Killed:
            continue
    pytest.fail("no progress was made between kills")
