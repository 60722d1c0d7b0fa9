"""What it costs primum if no hospital tells its class counts: `python -m benchmarks.no_counts [--out FILE]`.

Drawn cells, two Dirichlet partitions and three seeds, small enough for two cores. Every client is trained with balanced
softmax. Three consensus teachers of the same networks are compared on the test images: with the true class counts, with
those that the networks show (`steps.head_counts`), and with all clients alike for every class. `exponent` is the slope
of the logarithm of what is shown over that of the count; 1 would be proportional.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from fedbicross.context import Context, Task
from fedbicross.engine.combine import combine_logits
from fedbicross.engine.predict import batch_logits
from fedbicross.messages import Predictor
from fedbicross.methods import create
from fedbicross.parts import teachers
from fedbicross.runs import runner
from fedbicross.runs.config import load_config
from fedbicross.runs.environment import versions

ROOT = Path(__file__).resolve().parents[1]
ALPHAS, SEEDS = (0.1, 0.3), (0, 1, 2)
COMMON: dict[str, Any] = {
    "model": "resnet8",
    "clients": 5,
    "data": {"name": "cells", "train_size": 2000, "test_size": 600},
    "training": {"recipe": "modern", "epochs": 12, "batch_size": 32, "loss": "balanced"},
    "device": "cpu",
}


def store(rows: list[dict[str, Any]], out: Path) -> None:
    """With what they were made by."""
    stored = {"rows": rows, "config": COMMON, "versions": versions("cpu")}
    out.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


def accuracy_of(answers: torch.Tensor, labels: torch.Tensor) -> float:
    return round(float((answers.argmax(1) == labels).double().mean()), 4)


def cell(alpha: float, seed: int) -> dict[str, Any]:
    """The classes that are found, and the accuracy of three teachers."""
    config = load_config(None, {**COMMON, "partition": {"kind": "dirichlet", "alpha": alpha}, "seeds": [seed]}, [])
    prepared = runner.prepare(config)
    data = prepared.dataset
    clients, _ = runner.make_clients(data, prepared.partitions[seed])
    task = Task(tuple(data.classes), data.image_size, data.channels, config.model)
    ctx = Context(task, config.training, seed=seed)
    uploads = [create("primum").upload(client, ctx) for client in clients]
    counts = teachers.class_counts(uploads, len(task.classes))
    shown = teachers.read_counts(uploads, ctx)
    both = (counts > 0) & (shown > teachers.LEARNT_NOTHING)
    everyone = Predictor(task, tuple(u.task.model for u in uploads), tuple(dict(u.tensors) for u in uploads))
    logits = torch.cat(list(batch_logits(everyone, data.test.images)), dim=1)
    labels = torch.from_numpy(data.test.labels)
    ways = {"counts": counts, "shown": shown, "alike": torch.ones_like(counts)}
    accuracy = {}
    for way, given in ways.items():
        answers = combine_logits(logits, "consensus", 1.0, teachers.class_weights(given, "root"))
        accuracy[way] = accuracy_of(answers, labels)
    return {
        "alpha": alpha,
        "seed": seed,
        "classes": int((counts > 0).sum()),
        "found": int(both.sum()),
        "missing": int((counts == 0).sum()),
        "taken_for_present": int(((counts == 0) & (shown > teachers.LEARNT_NOTHING)).sum()),
        "rank_correlation": round(float(spearmanr(counts[both], shown[both]).statistic), 3),
        "exponent": round(float(np.polyfit(counts[both].log().numpy(), shown[both].log().numpy(), 1)[0]), 2),
        "accuracy": accuracy,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.no_counts", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "primum" / "no-counts.json")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    rows = []
    for alpha in ALPHAS:
        for seed in SEEDS:
            rows.append(cell(alpha, seed))
            print(rows[-1], flush=True)
    store(rows, out)


if __name__ == "__main__":
    main()
