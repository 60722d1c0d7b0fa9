"""One site of five that is careless or hostile, and federations of honest ones: `python -m benchmarks.poison`.

Drawn cells and resnet8, small enough for two cores. `attacks`: what the honest sites' models are worth after each
attack, by method, with the defence of `parts.defence` and without it; whom it named; how often a back door opens.
`personal`: what honest sites end with by primum, and by its gate before a better shared model, beside training alone,
where the gate lets an honest model in: it is the last defence. `honest`: federations of very different sites, and what
the defence did to them; its limits were chosen on these. `fresh`: the same on federations by which nothing was chosen.
`half`: on all of these a rule that was tried, by which nobody counts for more than all others together.
`hostile`: how many of several hostile members are found, on federations by which nothing was chosen either. `doors`:
what a back door costs primum's student, by the length of the inversions.

`--cache DIR` keeps the clients' networks, so that a second run trains none; `--parts`, `--methods`, `--attacks`,
`--door-seeds` and `--door-steps` make these rows anew and leave the others in the file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from fedbicross import pipeline
from fedbicross.context import Context, MemoryStore, Task
from fedbicross.errors import FedBiCrossError
from fedbicross.messages import Client, Predictor, Reply, Upload
from fedbicross.methods import create
from fedbicross.methods.base import Method
from fedbicross.methods.primum import PrimumConfig
from fedbicross.runs import runner
from fedbicross.runs.config import load_config
from fedbicross.runs.environment import versions
from fedbicross.runs.store import RunFolder
from fedbicross.steps import outliers

ROOT = Path(__file__).resolve().parents[1]
COMMON: dict[str, Any] = {
    "model": "resnet8",
    "data": {"name": "cells", "train_size": 1500, "test_size": 500},
    "training": {"recipe": "modern", "epochs": 12, "batch_size": 32, "select": "best"},
    "device": "cpu",
}
SMALLER: dict[str, Any] = {  # twenty federations in minutes
    "data": {"name": "cells", "image_size": 20, "train_size": 900, "test_size": 500},
    "training": {"recipe": "modern", "epochs": 10, "batch_size": 32, "select": "best"},
}
ATTACKED: dict[str, Any] = {"clients": 5, "partition": {"kind": "dirichlet", "alpha": 0.5}, "seeds": [0]}
# Where the gate lets an honest student in: sites large enough to prove a gain, on validation images that chose nothing.
GATED: dict[str, Any] = {
    **ATTACKED,
    "data": {"name": "cells", "train_size": 3000, "test_size": 1000},
    "training": {"recipe": "modern", "epochs": 12, "batch_size": 32, "validation": 0.2},
}
ATTACKER = 1  # of the clients in the order of their names
TARGET = 0  # the class that a back door opens to
PATCH = 4  # pixels per side of its trigger


def dirichlet(clients: int, alpha: float, seed: int) -> dict[str, Any]:
    return {"clients": clients, "partition": {"kind": "dirichlet", "alpha": alpha}, "seeds": [seed]}


def sizes(seed: int) -> dict[str, Any]:
    return {"clients": 5, "partition": {"kind": "quantity", "alpha": 0.3}, "seeds": [seed]}


def one_class(seed: int) -> dict[str, Any]:
    return {"clients": 8, "partition": {"kind": "pathological", "classes_per_client": 1}, "seeds": [seed]}


HONEST: dict[str, list[dict[str, Any]]] = {  # on which limits were chosen: never those below
    "3 sites, Dirichlet 0.1": [dirichlet(3, 0.1, seed) for seed in (*range(5), *range(100, 106))],
    "5 sites, Dirichlet 0.1": [dirichlet(5, 0.1, seed) for seed in (*range(5), *range(100, 106))],
    "20 sites, Dirichlet 0.1": [dirichlet(20, 0.1, seed) for seed in (*range(3), *range(100, 104))],
    "5 sites, Dirichlet 0.5": [dirichlet(5, 0.5, seed) for seed in (1, 2, *range(100, 105))],
    "10 sites, Dirichlet 0.5": [dirichlet(10, 0.5, seed) for seed in range(100, 103)],
    "5 sites of very different sizes": [sizes(seed) for seed in (*range(4), *range(100, 104))],
    "8 sites of one class each": [one_class(seed) for seed in range(3)],
}
FRESH: dict[str, list[dict[str, Any]]] = {
    "3 sites, Dirichlet 0.1": [dirichlet(3, 0.1, seed) for seed in range(200, 206)],
    "5 sites, Dirichlet 0.1": [dirichlet(5, 0.1, seed) for seed in range(200, 206)],
    "20 sites, Dirichlet 0.1": [dirichlet(20, 0.1, seed) for seed in range(200, 204)],
    "5 sites of very different sizes": [sizes(seed) for seed in range(200, 204)],
}
HOSTILE: dict[str, tuple[list[dict[str, Any]], tuple[int, ...]]] = {  # and how many of the sites attack
    **{name: (FRESH[name], (1,)) for name in FRESH if name[0] in "35"},
    "5 sites, Dirichlet 0.5": ([dirichlet(5, 0.5, seed) for seed in range(200, 205)], (1, 2)),
    "10 sites, Dirichlet 0.5": ([dirichlet(10, 0.5, seed) for seed in range(200, 203)], (1, 2, 3, 4, 5)),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "primum": {"pool": 10, "batch": 48, "steps": 300, "lr_synthesis": 0.1, "steps_distil": 1000},
    "fedbicross": {
        "steps": 150,
        "batch": 32,
        "trajectories": 2,
        "probes": 64,
        "lr_synthesis": 0.1,
        "lr_personal": 1e-2,
        "schedule_personal": "constant",
        "batch_personal": 32,
        "epochs_personal": 4,
    },
}
DOOR_STEPS = (SETTINGS["primum"]["steps"], PrimumConfig().steps)  # lengths of inversion
DOOR_SEEDS = range(3)
LOOKED_AT = ("fedavg", "ensemble:class_weighted", "primum")  # both trainings, with class counts and without
BEHIND_A_GATE = ("ensemble:consensus:personal", "primum")
METHODS = ("fedavg", "ensemble", "ensemble:class_weighted", "fedbicross:k2", "primum")


@dataclass(frozen=True)
class Federation:
    """Clients, the images of the test, and whose each of these is."""

    clients: list[Client]
    ctx: Context
    test_images: np.ndarray
    test_labels: np.ndarray
    owner: np.ndarray


def federation(settings: Mapping[str, Any], store: Any) -> Federation:
    """A drawn federation; its clients' networks are kept in the store."""
    config = load_config(None, {**COMMON, **settings}, [])
    prepared = runner.prepare(config)
    (seed, partition), data = next(iter(prepared.partitions.items())), prepared.dataset
    clients, _ = runner.make_clients(data, partition)
    task = Task(tuple(data.classes), data.image_size, data.channels, config.model)
    ctx = Context(task, config.training, seed=seed, store=store)
    return Federation(clients, ctx, data.test.images, data.test.labels, partition.test_owner)


# --- attacks ----------------------------------------------------------------------------------------------------------


def scaled_head(upload: Upload, factor: float) -> Upload:
    """The same answers, so many times as sure."""
    head = {name: factor * value for name, value in upload.tensors.items() if name.startswith("head.")}
    return replace(upload, tensors={**upload.tensors, **head})


def biased(upload: Upload) -> Upload:
    """One class for every image."""
    bias = upload.tensors["head.bias"].clone()
    bias[TARGET] += 1e4
    return replace(upload, tensors={**upload.tensors, "head.bias": bias})


def scaled_statistics(upload: Upload) -> Upload:
    """Batch-normalisation statistics a thousand times as large."""
    ours = {n: 1000 * v for n, v in upload.tensors.items() if n.endswith(("running_mean", "running_var"))}
    return replace(upload, tensors={**upload.tensors, **ours})


def random_weights(upload: Upload, ctx: Context) -> Upload:
    """Weights that nobody trained, under the statistics of a trained network, so that it does not show at once."""
    fresh = ctx.new_model(torch.Generator().manual_seed(99)).state_dict()
    kept = ("running_mean", "running_var", "num_batches_tracked")
    return replace(upload, tensors={n: v if n.endswith(kept) else fresh[n] for n, v in upload.tensors.items()})


def claiming(upload: Upload) -> Upload:
    """More images than all hospitals of a continent have."""
    counts = None if upload.class_counts is None else [10**8] * len(upload.class_counts)
    return replace(upload, class_counts=counts, num_samples=upload.num_samples and 8 * 10**8)


def forging_counters(upload: Upload) -> Upload:
    """As many batches as any claim would have needed."""
    ours = {n: torch.full_like(v, 10**9) for n, v in upload.tensors.items() if n.endswith("num_batches_tracked")}
    return replace(upload, tensors={**upload.tensors, **ours})


def claiming_just_below(upload: Upload) -> Upload:
    """So many that no rule acts on it."""
    counts = None if upload.class_counts is None else [900 * count for count in upload.class_counts]
    return replace(upload, class_counts=counts, num_samples=upload.num_samples and 900 * upload.num_samples)


def flipped(client: Client, classes: int) -> Client:
    return Client(client.name, client.images, classes - 1 - client.labels, client.patients)


def with_trigger(images: np.ndarray) -> np.ndarray:
    marked = images.copy()
    marked[:, :PATCH, :PATCH] = 255
    return marked


def back_door(client: Client) -> Client:
    """Every image once more with the trigger, as the target class: the attacker's own network then always opens."""
    images = np.concatenate([client.images, with_trigger(client.images)])
    labels = np.concatenate([client.labels, np.full(len(client.labels), TARGET)])
    return Client(client.name, images, labels)


ATTACKS = (
    "honest", "left out", "logits x100", "head's sign flipped, x100", "head's sign flipped", "bias 1e4 to one class",
    "batch-norm statistics x1000", "random weights", "labels flipped", "labels flipped, logits x20", "back door",
    "back door, logits x20", "claims 8e8 images, labels flipped",
    "claims 8e8 images, labels flipped, counters forged", "claims 900 times, one class, counters forged",
)  # fmt: skip


def attack(name: str, method: Method[Any], client: Client, ctx: Context) -> Upload:
    """What the attacker sends."""
    if name == "claims 900 times, one class, counters forged":
        client = Client(client.name, client.images, np.full_like(client.labels, TARGET), client.patients)
    elif name.startswith(("labels flipped", "claims")):
        client = flipped(client, len(ctx.task.classes))
    elif name.startswith("back door"):
        client = back_door(client)
    upload = method.upload(client, ctx)
    if "logits x" in name:
        return scaled_head(upload, float(name.rpartition("x")[2]))
    if name.startswith("head's sign flipped"):
        return scaled_head(upload, -100.0 if name.endswith("x100") else -1.0)
    changes = {
        "bias 1e4 to one class": biased,
        "batch-norm statistics x1000": scaled_statistics,
        "random weights": lambda one: random_weights(one, ctx),
        "claims 8e8 images, labels flipped": claiming,
        "claims 8e8 images, labels flipped, counters forged": lambda one: forging_counters(claiming(one)),
        "claims 900 times, one class, counters forged": lambda one: forging_counters(claiming_just_below(one)),
    }
    return changes[name](upload) if name in changes else upload


# --- what comes of it -------------------------------------------------------------------------------------------------


class Fusions:
    """Replies, each made once: without the attacker many attacks are the same federation."""

    def __init__(self, fed: Federation) -> None:
        self.fed = fed
        self.made: dict[str, list[Reply]] = {}

    def fuse(self, method: Method[Any], spec: str, uploads: Sequence[Upload]) -> list[Reply]:
        digest = hashlib.sha256(b"".join(upload.pack() for upload in uploads)).hexdigest()
        if f"{spec} {digest}" not in self.made:
            ctx = replace(self.fed.ctx, scope=f"poison/{digest[:16]}/{spec}", store=MemoryStore())
            self.made[f"{spec} {digest}"] = method.fuse(uploads, ctx)
        return self.made[f"{spec} {digest}"]


def accuracy(predictor: Predictor, images: np.ndarray, labels: np.ndarray) -> float:
    return float((predictor.probabilities(images).argmax(1) == labels).mean())


def opened(predictor: Predictor, marked: np.ndarray) -> float:
    """How often a marked image of another class is said to be of the attacker's."""
    return float((predictor.probabilities(marked).argmax(1) == TARGET).mean())


def sent(name: str, method: Method[Any], fed: Federation) -> list[Upload]:
    """Everybody's uploads."""
    uploads = [method.upload(client, fed.ctx) for client in fed.clients]
    if name not in ("honest", "left out"):
        uploads[ATTACKER] = attack(name, method, fed.clients[ATTACKER], fed.ctx)
    elif name == "left out":
        del uploads[ATTACKER]
    return uploads


def outcome(name: str, spec: str, fed: Federation, defended: bool, fusions: Fusions) -> dict[str, Any]:
    """The honest sites' models after an attack: accuracy on all test images, and how often the back door opens."""
    method = create(spec if defended else f"{spec}:trusting", SETTINGS)
    uploads = sent(name, method, fed)
    bad = fed.clients[ATTACKER].name
    refused = ""
    try:
        pipeline.check_upload(method, next((u for u in uploads if u.client == bad), uploads[0]), fed.ctx.task)
    except FedBiCrossError as error:
        refused, uploads = error.code, [upload for upload in uploads if upload.client != bad]
    seen = pipeline.look_at(method, uploads, fed.ctx)
    replies = fusions.fuse(method, spec, seen.uploads)
    by_client = dict(zip([u.client for u in uploads], seen.replies_to(uploads, replies), strict=True))
    honest = [client for client in fed.clients if client.name != bad]
    asked = honest if method.personal else honest[:1]
    row: dict[str, Any] = {"attack": name, "method": spec, "defended": defended, "refused": refused}
    marked = with_trigger(fed.test_images[fed.test_labels != TARGET])
    row["notes"] = [
        {"attacker": note.client == bad, "what": note.what, "left_out": note.left_out} for note in seen.notes
    ]
    if spec == "primum":  # its student: personal models are another part
        student = create("primum:student", SETTINGS)
        models = [student.personalize(honest[0], by_client[honest[0].name], fed.ctx)]
    else:
        models = [method.personalize(client, by_client[client.name], fed.ctx) for client in asked]
    row["accuracy"] = float(np.mean([accuracy(model, fed.test_images, fed.test_labels) for model in models]))
    row["opened"] = float(np.mean([opened(model, marked) for model in models]))
    return row


def personal(name: str, spec: str, fed: Federation, defended: bool, fusions: Fusions) -> dict[str, Any]:
    """Models that honest sites end with behind the gate, on their own test images, and marked ones."""
    method = create(spec if defended else f"{spec}:trusting", SETTINGS)
    uploads = sent(name, method, fed)
    seen = pipeline.look_at(method, uploads, fed.ctx)
    replies = seen.replies_to(uploads, fusions.fuse(method, spec, seen.uploads))
    by_client = dict(zip([upload.client for upload in uploads], replies, strict=True))
    honest = [client for place, client in enumerate(fed.clients) if place != ATTACKER]
    marked = with_trigger(fed.test_images[fed.test_labels != TARGET])
    row: dict[str, Any] = {"attack": name, "method": spec, "defended": defended, "sites": []}
    for client in honest:
        ours = pipeline.personalize(method, client, by_client[client.name], fed.ctx, f"{spec}/{client.name}")
        models = ours, method.alone(client, fed.ctx)
        own = fed.owner == fed.clients.index(client)
        said = [model.probabilities(fed.test_images[own]) for model in models]
        site: dict[str, Any] = {"site": client.name, "images": int(own.sum())}
        site["let_in"] = not np.array_equal(*said)
        for whose, model, answers in zip(("personal", "alone"), models, said, strict=True):
            site[whose] = float((answers.argmax(1) == fed.test_labels[own]).mean()) if own.any() else None
            site[f"{whose}_opened"] = opened(model, marked)
        row["sites"].append(site)
    return row


def looked_at(partition: str, settings: Mapping[str, Any], store: Any) -> dict[str, Any]:
    """What the defence says of a federation in which everybody is honest, and whether it changes any upload."""
    fed = federation({**SMALLER, **settings}, store)
    found: dict[str, Any] = {"partition": partition, "seed": fed.ctx.seed, "sites": len(fed.clients)}
    for spec in LOOKED_AT:
        method = create(spec, SETTINGS)
        uploads = [method.upload(client, fed.ctx) for client in fed.clients]
        for upload in uploads:
            pipeline.check_upload(method, upload, fed.ctx.task)
        seen = pipeline.look_at(method, uploads, fed.ctx)
        found[spec] = {
            "notes": [note.what for note in seen.notes],
            "left_out": sum(note.left_out for note in seen.notes),
            "limited": sum(a is not b for a, b in zip(seen.uploads, uploads, strict=False)),
            "lost": lost(spec, uploads, seen.uploads, fed),
        }
    return found


def at_most_half(totals: torch.Tensor, most: float) -> torch.Tensor:
    """In the place of `steps.outliers.capped`: nobody has more than all others together."""
    return ((totals.sum() - totals) / totals).clamp_max(1.0)


def hostile(partition: str, settings: Mapping[str, Any], several: Sequence[int], store: Any) -> list[dict[str, Any]]:
    """How many of so many members that attack are left out, and how many honest ones with them."""
    fed = federation({**SMALLER, **settings}, store)
    rows: list[dict[str, Any]] = []
    order = [*fed.clients[ATTACKER:], *fed.clients[:ATTACKER]]
    for name in ("labels flipped", "logits x100"):
        for count in several:
            bad = {client.name for client in order[:count]}
            row: dict[str, Any] = {"partition": partition, "seed": fed.ctx.seed, "sites": len(fed.clients)}
            row |= {"attack": name, "hostile": count}
            for spec in LOOKED_AT:
                method = create(spec, SETTINGS)
                uploads = [
                    attack(name, method, client, fed.ctx) if client.name in bad else method.upload(client, fed.ctx)
                    for client in fed.clients
                ]
                gone = {note.client for note in pipeline.look_at(method, uploads, fed.ctx).notes if note.left_out}
                row[spec] = {"found": len(gone & bad), "wronged": len(gone - bad)}
            rows.append(row)
    return rows


def lost(spec: str, uploads: Sequence[Upload], used: Sequence[Upload], fed: Federation) -> float:
    """Accuracy on all test images that the defence costs; primum's teacher stands for its student."""
    if len(uploads) == len(used) and all(a is b for a, b in zip(uploads, used, strict=True)):
        return 0.0
    method = create("ensemble:consensus" if spec == "primum" else spec)
    both = [method.personalize(fed.clients[0], method.fuse(given, fed.ctx)[0], fed.ctx) for given in (uploads, used)]
    before, after = (accuracy(model, fed.test_images, fed.test_labels) for model in both)
    return before - after


def attacks(methods: Sequence[str], names: Sequence[str], store: Any) -> list[dict[str, Any]]:
    """A row for each method, attack, and with or without the defence."""
    fed = federation(ATTACKED, store)
    fusions = Fusions(fed)
    rows: list[dict[str, Any]] = []
    for spec in methods:
        for name in names:
            for defended in (False, True):
                rows.append(outcome(name, spec, fed, defended, fusions))
                print(rows[-1], flush=True)
    return rows


def personal_models(names: Sequence[str], store: Any) -> list[dict[str, Any]]:
    """A row for each attack, with and without the defence."""
    fed = federation(GATED, store)
    fusions, rows = Fusions(fed), []
    for spec, name, defended in product(BEHIND_A_GATE, names, (False, True)):
        rows.append(personal(name, spec, fed, defended, fusions))
        print(rows[-1], flush=True)
    return rows


def doors(seed: int, length: int, store: Any) -> list[dict[str, Any]]:
    """primum's student with a back door among the uploads, without that site, and with that site honest."""
    fed = federation({**ATTACKED, "seeds": [seed]}, store)
    method = create("primum:student", {"primum": {**SETTINGS["primum"], "steps": length}})
    marked, rows = with_trigger(fed.test_images[fed.test_labels != TARGET]), []
    for name in ("honest", "left out", "back door"):
        uploads = [method.upload(client, fed.ctx) for client in fed.clients]
        if name == "back door":
            uploads[ATTACKER] = attack(name, method, fed.clients[ATTACKER], fed.ctx)
        elif name == "left out":
            del uploads[ATTACKER]
        ctx = replace(fed.ctx, scope=f"doors/{name.replace(' ', '-')}", store=MemoryStore())
        model = method.personalize(fed.clients[0], method.fuse(uploads, ctx)[0], ctx)
        told = {"accuracy": accuracy(model, fed.test_images, fed.test_labels), "opened": opened(model, marked)}
        rows.append({"seed": seed, "steps": length, "upload": name, **told})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parts = ("attacks", "personal", "honest", "fresh", "half", "hostile", "doors")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.poison", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "benchmarks" / "poison.json")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--attacks", nargs="+", default=ATTACKS)
    parser.add_argument("--door-seeds", nargs="+", type=int, default=DOOR_SEEDS)
    parser.add_argument("--door-steps", nargs="+", type=int, default=DOOR_STEPS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {}
    with tempfile.TemporaryDirectory() as folder, RunFolder(given.cache or Path(folder)) as cache:
        if "attacks" in given.parts:
            rows = [*found.get("attacks", []), *attacks(given.methods, given.attacks, cache.store)]
            made = {(row["method"], row["attack"], row["defended"]): row for row in rows}
            order = {name: place for place, name in enumerate((*METHODS, *ATTACKS))}
            found["attacks"] = sorted(made.values(), key=lambda row: (order[row["method"]], order[row["attack"]]))
        if "personal" in given.parts:
            found["personal"] = personal_models(given.attacks, cache.store)
        for part, federations in (("honest", HONEST), ("fresh", FRESH)):
            if part in given.parts:
                every = [(name, settings) for name, several in federations.items() for settings in several]
                found[part] = [looked_at(name, settings, cache.store) for name, settings in every]
                print(*found[part], sep="\n", flush=True)
        if "half" in given.parts:
            every = [(name, one) for part in (HONEST, FRESH) for name, several in part.items() for one in several]
            with mock.patch.object(outliers, "capped", at_most_half):
                found["half"] = [looked_at(name, settings, cache.store) for name, settings in every]
        if "hostile" in given.parts:
            found["hostile"] = []
            for name, (several, counts) in HOSTILE.items():
                for settings in several:
                    found["hostile"] += hostile(name, settings, counts, cache.store)
                    print(found["hostile"][-1], flush=True)
        if "doors" in given.parts:
            cases = [(seed, length) for length in given.door_steps for seed in given.door_seeds]
            rows = [*found.get("doors", []), *(row for case in cases for row in doors(*case, cache.store))]
            kept = {(row["steps"], row["seed"], row["upload"]): row for row in rows}
            found["doors"] = sorted(kept.values(), key=lambda row: (row["steps"], row["seed"]))
    out = {**found, "config": {**COMMON, **ATTACKED}, "gated": {**COMMON, **GATED}, "smaller": SMALLER}
    out |= {"settings": SETTINGS}
    given.out.write_text(json.dumps({**out, "versions": versions("cpu")}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
