"""A made-up run that looks like a real one: Dirichlet clients, three protocols, baselines, one odd method."""

from __future__ import annotations

import numpy as np
import pytest

from fedbicross.evaluate import clinical
from fedbicross.evaluate.metrics import paired_interval

CLASSES = ["basophil", "eosinophil", "erythroblast", "granulocyte", "lymphocyte", "monocyte", "neutrophil", "platelet"]
PROTOCOLS = ("global", "matched", "label_set")
# name, role, (global, matched, label-set) accuracy around which the clients scatter
METHODS = [
    ("majority", "baseline", (0.19, 0.71, 0.37)),
    ("local_only", "baseline", (0.46, 0.93, 0.72)),
    ("ensemble:mean", "baseline", (0.70, 0.72, 0.76)),
    ("ensemble:class_weighted", "method", (0.55, 0.94, 0.80)),
    ("fedisca", "method", (0.68, 0.83, 0.74)),
    ("fedbicross", "method", (0.66, 0.945, 0.81)),
    ("fedbicross:uniform", "method", (0.64, 0.86, 0.78)),
    ("centralised", "upper_bound", (0.95, 0.96, 0.95)),
]
METRICS = ("accuracy", "balanced_accuracy", "macro_auc", "macro_f1", "ece")


def build(seeds=1, clients=5, methods=METHODS, classes=CLASSES, epochs=20, diagnosis=True, **changes):
    rng = np.random.default_rng(7)
    names = [f"client-{index}" for index in range(clients)]
    results = {
        "schema": 1,
        "name": "demo",
        "complete": True,
        "dataset": {
            "name": "cells",
            "classes": list(classes),
            "train_images": 1200 * clients,
            "test_images": 3421,
            "image_size": 28,
            "channels": 3,
            "note": "Synthetic cells drawn by fedbicross; easy, for demonstration only.",
            "digest": "sha256:" + "ab" * 32,
        },
        "clients": {},
        "rows": [],
        "training": {},
        "warnings": ["client-1 holds a single class; macro AUC is not defined for it"],
        "config": {"run": {"name": "demo", "seeds": list(range(seeds))}, "train": {"epochs": epochs, "lr": 0.01}},
        "versions": {"fedbicross": "0.1.0", "python": "3.11.9", "torch": "2.13.0", "numpy": "2.1.0"},
        "partition_sha256": "0f" * 32,
        "rows_sha256": "1e" * 32,
    }
    for seed in range(seeds):
        counts = [np.floor(1200 * rng.dirichlet([0.25] * len(classes))).astype(int).tolist() for _ in names]
        results["clients"][str(seed)] = [
            {"client": name, "num_samples": sum(row), "class_counts": row, "excluded": False}
            for name, row in zip(names, counts, strict=True)
        ]
        results["training"][str(seed)] = {name: _training(rng, epochs) for name in names}
        offsets = rng.normal(0, 0.02, clients)
        local = {}
        for method, role, levels in methods:
            row = _row(rng, method, role, seed, names, levels, offsets, len(classes), local, counts, methods)
            if diagnosis and method == "fedbicross":
                row["diagnosis"] = _diagnosis(rng)
            results["rows"].append(row)
    return results | changes


def _training(rng, epochs):
    top = rng.uniform(0.88, 0.98)
    speed = rng.uniform(3, 8)
    history = [
        {
            "epoch": epoch,
            "lr": 0.01,
            "train_loss": float(1.9 * np.exp(-epoch / speed) + rng.uniform(0.02, 0.06)),
            "val_accuracy": float(top * (1 - np.exp(-epoch / speed)) + rng.normal(0, 0.006)),
        }
        for epoch in range(1, epochs + 1)
    ]
    best = max(history, key=lambda entry: entry["val_accuracy"])["epoch"] if history else 0
    return {"history": history, "best_epoch": best, "train_images": 1080, "val_images": 120}


def _row(rng, method, role, seed, names, levels, offsets, classes, local, counts, methods):
    entries = []
    for index, name in enumerate(names):
        accuracy = {
            protocol: float(np.clip(level + offsets[index] + rng.normal(0, 0.025), 0.01, 0.999))
            for protocol, level in zip(PROTOCOLS, levels, strict=True)
        }
        gain = dict.fromkeys(PROTOCOLS)
        if method == "local_only":
            local[name] = accuracy
        if name in local and role != "upper_bound":
            gain = {protocol: accuracy[protocol] - local[name][protocol] for protocol in PROTOCOLS}
        entry = {metric: dict.fromkeys(PROTOCOLS) for metric in METRICS} | {
            "client": name,
            "accuracy": accuracy,
            "balanced_accuracy": {protocol: 0.97 * value for protocol, value in accuracy.items()},
            "macro_auc": {"global": 0.9, "matched": None, "label_set": 0.91},
            "macro_f1": {protocol: 0.95 * value for protocol, value in accuracy.items()},
            "ece": dict.fromkeys(PROTOCOLS, 0.043),
            "test_images": dict.fromkeys(PROTOCOLS, 400),
            "confusion": {p: _confusion(rng, classes, accuracy[p], counts[index], p) for p in PROTOCOLS},
            "gain_over_local": gain,
            **_pairs(gain["matched"]),
            "harmed": None if gain["matched"] is None else gain["matched"] < 0,
            "upload_bytes": 0 if role == "baseline" and method != "ensemble:mean" else 44_700_000,
            "reply_bytes": 0 if role == "baseline" and method != "ensemble:mean" else 44_700_000 * 2,
        }
        entries.append(entry)
    worst = min(entries, key=lambda entry: entry["accuracy"]["matched"])
    judged = [entry["harmed"] for entry in entries if entry["harmed"] is not None]
    upper = role == "upper_bound"
    return {
        "method": method,
        "seed": seed,
        "role": role,
        "alone": "local_only" if any(name == "local_only" for name, _, _ in methods) else None,
        **{metric: {p: _mean([e[metric][p] for e in entries]) for p in PROTOCOLS} for metric in METRICS},
        "accuracy_weighted": {p: _mean([e["accuracy"][p] for e in entries]) for p in PROTOCOLS},
        "worst_client": {p: {"accuracy": worst["accuracy"][p], "client": worst["client"]} for p in PROTOCOLS},
        "harmed_clients": sum(judged) if judged else None,
        "clearly_harmed_clients": sum(e["clearly_harmed"] for e in entries if e["harmed"] is not None)
        if judged
        else None,
        "helped_clients": sum(not harmed for harmed in judged) if judged else None,
        "num_clients": len(names),
        "clinical": _clinical(np.random.default_rng(5), classes),
        "patients": None,
        "clients": entries,
        "upload_bytes": None if upper else sum(entry["upload_bytes"] for entry in entries),
        "reply_bytes": None if upper else sum(entry["reply_bytes"] for entry in entries),
        "client_flops": 12_300_000_000_000,
        "server_flops": 3_400_000_000_000_000 if method.startswith("fed") else 0,
        "seconds": 12.5 if role == "baseline" else 311.0,
        "seconds_by_stage": {
            "local_training": 17.9,
            "upload": 2.0,
            "fuse": 240.0 if method.startswith("fed") else 0.2,
            "personalize": 41.0 if method.startswith("fed") else 0.0,
            "evaluate": 10.1,
        },
        "leaves_the_hospital": "nothing"
        if role == "baseline"
        else "model weights, batch-norm statistics, class counts",
        "warnings": ["two clusters have one member each"] if method == "fedbicross:uniform" else [],
    }


def _clinical(rng, classes):
    """As `evaluate.clinical` describes made-up answers, with a threshold for the first class alone."""
    labels = rng.integers(0, classes, 200)
    probs = rng.dirichlet(np.ones(classes), 200) + (labels[:, None] == np.arange(classes))
    probs /= probs.sum(1, keepdims=True)
    return clinical.describe([probs], labels, [np.arange(200) < 150], [[0.4] + [None] * (classes - 1)])


def _pairs(gain, images=400):
    """What a comparison image by image might have said of this gain."""
    if gain is None:
        return {"against_alone": None, "clearly_harmed": None, "clearly_helped": None}
    lost, won = 5 + max(round(-gain * images), 0), 5 + max(round(gain * images), 0)
    low, high = paired_interval(lost, won, images)
    others = {"balanced_accuracy": [low, high], "macro_auc": None}
    pairs = {"images": images, "lost": lost, "won": won, "interval": [low, high], "intervals": others}
    return {"against_alone": pairs, "clearly_harmed": high < 0, "clearly_helped": low > 0}


def without_pairs(results):
    """The same as an older version would have stored it."""
    new = ("alone", "clearly_harmed_clients", "clearly_helped_clients", "clinical", "patients")
    per_client = ("against_alone", "clearly_harmed", "clearly_helped")
    for row in results["rows"]:
        for key in new:
            row.pop(key, None)
        for client in row["clients"]:
            for key in per_client:
                client.pop(key, None)
    return results


def _mean(values):
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _confusion(rng, classes, accuracy, counts, protocol):
    totals = (
        [400 // classes] * classes if protocol == "global" else [round(400 * c / max(sum(counts), 1)) for c in counts]
    )
    matrix = []
    for index, total in enumerate(totals):
        share = np.full(classes, (1 - accuracy) / max(classes - 1, 1))
        share[index] = accuracy if classes > 1 else 1.0
        matrix.append(rng.multinomial(total, share / share.sum()).tolist())
    return matrix


def _diagnosis(rng):
    steps = list(range(0, 2000, 100))
    return {
        "scalars": {"clusters K": 3, "silhouette": 0.4182, "chosen by": "gap statistic", "undefined": float("nan")},
        "curves": {
            "Inversion losses": {
                "x": steps,
                "series": {
                    n: (3 * np.exp(-np.array(steps) / 600) + i / 3).tolist() for i, n in enumerate(["CE", "BN", "TV"])
                },
                "xlabel": "iteration",
                "ylabel": "loss",
            }
        },
        "heatmaps": {
            "Cross-cluster weights w": {
                "values": rng.dirichlet([1.0] * 3, 3).tolist(),
                "rows": ["G_1", "G_2", "G_3"],
                "columns": ["G_1", "G_2", "G_3"],
            },
            "Prediction similarity": {
                "values": rng.uniform(-1, 1, (5, 5)).tolist(),
                "rows": [f"client-{i}" for i in range(5)],
                "columns": [f"client-{i}" for i in range(5)],
            },
        },
        "heatmaps_over_time": {
            "Weights of G_1 over the trajectory": {
                "x": list(range(60)),
                "rows": ["G_1", "G_2", "G_3"],
                "values": rng.uniform(0, 1, (3, 60)).tolist(),
            }
        },
        "tables": {"Clusters": {"columns": ["cluster", "members", "size"], "rows": [["G_1", "client-0, client-3", 2]]}},
        "image_strips": {
            "Synthesised images": {
                "rows": ["basophil", "platelet"],
                "columns": ["0", "500", "1000", "2000"],
                "images": "a.png",
            }
        },
    }


@pytest.fixture
def make_results():
    return build


@pytest.fixture
def make_old_results():
    return lambda *values, **named: without_pairs(build(*values, **named))
