"""Membership inference on what leaves a site and on what comes back: `python -m benchmarks.membership --data-dir DIR`.

Sites of some hundred images each, drawn from a data set. Of the first site the plain network, the balanced one (which
primum uploads), primum's student and the personal model are attacked: members are the site's training images, controls
test images. Shadow networks are trained by the same recipe; those of the personal model are pairs, as it starts from
a pair. The student's attacker has shadows of the uploaded network, not of the whole federation: somebody who repeats
that could find out more.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedbicross import __version__
from fedbicross.context import Context, Task
from fedbicross.data import load_dataset
from fedbicross.disclosure.audit import membership_of
from fedbicross.disclosure.shadows import Shadows, audit_with_canaries, choose_subjects, train_shadows
from fedbicross.engine.recipe import Training
from fedbicross.federation import simulate
from fedbicross.messages import Client, Reply
from fedbicross.methods import create
from fedbicross.parts.local import own_model
from fedbicross.runs.environment import versions

ROOT = Path(__file__).resolve().parents[1]


def pairs(plain: Shadows, balanced: Shadows, prior: np.ndarray) -> Shadows:
    """Shadows of what a site has alone: both networks' answers averaged in logarithms, under its class mix."""
    logs = np.log(plain.probabilities.clip(1e-30)) + np.log(balanced.probabilities.clip(1e-30)) + np.log(prior)
    weights = np.exp(logs / 2 - (logs / 2).max(-1, keepdims=True))
    return Shadows(weights / weights.sum(-1, keepdims=True), plain.inside)


def rows_of(given: argparse.Namespace, seed: int, data: Any) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(data.train.labels))[: given.sites * given.images].reshape(given.sites, -1)
    clients = [Client(f"site-{i}", data.train.images[rows], data.train.labels[rows]) for i, rows in enumerate(order)]
    held = rng.permutation(len(data.test.labels))
    chosen = held[: given.controls]
    controls = Client("site-0", data.test.images[chosen], data.test.labels[chosen])
    task = Task(tuple(data.classes), data.image_size, data.channels, given.model)
    training = Training(recipe="modern", epochs=given.epochs, batch_size=64)
    ctx = Context(task, training, seed=seed)
    site = clients[0]
    subjects = choose_subjects(site, controls, ctx, None)
    kinds = {"plain": ctx.with_loss("cross_entropy"), "balanced": ctx.with_loss("balanced")}
    shadows = {name: train_shadows(subjects, kind, given.shadows) for name, kind in kinds.items()}
    prior = np.bincount(site.labels, minlength=len(task.classes)).clip(1e-6) / len(site.labels)
    both = pairs(shadows["plain"], shadows["balanced"], prior)
    personal = simulate(create("primum", given.settings, quick=True), clients, replace(ctx, scope="primum"))
    reply = Reply.unpack(ctx.store.load("replies/primum/site-0.safetensors") or b"")
    student = create("primum:student", given.settings, quick=True).personalize(site, reply, ctx)
    models = {
        "plain network": (own_model(site, ctx, "cross_entropy"), shadows["plain"], "plain"),
        "balanced network, as primum uploads it": (
            _bare(own_model(site, ctx, "balanced")),
            shadows["balanced"],
            "balanced",
        ),
        "primum's student": (student, shadows["balanced"], None),
        "primum's personal model": (personal["site-0"], both, None),
    }
    found = []
    for name, (model, attacked_by, recipe) in models.items():
        scores = subjects.scores(model, ctx)
        told = membership_of(scores, subjects, attacked_by, ctx)
        for attack in ("likelihood_ratio", "confidence"):
            del told[attack]["roc"]  # points of a picture
        bound = None
        if recipe is not None:
            bound = audit_with_canaries(subjects, attacked_by, kinds[recipe], 200, 1e-5)._asdict()
        answers = model.probabilities(data.test.images)
        accuracy = float((answers.argmax(1) == data.test.labels).mean())
        found.append({"model": name, "seed": seed, "accuracy": accuracy, "canaries": bound, **told})
        print(f"{name}: accuracy {accuracy:.3f}, AUC {told['likelihood_ratio']['auc']['value']:.3f}", flush=True)
    return found


def _bare(model: Any) -> Any:
    """The network as it leaves: without the class mix that its site adds back."""
    return replace(model, combine="mean_logits", class_weights=None, log_prior=None)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.membership", description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--data", default="bloodmnist")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--images", type=int, default=600, help="of each site")
    parser.add_argument("--controls", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--shadows", type=int, default=6)
    parser.add_argument("--model", default="resnet8")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "privacy" / "membership.json")
    parser.set_defaults(settings={})  # of the methods; tests have smaller ones
    given = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    data = load_dataset(given.data, data_dir=given.data_dir)
    rows = [row for seed in given.seeds for row in rows_of(given, seed, data)]
    config = {
        "data": given.data,
        "clients": given.sites,
        "train_images": given.images,
        "model": given.model,
        "training": Training(recipe="modern", epochs=given.epochs, batch_size=64).model_dump(),
        "shadows": given.shadows,
        "seeds": given.seeds,
        "methods": {"primum": create("primum", quick=True).config.model_dump()},
        "data_sha256": data.digest(),
    }
    stored = {
        "schema": 1,
        "rows": rows,
        "config": config,
        "versions": {"fedbicross": __version__, **versions("cpu")},
        "seconds": round(time.monotonic() - began),
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{given.out}: {stored['seconds']} s")


if __name__ == "__main__":
    main()
