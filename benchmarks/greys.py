"""What three equal channels cost primum where images are grey: `python -m benchmarks.greys --data-dir DIR`.

Chest X-rays come as RGB files. Read as colour, they make networks whose inverted images are coloured noise; read as
grey, as `data.pictures` does, they do not. Made small, and with small networks, for a processor.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedbicross.context import Context, Task
from fedbicross.data import Dataset
from fedbicross.engine.recipe import Training
from fedbicross.federation import simulate
from fedbicross.messages import Client, Predictor
from fedbicross.methods import create
from fedbicross.runs import runner
from fedbicross.runs.config import load_config
from fedbicross.runs.environment import versions

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = {"pool": 10, "steps": 150, "batch": 64, "lr_synthesis": 0.1, "steps_distil": 800}
SIZE, SEEDS = 32, (0, 1)


def in_colour(data: Dataset) -> Dataset:
    """The same images with three equal channels."""
    train, test = (replace(split, images=np.repeat(split.images, 3, axis=3)) for split in (data.train, data.test))
    return replace(data, train=train, test=test)


def score(model: Predictor, data: Dataset) -> dict[str, float]:
    """On all test images."""
    right = model.probabilities(data.test.images).argmax(1) == data.test.labels
    by_class = [right[data.test.labels == c].mean() for c in range(len(data.classes))]
    return {"accuracy": round(float(right.mean()), 4), "balanced": round(float(np.mean(by_class)), 4)}


def cell(source: str, size: int, colour: bool, seed: int, epochs: int, settings: dict[str, Any]) -> dict[str, Any]:
    """The teacher and its student."""
    torch.set_num_threads(1)
    given = {"data": {"name": source, "image_size": size}, "partition": {"kind": "dirichlet", "alpha": 0.1}}
    prepared = runner.prepare(load_config(None, {**given, "clients": 5, "seeds": [seed]}, []))
    clients, _ = runner.make_clients(prepared.dataset, prepared.partitions[seed])
    data = prepared.dataset
    if colour:
        data = in_colour(data)
        clients = [Client(c.name, np.repeat(c.images, 3, axis=3), c.labels) for c in clients]
    task = Task(tuple(data.classes), data.image_size, data.channels, "resnet8")
    ctx = Context(task, Training(recipe="modern", epochs=epochs), seed=seed)
    row: dict[str, Any] = {"pixels": size, "channels": data.channels, "seed": seed}
    row["class_counts"] = [c.class_counts(len(data.classes)) for c in clients]
    for spec in ("ensemble:consensus", "primum:student"):  # networks are trained once: they lie in the same store
        found = simulate(create(spec, {"primum": settings}), clients, replace(ctx, scope=f"seed-{seed}/{spec}"))
        row[spec] = score(found[clients[0].name], data)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.greys", description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True, help="where the folder kermany_cxr_224 lies")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "primum" / "greys.json")
    parser.add_argument("--epochs", type=int, default=40)
    args = parser.parse_args()
    source = str(args.data_dir / "kermany_cxr_224")
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        made = [
            pool.submit(cell, source, SIZE, colour, seed, args.epochs, SETTINGS)
            for seed in SEEDS
            for colour in (False, True)
        ]
        rows = []
        for job in made:
            rows.append(job.result())
            print(json.dumps(rows[-1]), flush=True)
    stored = {"rows": rows, "epochs": args.epochs, "settings": SETTINGS, "versions": versions("cpu")}
    args.out.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
