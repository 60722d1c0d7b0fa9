"""Trainings at once against the same one after another, on a GPU: `python -m benchmarks.at_once --data-dir DIR`.

Derma, alpha = 0.5, seed 1, the modern recipe, five ResNet-18: where recordings once shared scratch memory and four of
five trainings ended in NaN. Three runs at once and one in turn; equal digests mean equal bits of all weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import torch

from fedbicross.context import Context, Task
from fedbicross.engine import fast
from fedbicross.runs import runner
from fedbicross.runs.config import load_config
from fedbicross.runs.environment import versions

SETTINGS: dict[str, Any] = {
    "model": "resnet18",
    "clients": 5,
    "seeds": [1],
    "methods": [],
    "baselines": ["local_only"],
    "partition": {"kind": "dirichlet", "alpha": 0.5},
    "training": {"recipe": "modern", "epochs": 60},
    "device": "cuda",
}


def train(prepared: runner.Prepared) -> dict[str, Any]:
    """All clients once, in a store of its own; what came of it."""
    config, data, (seed,) = prepared.config, prepared.dataset, prepared.config.seeds
    clients, _ = runner.make_clients(data, prepared.partitions[seed])
    task = Task(tuple(data.classes), data.image_size, data.channels, config.model)
    ctx = Context(task, config.training, seed, "cuda", prepared.precision, prepared.fast)
    torch.cuda.synchronize()
    began = time.perf_counter()
    ctx.train_local_models(clients)
    seconds = time.perf_counter() - began
    digest, losses = hashlib.sha256(), []
    for client in clients:
        trained = ctx.local_model(client)
        losses.append(trained.history[-1]["train_loss"])
        for name, value in trained.state.items():
            digest.update(name.encode() + value.numpy().tobytes())
    return {"seconds": seconds, "sha256": digest.hexdigest(), "last_train_loss": losses}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.at_once", description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/at-once.json"))
    given = parser.parse_args()
    data = {"name": "dermamnist", "dir": str(given.data_dir)}
    prepared = runner.prepare(load_config(flags={**SETTINGS, "data": data}))
    runs = []
    for way in ("at once", "at once", "at once", "in turn"):
        if way == "in turn":
            with fast.one_at_a_time():
                made = train(prepared)
        else:
            made = train(prepared)
        runs.append({"way": way, **made})
        print(json.dumps(runs[-1]), flush=True)
    stored = {"config": {**SETTINGS, "data": {"name": "dermamnist"}}, "runs": runs, "versions": versions("cuda")}
    stored["equal"] = len({run["sha256"] for run in runs}) == 1
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(stored, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print("equal bits" if stored["equal"] else "DIFFERENT")


if __name__ == "__main__":
    main()
