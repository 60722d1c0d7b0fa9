"""Which classes each network is inverted into: `python -m benchmarks.label_mixes --data-dir DIR [--data NAME ...]`.

What primum's setting `labels` was chosen by. A hospital with one class has learnt nothing from it, since balanced
training has nothing to tell it from; images inverted from its network teach the student what nobody said. Small
networks and short runs, for two cores. A fifth of the *training* images, dealt to nobody, stands in for test images:
these choose nothing. The chest X-rays are the folder DIR/kermany_cxr_224, at 28 pixels. Rows that are stored are not
made again.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.development import held_back
from fedbicross.context import Context, MemoryStore, Task
from fedbicross.data.dataset import Dataset
from fedbicross.data.load import load_dataset
from fedbicross.engine import combine
from fedbicross.evaluate import metrics
from fedbicross.messages import Predictor
from fedbicross.methods import create
from fedbicross.runs import runner
from fedbicross.runs.config import load_config
from fedbicross.runs.environment import versions

ROOT = Path(__file__).resolve().parents[1]
DATA = ("kermany_cxr_224", "pneumoniamnist", "bloodmnist", "dermamnist")
SEEDS = range(3)
WAYS = ("own", "able", "contrast")
IMAGES = 5000  # of training, at most, before a fifth of them is set aside
COMMON: dict[str, Any] = {
    "model": "resnet8",
    "clients": 5,
    "partition": {"kind": "dirichlet", "alpha": 0.1},
    "training": {"recipe": "modern", "epochs": 15, "batch_size": 32},
    "device": "cpu",
}
SERVER: dict[str, Any] = {"pool": 10, "batch": 48, "steps": 300, "lr_synthesis": 0.1, "steps_distil": 1000}


def development(name: str, folder: Path) -> Dataset:
    """Training images in the place of test images."""
    source = str(folder / name) if (folder / name).is_dir() else name
    return held_back(load_dataset(source, folder, 28, train_size=IMAGES))


def cell(data: Dataset, seed: int) -> dict[str, Any]:
    """Accuracy of the teacher, and of a student for each way."""
    config = load_config(None, {**COMMON, "seeds": [seed]}, [])
    prepared = runner.prepare(config, data)
    clients, _ = runner.make_clients(data, prepared.partitions[seed])
    task = Task(tuple(data.classes), data.image_size, data.channels, config.model)
    ctx = Context(task, config.training, seed=seed, store=MemoryStore())
    uploads = [create("primum").upload(client, ctx) for client in clients]
    consensus = create("ensemble:consensus")
    teacher = consensus.personalize(clients[0], consensus.fuse(uploads, ctx)[0], ctx)
    found: dict[str, Any] = {"teacher": scores(teacher, data), "student": {}}
    for way in WAYS:
        labels = "own" if way == "able" else way
        method = create("primum:student", {"primum": {**SERVER, "labels": labels}})
        if way == "able":
            method._asked_for = lambda counts: counts * ((combine.contrast_counts(counts) > 0).any(1, keepdim=True))
        apart = replace(ctx, scope=f"labels/{way}")
        student = method.personalize(clients[0], method.fuse(uploads, apart)[0], apart)
        found["student"][way] = scores(student, data)
    counts = [client.class_counts(len(data.classes)) for client in clients]
    return {"data": data.name, "seed": seed, "counts": counts, **found}


def scores(model: Predictor, data: Dataset) -> dict[str, float]:
    answers, labels = model.probabilities(data.test.images), data.test.labels
    both = {"accuracy": metrics.accuracy(answers, labels), "balanced": metrics.balanced_accuracy(answers, labels)}
    return {name: round(value, 4) for name, value in both.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.label_mixes", description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--data", nargs="+", default=DATA, choices=DATA)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "primum" / "label-mixes.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = json.loads(given.out.read_text(encoding="utf-8"))["rows"] if given.out.exists() else []
    for name in given.data:
        data = development(name, given.data_dir)
        for seed in SEEDS:
            if any((row["data"], row["seed"]) == (data.name, seed) for row in rows):
                continue
            began = time.perf_counter()
            rows.append(cell(data, seed))
            print(rows[-1], f"{time.perf_counter() - began:.0f} s", flush=True)
            stored = {"rows": rows, "config": COMMON, "server": SERVER, "versions": versions("cpu")}
            given.out.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
