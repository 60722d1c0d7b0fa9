"""Where FedBiCross loses accuracy, stage by stage: `python -m benchmarks.fedbicross_stages --data-dir DIR`.

BloodMNIST, five clients, small networks and short stages, so that one core is enough. For every partition and seed the
same client networks are scored alone, as cluster teachers F_k and as cluster models G_k, for several ways of stage 2;
then stage 3 is made in several ways from the cluster models of the default. Told is the accuracy on each client's
share of the test images (matched) and on all of them (global), mean over clients. Cells that are stored are kept.
With `--develop` a fifth of the *training* images takes the place of the test images, and only the rates of stage 3 are
compared: the default was confirmed by that.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.development import held_back
from fedbicross.context import Context, Task
from fedbicross.engine.predict import batch_logits
from fedbicross.messages import Client, Predictor, Upload
from fedbicross.methods import create
from fedbicross.runs import runner
from fedbicross.runs.config import load_config
from fedbicross.runs.environment import versions

ROOT = Path(__file__).resolve().parents[1]
CELLS = [(alpha, seed) for seed in (0, 1, 2) for alpha in (0.5, 0.1)]
COMMON: dict[str, Any] = {
    "model": "resnet8",
    "clients": 5,
    "data": {"name": "bloodmnist", "train_size": 2000, "test_size": 1500},
    "training": {"recipe": "paper", "lr": 1e-2, "epochs": 20, "batch_size": 32},
    "device": "cpu",
}
# Shorter than the paper's T = 500 and B = 256. Stage 3 has the paper's 10 epochs; its batches are as much smaller as
# the clients are, so that an epoch has as many steps.
BASE: dict[str, Any] = {"steps": 80, "batch": 32, "trajectories": 3, "probes": 64, "lr_synthesis": 0.1}
BASE |= {"batch_personal": 32}
SERVER: dict[str, dict[str, Any]] = {
    "default": {},
    "held-out rows of another batch": {"validation_batch": "other"},
    "own cluster's images alone": {"weights": "intra"},
    "twice the trajectories": {"trajectories": 6},
}
SLOW = {"lr_personal": 1e-3, "schedule_personal": "constant"}
FAST = {"lr_personal": 1e-2, "schedule_personal": "cosine"}
PERSONAL: dict[str, dict[str, Any]] = {
    "from G_k, 1e-3": SLOW,
    "from G_k, 1e-2 with a cosine": FAST,
    "the same, cross-entropy alone": {**FAST, "gamma": 0.0, "delta": 0.0},
    "the same, τ = 1": {**FAST, "temperature_personal": 1.0},
    "from the own model, 1e-3": {"start_personal": "own", **SLOW},
    "from the own model, 1e-2 with a cosine": {"start_personal": "own", **FAST},
    "the same, without G_k": {"start_personal": "own", **FAST, "gamma": 0.0},
}
Score = Callable[[Sequence[Predictor]], dict[str, Any]]
FINAL = "final cross-cluster weights (row listens to column)"


def scorer(images: np.ndarray, labels: np.ndarray, owner: np.ndarray) -> Score:
    """Accuracies of one model a client: the networks of a predictor answer with the mean of their logits."""

    def score(models: Sequence[Predictor]) -> dict[str, Any]:
        known: dict[int, np.ndarray] = {}
        right = []
        for model in models:
            if id(model) not in known:
                logits = torch.cat(list(batch_logits(model, images)), dim=1).mean(0)
                known[id(model)] = (logits.argmax(1).numpy() == labels).astype(float)
            right.append(known[id(model)])
        matched = [float(hits[owner == i].mean()) for i, hits in enumerate(right)]
        return {
            "matched": round(float(np.mean(matched)), 4),
            "global": round(float(np.mean([hits.mean() for hits in right])), 4),
            "clients": [round(value, 4) for value in matched],
        }

    return score


def networks(uploads: Sequence[Upload], members: Sequence[int]) -> Predictor:
    """The networks of some clients."""
    chosen = [uploads[i] for i in members]
    states = tuple(dict(upload.tensors) for upload in chosen)
    return Predictor(chosen[0].task, tuple(upload.task.model for upload in chosen), states)


def cell(alpha: float, seed: int, data_dir: Path, develop: bool = False) -> list[dict[str, Any]]:
    """All stages on one federation; or few of them, where a setting is to be chosen."""
    data = {**COMMON["data"], "dir": str(data_dir)}
    partition = {"kind": "dirichlet", "alpha": alpha}
    config = load_config(None, {**COMMON, "data": data, "partition": partition, "seeds": [seed]}, [])
    prepared = runner.prepare(config)
    if develop:
        prepared = runner.prepare(config, held_back(prepared.dataset))
    found, dealt = prepared.dataset, prepared.partitions[seed]
    clients, _ = runner.make_clients(found, dealt)
    task = Task(tuple(found.classes), found.image_size, found.channels, config.model)
    ctx = Context(task, config.training, seed=seed)
    score = scorer(found.test.images, found.test.labels, dealt.test_owner)
    rows: list[dict[str, Any]] = []

    def note(stage: str, what: str, models: Sequence[Predictor], began: float, **more: Any) -> None:
        took = round(time.perf_counter() - began, 1)
        rows.append(
            {"alpha": alpha, "seed": seed, "stage": stage, "what": what, **score(models), **more, "seconds": took}
        )
        shown = {key: value for key, value in rows[-1].items() if key != "clients"}
        print(shown, flush=True)

    began = time.perf_counter()
    method = create("fedbicross", {"fedbicross": BASE})
    uploads = [method.upload(client, ctx) for client in clients]
    note("alone", "training alone", [networks(uploads, [i]) for i in range(len(clients))], began)
    default: list[Any] = []
    for what, settings in [("default", {})] if develop else SERVER.items():
        began = time.perf_counter()
        here = Context(task, config.training, seed=seed)  # with a store of its own: nothing of the last way goes on
        replies = create("fedbicross", {"fedbicross": {**BASE, **settings}}).fuse(uploads, here)
        if not default:
            labels = [reply.info["cluster"] for reply in replies]
            teams = {k: networks(uploads, [i for i, mine in enumerate(labels) if mine == k]) for k in set(labels)}
            note("teacher", "cluster teachers F_k", [teams[k] for k in labels], began, clusters=labels)
            default = replies
        students = {r.info["cluster"]: Predictor(task, (task.model,), (dict(r.tensors),)) for r in replies}
        weights = here.record.diagnosis.get("heatmaps", {}).get(FINAL, {}).get("values", [])
        own = [round(float(row[k]), 3) for k, row in enumerate(weights)]
        note("cluster model", what, [students[r.info["cluster"]] for r in replies], began, own_weights=own)
    for what, settings in list(PERSONAL.items())[: 2 if develop else None]:
        began = time.perf_counter()
        note("personal", what, _personal({**BASE, **settings}, clients, default, ctx), began)
    return rows


def _personal(
    settings: Mapping[str, Any], clients: Sequence[Client], replies: Sequence[Any], ctx: Context
) -> list[Predictor]:
    method = create("fedbicross", {"fedbicross": dict(settings)})
    return [method.personalize(client, reply, ctx) for client, reply in zip(clients, replies, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fedbicross_stages", description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--develop", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    name = "fedbicross-rates.json" if given.develop else "fedbicross-stages.json"
    out = given.out or ROOT / "results" / "benchmarks" / name
    torch.set_num_threads(1)
    before = json.loads(out.read_text(encoding="utf-8"))["rows"] if out.exists() else []
    rows = list(before)
    for alpha, seed in CELLS:
        if any((row["alpha"], row["seed"]) == (alpha, seed) for row in before):
            continue
        rows += cell(alpha, seed, given.data_dir, given.develop)
        stored = {"rows": rows, "config": COMMON, "method": BASE, "versions": versions("cpu")}
        out.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
