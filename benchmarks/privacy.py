"""Accuracy against ε for `analytic`: `python -m benchmarks.privacy IMAGES --features DIR [--out FILE]`.

IMAGES is a folder of chest X-rays, train/NORMAL and so on (docs/encoders.md), or with `--data-dir` the name of a data
set, e.g. `bloodmnist --size 28 --encoder-size 96`. Features of EfficientNet-Lite0 are computed once and kept in DIR.
Every row is a whole simulated federation: uploads with noise, the server, and the model's answers to the test images.
With `--develop` a fifth of the *training* images takes the place of the test images and several numbers of random
directions are tried: the test images chose nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.development import held_back
from fedbicross.context import Context, MemoryStore, Task
from fedbicross.data.load import load_dataset
from fedbicross.data.partition import make_partition
from fedbicross.engine.recipe import Training
from fedbicross.evaluate import metrics
from fedbicross.federation import simulate
from fedbicross.methods import create
from fedbicross.runs.environment import versions
from fedbicross.runs.runner import make_clients
from fedbicross.runs.store import DiskStore
from fedbicross.seeds import numpy_rng

ROOT = Path(__file__).resolve().parents[1]
EPSILONS = (1.0, 0.5, 4.0, 8.0)
DELTA = 1e-5
SITES = {"one site": (1, "iid"), "5 sites, alike": (5, "iid"), "5 sites, α = 0.5": (5, "dirichlet")}
SEEDS = range(5)
ENCODER = "efficientnet_lite0"


class Kept(MemoryStore):
    """Features on disk, all else in memory."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.disk = DiskStore(folder)

    def load(self, name: str) -> bytes | None:
        return (self.disk.load if name.startswith("features/") else super().load)(name)

    def save(self, name: str, data: bytes) -> None:
        (self.disk.save if name.startswith("features/") else super().save)(name, data)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.privacy", description=__doc__)
    parser.add_argument("images")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--encoder-size", type=int)
    parser.add_argument("--features", type=Path, required=True)
    parser.add_argument("--develop", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = load_dataset(given.images, given.data_dir, given.size)
    data = held_back(data) if given.develop else data
    train, test = data.train, data.test
    task = Task(tuple(data.classes), data.image_size, data.channels, "cnn")
    view = {"encoder": ENCODER, "encoder_size": given.encoder_size, "delta": DELTA}
    rows: list[dict[str, Any]] = []
    for settings, place, seed in development() if given.develop else measurement():
        count, kind = SITES[place]
        partition = make_partition(data, kind, count, numpy_rng(seed, "partition"), seed=seed, alpha=0.5)
        clients = make_clients(data, partition)[0]
        ctx = Context(task, Training(), seed=seed, store=Kept(given.features))
        began = time.perf_counter()
        method = create("analytic", {"analytic": {**view, **settings}})
        model = simulate(method, clients, ctx)[clients[0].name]
        answers = model.probabilities(test.images, store=ctx.store)
        row = {"settings": settings, "sites": place, "seed": seed, "seconds": time.perf_counter() - began}
        row |= {"images": [len(client.labels) for client in clients], **scores(answers, test.labels)}
        rows.append(row)
        print(row, flush=True)
        name = "cxr" if given.data_dir is None else data.name
        about = {"data": name, "classes": len(data.classes), "view": view, "delta": DELTA}
        write(given, {**about, "train_images": len(train.labels), "test_images": len(test.labels)}, rows)


def measurement() -> list[tuple[dict[str, Any], str, int]]:
    """What the table shows: without noise, with and without the projection; and with noise, over seeds."""
    plain = [({"projection": width}, place, 0) for place, width in product(SITES, (None, 256))]
    private = [{"projection": 256, "epsilon": epsilon} for epsilon in EPSILONS]
    return plain + list(product(private, SITES, SEEDS))


def development() -> list[tuple[dict[str, Any], str, int]]:
    """The number of random directions, which is the one setting that the variant `private` chooses."""
    widths = (None, 64, 128, 256, 512)
    tried = [{"projection": width, "epsilon": epsilon} for width, epsilon in product(widths, (1.0, 8.0))]
    return list(product(tried, ("one site", "5 sites, alike"), range(2)))


def scores(answers: np.ndarray, labels: np.ndarray) -> dict[str, float | None]:
    return {
        "accuracy": metrics.accuracy(answers, labels),
        "balanced_accuracy": metrics.balanced_accuracy(answers, labels),
        "macro_auc": metrics.macro_auc(answers, labels),
    }


def write(given: argparse.Namespace, about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    name = f"{about['data']}-development.json" if given.develop else f"{about['data']}.json"
    out = given.out or ROOT / "results" / "privacy" / name
    out.parent.mkdir(parents=True, exist_ok=True)
    content = {**about, "scored_on": "a fifth of the training images" if given.develop else "the test images"}
    content |= {"versions": versions("cpu"), "rows": rows}
    out.write_text(json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
