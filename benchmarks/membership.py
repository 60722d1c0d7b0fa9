"""Membership inference on what leaves a site and on what comes back: `python -m benchmarks.membership --data-dir DIR`.

Sites of some hundred images each, drawn from a data set. Of the first site the plain network, the balanced one (which
primum uploads), primum's student and the personal model are attacked: members are the site's training images, controls
test images. Shadow networks are trained by the same recipe; those of the personal model are pairs, as it starts from
a pair. The student's attacker has shadows of the uploaded network, not of the whole federation: somebody who repeats
that could find out more.

With `--epsilons` there are rows of networks with group normalisation too, without noise and by DP-SGD, whose settings
are those that `python -m benchmarks.private_training` chose. Their shadows are trained with noise as well. `--quick` is
for trying the script: drawn cells, one epoch.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.private_training import RESULTS, as_sent, begin, processes
from fedbicross import __version__
from fedbicross.context import Context, Task
from fedbicross.data import load_dataset
from fedbicross.data.cells import load_cells
from fedbicross.disclosure.audit import membership_of
from fedbicross.disclosure.shadows import Shadows, Subjects, audit_with_canaries, choose_subjects, train_shadows
from fedbicross.engine.recipe import PrivateTraining, Training
from fedbicross.federation import simulate
from fedbicross.messages import Client, Predictor, Reply
from fedbicross.methods import create
from fedbicross.parts.local import own_model
from fedbicross.runs.environment import versions

DELTA = 1e-5
CANARIES = 200


def pairs(plain: Shadows, balanced: Shadows, prior: np.ndarray) -> Shadows:
    """Shadows of what a site has alone: both networks' answers averaged in logarithms, under its class mix."""
    logs = np.log(plain.probabilities.clip(1e-30)) + np.log(balanced.probabilities.clip(1e-30)) + np.log(prior)
    weights = np.exp(logs / 2 - (logs / 2).max(-1, keepdims=True))
    return Shadows(weights / weights.sum(-1, keepdims=True), plain.inside)


def dealt(given: argparse.Namespace, seed: int, data: Any) -> tuple[list[Client], Client]:
    """The sites, and images that none of them has."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(data.train.labels))[: given.sites * given.images].reshape(given.sites, -1)
    clients = [Client(f"site-{i}", data.train.images[rows], data.train.labels[rows]) for i, rows in enumerate(order)]
    chosen = rng.permutation(len(data.test.labels))[: given.controls]
    return clients, Client("site-0", data.test.images[chosen], data.test.labels[chosen])


def recipe(given: argparse.Namespace) -> Training:
    return Training(recipe="modern", epochs=given.epochs, batch_size=64, augment=not given.no_augment)


def rows_of(given: argparse.Namespace, seed: int, data: Any) -> list[dict[str, Any]]:
    """The four models without noise."""
    clients, controls = dealt(given, seed, data)
    task = Task(tuple(data.classes), data.image_size, data.channels, given.model)
    ctx = Context(task, recipe(given), seed=seed, device=given.device)
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
    return [
        attacked(name, model, subjects, by, ctx, None if kind is None else kinds[kind], data)
        for name, (model, by, kind) in models.items()
    ]


def private_row(given: argparse.Namespace, seed: int, epsilon: float | None, data: Any) -> dict[str, Any]:
    """A network with group normalisation, as it leaves: with so much noise, or without any."""
    clients, controls = dealt(given, seed, data)
    task = Task(tuple(data.classes), data.image_size, data.channels, f"{given.model}_gn")
    training, name = recipe(given), "plain network with group normalisation"
    if epsilon is not None:
        dp = PrivateTraining(epsilon=epsilon, delta=DELTA, **given.private[f"{epsilon:g}"])
        training, name = training.model_copy(update={"dp": dp}), f"the same, DP-SGD with ε = {epsilon:g}"
    ctx = Context(task, training, seed=seed, device=given.device)
    subjects = choose_subjects(clients[0], controls, ctx, None)
    shadows = train_shadows(subjects, ctx, given.shadows)
    return attacked(name, as_sent(clients[0], ctx), subjects, shadows, ctx, ctx, data)


def attacked(
    name: str, model: Predictor, subjects: Subjects, by: Shadows, ctx: Context, canaries: Context | None, data: Any
) -> dict[str, Any]:
    """One row: who is found, the canaries' bound for networks that are trained by this context, and the accuracy."""
    told = membership_of(subjects.scores(model, ctx), subjects, by, ctx)
    for attack in ("likelihood_ratio", "confidence"):
        del told[attack]["roc"]  # points of a picture
    bound = None if canaries is None else audit_with_canaries(subjects, by, canaries, CANARIES, DELTA)._asdict()
    answers = model.probabilities(data.test.images, ctx.device)
    accuracy = float((answers.argmax(1) == data.test.labels).mean())
    print(f"{name}: accuracy {accuracy:.3f}, AUC {told['likelihood_ratio']['auc']['value']:.3f}", flush=True)
    return {"model": name, "seed": ctx.seed, "accuracy": accuracy, "canaries": bound, **told}


def rows_for(job: tuple[int, bool, float | None], given: argparse.Namespace) -> list[dict[str, Any]]:
    """What one process does: the models without noise of one seed, or one network with group normalisation."""
    seed, group_norm, epsilon = job
    begin(given.products)
    data = load(given)
    return [private_row(given, seed, epsilon, data)] if group_norm else rows_of(given, seed, data)


def load(given: argparse.Namespace) -> Any:
    return load_cells(8, 0, 200, 100) if given.quick else load_dataset(given.data, data_dir=given.data_dir)


def _bare(model: Any) -> Any:
    """The network as it leaves: without the class mix that its site adds back."""
    return replace(model, combine="mean_logits", class_weights=None, log_prior=None)


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'model':42} seed accuracy  AUC (95 %)           at 1 %  canaries: ε ≥")
    for row in rows:
        area, rate = row["likelihood_ratio"]["auc"], row["likelihood_ratio"]["tpr_at_0.01"]
        found = "" if rate is None else f"{100 * rate['value']:.1f}"
        bound = "" if row["canaries"] is None else f"{row['canaries']['epsilon']:.2f}"
        auc = f"{area['value']:.3f} ({area['low']:.3f}–{area['high']:.3f})"
        print(f"{row['model']:42} {row['seed']:4} {100 * row['accuracy']:8.1f}  {auc:20} {found:>6}  {bound}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.membership", description=__doc__)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--data", default="bloodmnist")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--images", type=int, default=600, help="of each site")
    parser.add_argument("--controls", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--no-augment", action="store_true", help="train without augmentation: more is remembered")
    parser.add_argument("--shadows", type=int, default=6)
    parser.add_argument("--model", default="resnet8")
    parser.add_argument("--epsilons", type=float, nargs="*", default=[], help="rows of networks trained by DP-SGD")
    parser.add_argument("--only-private", action="store_true", help="those rows alone")
    parser.add_argument("--private", type=Path, default=RESULTS / "dp-sgd.json", help="whose settings they have")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--quick", action="store_true", help="drawn cells, one epoch: to try the script")
    parser.add_argument("--out", type=Path, default=RESULTS / "membership.json")
    parser.set_defaults(settings={})  # of the methods; tests have smaller ones
    given = parser.parse_args()
    tried = json.loads(given.private.read_text(encoding="utf-8")) if given.epsilons else {}
    given.private, given.products = tried.get("chosen", {}), tried.get("products", False)
    if given.quick:
        given.images, given.controls, given.epochs, given.shadows = 60, 60, 1, 4
        given.settings = {"primum": {"steps": 2, "steps_distil": 2, "batch": 6, "pool": 2}}
    torch.set_num_threads(1)
    began = time.monotonic()
    data = load(given)
    jobs: list[tuple[int, bool, float | None]] = []
    if not given.only_private:
        jobs += [(seed, False, None) for seed in given.seeds]
    if given.epsilons:
        jobs += [(seed, True, epsilon) for seed in given.seeds for epsilon in (None, *given.epsilons)]
    with processes(given.jobs) as each:
        rows = [row for rows in each(partial(rows_for, given=given), jobs) for row in rows]
    config = {
        "data": given.data,
        "clients": given.sites,
        "train_images": given.images,
        "model": given.model,
        "training": recipe(given).model_dump(),
        "private": given.private,
        "shadows": given.shadows,
        "seeds": given.seeds,
        "methods": {"primum": create("primum", quick=True).config.model_dump()},
        "data_sha256": data.digest(),
    }
    stored = {
        "schema": 1,
        "rows": rows,
        "config": config,
        "versions": {"fedbicross": __version__, **versions(given.device)},
        "seconds": round(time.monotonic() - began),
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    show(rows)
    print(f"{given.out.name}: {stored['seconds']} s")


if __name__ == "__main__":
    main()
