"""Why FALCON's teachers do not help its student: `python -m benchmarks.falcon_teachers --data-dir DIR`.

DermaMNIST, five clients at α = 0.3, features of EfficientNet-Lite0, generators smaller than the paper's. For every seed
the uploads are made once. Told is how often each kind of teacher is right about the uploaded sequences, and then how
well students do on test images that differ only in the soft labels: same start, same order, same dropout. The last
teacher was trained on everybody's real features, which no server has: it shows what a teacher could do that knows all
classes. Seeds that are stored are kept.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbicross import models, parts
from fedbicross.context import Context, MemoryStore, Store, Task
from fedbicross.engine import combine
from fedbicross.evaluate.metrics import balanced_accuracy
from fedbicross.messages import Client
from fedbicross.methods import create
from fedbicross.methods.falcon import Falcon, FalconConfig
from fedbicross.runs import runner
from fedbicross.runs.config import load_config
from fedbicross.runs.environment import versions
from fedbicross.steps import guidance

ROOT = Path(__file__).resolve().parents[1]
SEEDS = (0, 1)
COMMON: dict[str, Any] = {
    "model": "resnet8",
    "clients": 5,
    "data": {"name": "dermamnist", "train_size": 2000, "test_size": 1000},
    "partition": {"kind": "dirichlet", "alpha": 0.3},
    "device": "cpu",
}
FALCON: dict[str, Any] = {
    "encoder": "efficientnet_lite0",
    "encoder_size": 96,
    "send": "sequences",
    "width": 128,
    "layers": 1,
    "heads": 4,
    "feedforward": 128,
    "components": 5,
    "epochs_generator": 25,
    "lr_generator": 1e-3,
    "batch": 64,
    "head_hidden": 256,
    "epochs_global": 30,
    "batch_global": 64,
}
UNIFORM, REAL = "mean of all (Eq. 10)", "one trained on everybody's real features"
SENDER = "the sender's own"


def soft_labels(
    heads: Sequence[nn.Module], sequences: Sequence[Tensor], labels: Sequence[Tensor], knows: Tensor, temperature: float
) -> dict[str, Tensor]:
    """What each kind of teacher says of all sequences; ``knows`` [N,C] is how many images of a class each client has.

    Only `SENDER` and the teachers that have the class look at a sequence's label or sender.
    """
    x, y = torch.cat(list(sequences)), torch.cat(list(labels))
    sender = torch.cat([torch.full((len(part),), i) for i, part in enumerate(labels)])
    counts = torch.stack([torch.bincount(part, minlength=knows.shape[1]) for part in labels])
    with torch.no_grad():
        logits = torch.stack([torch.cat([head(part) for part in torch.split(x, 512)]) for head in heads])
    soft = combine.soften(logits, temperature)
    has = (knows > 0).float()[:, y]
    sizes = knows.sum(1).float()
    join = partial(guidance.ensemble_distribution, logits, temperature)
    return {
        UNIFORM: join(),
        "weighted by images": join(sizes / sizes.sum()),
        "weighted by class": join(combine.class_weights(counts.float())),
        "only those that have the class": torch.einsum("nb,nbc->bc", has / has.sum(0), soft),
        SENDER: soft[sender, torch.arange(len(y))],
    }


def student(
    config: FalconConfig, x: Tensor, y: Tensor, soft: Tensor, alpha: float, temperature: float, ctx: Context
) -> nn.Module:
    """The global classifier by Eq. 13; all students start alike and see batches in the same order."""
    head = parts.heads.classifier(config, x.shape[2], len(ctx.task.classes))
    models.initialise(head, ctx.torch_rng("falcon", "global"))

    def loss(rows: Tensor, stream: torch.Generator) -> Tensor:
        with parts.heads.seeded(stream):
            logits = head(x[rows])
        return guidance.guided_loss(logits, y[rows], soft[rows], alpha, temperature)

    optimiser = parts.heads.make_optimiser("adam", head, config.lr_global)
    fit = parts.heads.Fit(
        "study", head, optimiser, loss, len(y), batch=config.batch_global, epochs=config.epochs_global, ctx=ctx
    )
    fit.run("student")
    ctx.drop_stage("study")
    return head.eval()


def centralised(config: FalconConfig, clients: Sequence[Client], ctx: Context) -> nn.Module:
    """One classifier on the real features of all clients, by FALCON's local recipe, the last epoch."""
    tokens = torch.cat([parts.features.tokens(config, client, ctx) for client in clients])
    labels = torch.from_numpy(np.concatenate([client.labels for client in clients]))
    head = parts.heads.classifier(config, tokens.shape[2], len(ctx.task.classes))
    models.initialise(head, ctx.torch_rng("study", "centralised"))
    how = config.epochs_classifier, config.batch, config.lr_classifier
    parts.heads.fit_head("centralised", head, tokens, labels, ctx, epochs=how[0], batch=how[1], lr=how[2])
    return head.eval()


def right(scores: Tensor, labels: Tensor) -> dict[str, float]:
    """Share of right answers, and the mean of it over classes."""
    found = float((scores.argmax(1) == labels).float().mean())
    balanced = balanced_accuracy(scores.softmax(1).numpy(), labels.numpy())
    return {"accuracy": round(found, 4), "balanced": round(balanced or 0.0, 4)}


def cell(seed: int, common: Mapping[str, Any], settings: Mapping[str, Any], store: Store) -> list[dict[str, Any]]:
    """All teachers and students of one federation."""
    config = load_config(None, {**common, "seeds": [seed]}, [])
    prepared = runner.prepare(config)
    found = prepared.dataset
    clients, _ = runner.make_clients(found, prepared.partitions[seed])
    classes = len(found.classes)
    task = Task(tuple(found.classes), found.image_size, found.channels, config.model)
    ctx = Context(task, config.training, seed, store=store, scope=f"seed-{seed}")
    method = create("falcon", {"falcon": dict(settings)})
    assert isinstance(method, Falcon)
    chosen = method.config
    began = time.perf_counter()
    uploads = [method.upload(client, ctx) for client in clients]
    test = ctx.features(found.test.images, chosen.spec(task.image_size))
    answers = torch.from_numpy(found.test.labels)
    heads = [
        models.heads.load(chosen.head, parts.features.take_prefix(upload.tensors, "classifier."), classes)
        for upload in uploads
    ]
    sequences, labels = zip(*(method.synthetic_tokens(upload, ctx) for upload in uploads), strict=True)
    x, y = torch.cat(sequences), torch.cat(labels)
    knows = torch.stack([torch.tensor(client.class_counts(classes)) for client in clients])
    rows: list[dict[str, Any]] = []

    def note(kind: str, what: str, **told: Any) -> None:
        nonlocal began
        rows.append({"seed": seed, "kind": kind, "what": what, **told})
        rows[-1]["seconds"] = round(time.perf_counter() - began, 1)
        began = time.perf_counter()
        print(rows[-1], flush=True)

    central = centralised(chosen, clients, ctx)
    made = {t: soft_labels(heads, sequences, labels, knows, t) for t in (chosen.temperature, 1.0)}
    with torch.no_grad():
        seen = torch.cat([central(part) for part in torch.split(x, 512)])
        unseen = torch.stack([head(test) for head in heads])
        real = {UNIFORM: combine.soften(unseen, chosen.temperature).mean(0), REAL: central(test)}
    for temperature, kinds in made.items():
        kinds[REAL] = combine.soften(seen, temperature)
    lacking = [round(float((knows[i] == 0).float().mean()), 3) for i in range(len(clients))]
    for what, soft in made[chosen.temperature].items():
        told = {"of_test": right(real[what], answers)} if what in real else {}
        truth = soft[torch.arange(len(y)), y]
        note("teacher", what, **right(soft, y), of_truth=round(float(truth.mean()), 4), **told)
    rows[0] |= {"classes_lacking": lacking, "sequences": len(y)}

    def learn(what: str, soft: Tensor, alpha: float, temperature: float) -> None:
        head = student(chosen, x, y, soft, alpha, temperature, ctx)
        with torch.no_grad():
            note("student", what, **right(head(test), answers), of_sequences=right(head(x), y)["accuracy"])

    learn("no teacher", made[chosen.temperature][UNIFORM], 0.0, chosen.temperature)
    for what, soft in made[chosen.temperature].items():
        learn(what, soft, chosen.alpha, chosen.temperature)
    learn(f"{UNIFORM}, T = 1", made[1.0][UNIFORM], chosen.alpha, 1.0)
    learn(f"{REAL}, T = 1", made[1.0][REAL], chosen.alpha, 1.0)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.falcon_teachers", description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "benchmarks" / "falcon-teachers.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = json.loads(given.out.read_text(encoding="utf-8"))["rows"] if given.out.exists() else []
    common = {**COMMON, "data": {**COMMON["data"], "dir": str(given.data_dir)}}
    store = MemoryStore()  # features of the same images are made once
    for seed in SEEDS:
        if any(row["seed"] == seed for row in rows):
            continue
        rows += cell(seed, common, FALCON, store)
        stored = {"rows": rows, "config": COMMON, "method": FALCON, "versions": versions("cpu")}
        given.out.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
