"""How much a method may compute at the server, so that a comparison is one of methods and not of patience.

What is equal is arithmetic. One synthesis step changes a batch of images once, with all N client networks looking on;
one student step is one gradient step of a student on a batch. A method gets S of the first and D of the second, or,
where it splits them otherwise, S + D together. A network that is inverted by itself costs one N-th of a synthesis step,
and such a method gets N times as many. FedBiCross, whose K students learn from K clusters each, gets fewer steps, as a
step of it costs more. Averages, ensembles and closed formulas cost next to nothing and stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from fedbicross.errors import ConfigError, nearest
from fedbicross.methods import create, method_names

T = 500  # synthesis steps of one batch in FedISCA, FedBiCross and primum
T_GENERATOR = 30  # steps of a generator per epoch in DENSE and Co-Boosting


@dataclass(frozen=True)
class Budget:
    """Server steps of every method, and the length of what clients train on frozen features."""

    note: str
    synthesis: int  # S
    student: int  # D
    batch: int = 256
    epochs_generator: int = 400  # of FALCON's generator at the client
    epochs_head: int = 60  # of classifiers on features
    small: bool = False  # also shrink networks and pictures: for tests


BUDGETS: dict[str, Budget | None] = {
    "paper": None,  # every method at its own paper's length, which is not equal
    "tenth": Budget("a tenth of FedISCA's 100,000 steps", 5000, 5000, epochs_generator=200),
    "minute": Budget("about 30 s of an H200 at the server, five clients", 1500, 1500, epochs_generator=40),
    "smoke": Budget("seconds on a CPU: tests only", 4, 4, batch=8, epochs_generator=2, epochs_head=2, small=True),
}
NOTES = {name: "every method at the length of its own paper" if b is None else b.note for name, b in BUDGETS.items()}


def check_name(name: str) -> None:
    """Refuse a budget that does not exist."""
    if name not in BUDGETS:
        raise ConfigError("unknown_budget", f"unknown budget {name!r}{nearest(name, BUDGETS)}")


def settings(name: str, spec: str, clients: int) -> dict[str, dict[str, Any]]:
    """``RunConfig.method`` for one method under a budget: under its name and, as a variant would win, its full name."""
    check_name(name)
    budget, family = BUDGETS[name], spec.partition(":")[0]
    values = {} if budget is None else _settings(budget, clients, spec).get(family, {})
    if not values:
        return {}
    return {family: dict(values), **({spec: dict(values)} if spec != family and spec in method_names() else {})}


def _clusters(spec: str) -> int:
    """K of a variant of FedBiCross, before any other setting; one chosen from the uploads counts as the default."""
    own, default = (create(name).config.clusters for name in (spec, "fedbicross"))
    return int(default if own == "auto" else own)


def _passes(clients: int, clusters: int | None = None) -> int:
    """Forward passes of a step of FedISCA, or of FedBiCross with K clusters.

    2N of synthesis, 2N of both teachers, and 3 for each student on each batch that it sees, held-out rows among them.
    """
    return 4 * clients + 3 * (1 if clusters is None else clusters * (clusters + 1))


def _settings(budget: Budget, clients: int, spec: str) -> Mapping[str, Mapping[str, Any]]:
    s, d, batch = budget.synthesis, budget.student, budget.batch
    steps = min(T, s)
    trajectories = max(1, round(s / steps))
    dearer = _passes(clients, _clusters(spec)) / _passes(clients) if spec.startswith("fedbicross") else 1.0
    once = min(1000, s)  # E-FedISCA synthesises once and spends the rest on its student
    per_epoch = min(T_GENERATOR, s)
    rounds = max(1, ceil(s / per_epoch))
    replay = {"epochs": rounds, "steps": per_epoch, "steps_distil": max(1, ceil(d / rounds)), "batch": batch}
    dafl_steps = min(100, s)
    found: dict[str, dict[str, Any]] = {
        "fedisca": {"epochs": trajectories, "steps": steps, "batch": batch},
        "fedbicross": {"trajectories": max(1, round(s / steps / dearer)), "steps": steps, "batch": batch},
        "e_fedisca": {
            "steps": once,
            "memory": min(500, once),
            "epochs": max(1, round((s + d - once) / steps)),
            "steps_distil": steps,
            "batch": batch,
        },
        "primum": {"pool": max(1, round(s * clients / steps)), "steps": steps, "steps_distil": d, "batch": batch},
        "dense": replay,
        "co_boosting": replay,
        "dafl": {"epochs": max(1, round(s / dafl_steps)), "steps": dafl_steps, "batch": batch},
        "falcon": {"epochs_generator": budget.epochs_generator, "epochs_classifier": budget.epochs_head},
        "local_head": {"epochs_classifier": budget.epochs_head},
        "centralised_head": {"epochs_classifier": budget.epochs_head},
    }
    if budget.small:
        head = {"encoder": "tiny", "batch": 16, "head_hidden": 16}
        small: dict[str, dict[str, Any]] = {
            "dense": {"width": 8, "latent": 8},
            "co_boosting": {"width": 8, "latent": 8},
            "dafl": {"width": 8, "latent": 8},
            "e_fedisca": {"noise_images": 16},
            "fedbicross": {"probes": 8, "epochs_personal": 1, "batch_personal": 16, "clusters": 2},
            "fedlmg": {"images_per_class": 2, "steps": 2, "bn_steps": 1, "epochs": 1},
            "local_head": head,
            "centralised_head": head,
            "falcon": {**head, "width": 16, "layers": 1, "heads": 2, "feedforward": 16, "components": 2}
            | {"epochs_global": 1},
            "fedpft": {"encoder": "tiny", "components": 1, "epochs": 1},  # the private variant takes no more
            "fedcgs": {"encoder": "tiny"},
            "analytic": {"encoder": "tiny"},
        }
        found = {name: {**found.get(name, {}), **small.get(name, {})} for name in (*found, *small)}
    return found
