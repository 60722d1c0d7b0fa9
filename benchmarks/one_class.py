"""Hospitals with one class, with and without something made up to tell it from: `python -m benchmarks.one_class`.

Balanced training has nothing to learn from one class. Tried here, not part of primum: such a hospital also trains on
images of "anything else" with the uniform distribution as their target (outlier exposure, Hendrycks et al., 2019), made
of its own images by shuffling pieces or changing colours, or of structured noise. Told is the accuracy of the consensus
teacher on the test images; hospitals with two classes or more are trained as always.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.no_counts import COMMON, accuracy_of, store
from fedbicross import models, seeds
from fedbicross.engine import combine
from fedbicross.engine.device import normalise, to_device
from fedbicross.engine.recipe import Training
from fedbicross.engine.train import balancing_shift, epoch_batches, turn_and_mirror
from fedbicross.runs import runner
from fedbicross.runs.config import load_config
from fedbicross.steps.noise import structured_noise

ROOT = Path(__file__).resolve().parents[1]
FEW = 5  # images below which a class is none
PARTITIONS: dict[str, dict[str, Any]] = {
    "one class each": {"clients": 8, "partition": {"kind": "pathological", "classes_per_client": 1}},
    "Dirichlet, alpha 0.03": {"clients": 5, "partition": {"kind": "dirichlet", "alpha": 0.03}},
    "the same, more hospitals": {"clients": 8, "partition": {"kind": "dirichlet", "alpha": 0.03}},
}
WAYS = ("nothing else", "shuffled pieces and noise", "other colours")
SEEDS = {"one class each": range(3), "Dirichlet, alpha 0.03": range(6), "the same, more hospitals": range(3)}


def shuffled(images: Tensor, rng: torch.Generator, side: int = 4) -> Tensor:
    """Each image [B,C,H,W] cut into side x side pieces, which change places; H and W are multiples of ``side``."""
    count, channels, height, width = images.shape
    pieces = images.reshape(count, channels, side, height // side, side, width // side).permute(0, 2, 4, 1, 3, 5)
    pieces = pieces.flatten(1, 2)
    order = torch.rand(count, side * side, generator=rng).argsort(1)
    moved = pieces[torch.arange(count)[:, None], order].unflatten(1, (side, side))
    return moved.permute(0, 3, 1, 4, 2, 5).reshape(images.shape)


def recoloured(images: Tensor, rng: torch.Generator) -> Tensor:
    """Channels exchanged, brighter or darker, each by itself."""
    count = len(images)
    order = torch.rand(count, 3, generator=rng).argsort(1)
    gain, shift = (torch.rand(count, 3, 1, 1, generator=rng) for _ in range(2))
    return (images[torch.arange(count)[:, None], order] * (0.25 + 1.5 * gain) + shift - 0.5).clamp(-1, 1)


def anything_else(way: str, images: Tensor, rng: torch.Generator) -> Tensor:
    """As many images of nothing that the hospital has."""
    if way == "other colours":
        return recoloured(images, rng)
    noise = structured_noise("oriented", tuple(images.shape), rng)
    half = torch.rand(len(images), 1, 1, 1, generator=rng) < 0.5
    return torch.where(half, shuffled(images, rng), noise)


def train(images: np.ndarray, labels: np.ndarray, classes: int, way: str, seed: int, name: str) -> nn.Module:
    """By the recipe of `benchmarks.no_counts`; with outliers where ``way`` says so."""
    recipe = Training(**COMMON["training"])
    model = models.build("resnet8", 3, classes, images.shape[1])
    models.initialise(model, seeds.torch_rng(seed, "init"), "torch")
    x, y = to_device(images, "cpu"), torch.from_numpy(labels)
    shift = balancing_shift(y, classes)
    optimiser = torch.optim.SGD(model.parameters(), momentum=recipe.momentum, weight_decay=recipe.weight_decay)
    outliers = seeds.torch_rng(seed, "outliers", name)
    for epoch in range(recipe.epochs):
        rng = seeds.numpy_rng(seed, "training", name, f"epoch-{epoch}")
        optimiser.param_groups[0]["lr"] = recipe.rate(epoch)
        for rows in epoch_batches(len(y), recipe.batch_size, rng):
            seen = turn_and_mirror(normalise(x[rows]), torch.from_numpy(rng.integers(0, 8, len(rows))))
            if way == "nothing else":
                loss = F.cross_entropy(model(seen) + shift, y[rows])
            else:
                logits = model(torch.cat([seen, anything_else(way, seen, outliers)]))
                flat = -logits[len(rows) :].log_softmax(1).mean()  # cross-entropy with the uniform distribution
                loss = (F.cross_entropy(logits[: len(rows)], y[rows]) + flat) / 2
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return model.eval()


def cell(partition: str, seed: int) -> dict[str, Any]:
    """The teacher's accuracy for each way."""
    prepared = runner.prepare(load_config(None, {**COMMON, **PARTITIONS[partition], "seeds": [seed]}, []))
    data, classes = prepared.dataset, len(prepared.dataset.classes)
    clients, _ = runner.make_clients(data, prepared.partitions[seed])
    counts = torch.tensor([client.class_counts(classes) for client in clients]).double()
    lone = (counts >= FEW).sum(1) < 2
    weights = combine.class_weights(combine.weighting_counts(counts, "root")).float()
    test, labels = normalise(to_device(data.test.images, "cpu")), torch.from_numpy(data.test.labels)
    kept: dict[tuple[str, str], Tensor] = {}
    accuracy = {}
    for way in WAYS:
        answers = []
        for client, alone in zip(clients, lone.tolist(), strict=True):
            key = client.name, way if alone else WAYS[0]
            if key not in kept:
                model = train(client.images, client.labels, classes, key[1], seed, client.name)
                with torch.no_grad():
                    kept[key] = torch.cat([model(part) for part in test.split(200)])
            answers.append(kept[key])
        teacher = combine.combine_logits(torch.stack(answers), "consensus", 1.0, weights)
        accuracy[way] = accuracy_of(teacher, labels)
    found = {"lone": int(lone.sum()), "clients": len(clients), "accuracy": accuracy}
    return {"partition": partition, "seed": seed, **found}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_class", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "primum" / "one-class.json")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"] if out.exists() else []  # these are not made again
    done = {(row["partition"], row["seed"]) for row in rows}
    for partition, numbers in SEEDS.items():
        for seed in [seed for seed in numbers if (partition, seed) not in done]:
            rows.append(cell(partition, seed))
            print(rows[-1], flush=True)
    rows.sort(key=lambda row: (list(SEEDS).index(row["partition"]), row["seed"]))
    store(rows, out)


if __name__ == "__main__":
    main()
