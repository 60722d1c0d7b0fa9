"""The gate on kept logits, without a GPU: `python -m benchmarks.gates LOGITS [--out FILE]`.

LOGITS is a folder that `python -m benchmarks.primum … --logits LOGITS` has filled. Three tables are made of it:

`levels`, by which the level of the mixture's test was chosen; no test image is used. The client's validation images are
cut in two, six times: the mixture is chosen on one half, and what it wins and loses is counted on the other.

`margins`, by which the margin of a referral was chosen; no test image is used. The client's images are cut in two, the
rule is made on one half and counted on the other: answers lost among its own images (its own model taken to be always
right), and the accuracy on all clients' validation images.

`cells`, on test images: every way of training alone, the student, and primum with the gate as it is now. What FILE
holds of cells without logits in the folder stays, as an earlier gate left it. With `--cells-only` the first two tables
stay too: for a folder without the Blood cells that they are made of.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbicross.engine.combine import log_prior, refer
from fedbicross.evaluate import protocols
from fedbicross.evaluate.metrics import paired_interval
from fedbicross.runs.environment import versions
from fedbicross.steps import gate
from fedbicross.steps.prior_shift import fit_temperature

ROOT = Path(__file__).resolve().parents[1]
MARGINS = (0.0, 0.1, 0.2, 0.3)
LEVELS = (0.05, 0.1, 1.0)  # with the last one it is enough that a mixture is right more often
TRIALS = 6
ALONE = ("local_only", "local_only:balanced", "local_only:both")


class Cell:
    """The logits of one cell; rows are images."""

    def __init__(self, file: Path) -> None:
        arrays = np.load(file)
        self.plain, self.balanced, self.student = (
            torch.from_numpy(arrays[name]).double().log_softmax(-1) for name in ("plain", "balanced", "student")
        )
        self.labels, self.counts = torch.from_numpy(arrays["labels"]), torch.from_numpy(arrays["counts"])
        self.client, self.held_back, self.own_test = arrays["client"], arrays["held_back"], arrays["own_test"]

    def alone(self, i: int, way: str, rows: np.ndarray) -> Tensor:
        """Log-probabilities of client i's own model, trained in one of three ways."""
        plain, with_mix = self.plain[i, rows], self.balanced[i, rows] + log_prior(self.counts[i])
        if way == "local_only:both":
            return (plain / 2 + with_mix / 2).log_softmax(-1)
        return plain if way == "local_only" else with_mix.log_softmax(-1)

    def primum(self, i: int, own_rows: np.ndarray, rows: np.ndarray) -> Tensor:
        """Probabilities by the gate that client i makes of these own images of its."""
        held = own_rows[self.held_back[own_rows]]
        own = self.alone(i, "local_only:both", held)
        choice = gate.choose(own, self.student[held], self.labels[held], self.counts[i])
        referred = gate.referral(self.student[own_rows], self.labels[own_rows], self.counts[i])
        answer = gate.mixed(
            self.alone(i, "local_only:both", rows), self.student[rows], self.counts[i], choice.share, choice.flatness
        ).exp()
        return answer if referred is None else refer(answer, self.student[rows], referred)

    def estimated(self, i: int, rows: np.ndarray, batch: np.ndarray) -> Tensor:
        """Log-probabilities of the student under the class mix of a batch, as sure as client i's own images allow."""
        held = np.flatnonzero((self.client == i) & self.held_back)
        tau = fit_temperature(self.student[held], self.labels[held], log_prior(self.counts[i]))
        classes = self.student.shape[1]
        mix = gate.estimate_prior((self.student[batch] / tau).softmax(-1), torch.full((classes,), 1 / classes))
        return (self.student[rows] / tau + log_prior(len(batch) * mix + 1)).log_softmax(-1)


def levels(cells: dict[str, Cell]) -> list[dict[str, Any]]:
    """Mixtures let in, and answers won and lost by them, for each level of their test."""
    before, table = gate.LEVEL, []
    for level in LEVELS:
        gate.LEVEL = level
        made = {"level": level, "trials": 0, "let_in": 0, "won": 0, "lost": 0, "lower": 0}
        for cell in cells.values():
            rng = np.random.default_rng(0)
            for i in range(len(cell.counts)):
                held = np.flatnonzero((cell.client == i) & cell.held_back)
                for _ in range(TRIALS):
                    order = rng.permutation(held)
                    one, other = order[::2], order[1::2]
                    own = cell.alone(i, "local_only:both", one)
                    choice = gate.choose(own, cell.student[one], cell.labels[one], cell.counts[i])
                    own = cell.alone(i, "local_only:both", other)
                    mixture = gate.mixed(own, cell.student[other], cell.counts[i], choice.share, choice.flatness)
                    right, alone = (answer.argmax(1) == cell.labels[other] for answer in (mixture, own))
                    won, lost = int((right & ~alone).sum()), int((alone & ~right).sum())
                    for key, value in zip(made, (0, 1, choice.share < 1, won, lost, lost > won), strict=True):
                        made[key] += value
        table.append(made)
    gate.LEVEL = before
    return table


def margins(cells: dict[str, Cell]) -> list[dict[str, Any]]:
    """Lost answers and accuracy on validation images, for each margin and partition."""
    before, table = gate.MARGIN, []
    for margin in MARGINS:
        gate.MARGIN = margin
        found: dict[str, list[list[float]]] = {}
        for name, cell in cells.items():
            rng = np.random.default_rng(0)
            for i in range(len(cell.counts)):
                found.setdefault("-".join(name.split("-")[:2]), []).append(_halves(cell, i, rng))
        for partition, rows in found.items():
            lost, images, alone, gated = np.array(rows).T
            table.append(
                {
                    "margin": margin,
                    "partition": partition,
                    "clients": len(rows),
                    "lost_per_thousand": float(1000 * lost.sum() / images.sum()),
                    "alone_everywhere": float(alone.mean()),
                    "primum_everywhere": float(gated.mean()),
                }
            )
    gate.MARGIN = before
    return table


def _halves(cell: Cell, i: int, rng: np.random.Generator) -> list[float]:
    mine = rng.permutation(np.flatnonzero(cell.client == i))
    pooled = np.flatnonzero(cell.held_back)
    lost, images, right = 0, 0, []
    for half in (0, 1):
        other, made_of = mine[half::2], mine[1 - half :: 2]
        referred = gate.referral(cell.student[made_of], cell.labels[made_of], cell.counts[i])
        if referred is not None:
            sure = torch.nn.functional.one_hot(cell.labels[other], len(referred)).double()
            lost += int((refer(sure, cell.student[other], referred).argmax(1) != cell.labels[other]).sum())
        images += len(other)
        rows = np.setdiff1d(pooled, made_of)
        labels = cell.labels[rows]
        own, ours = cell.alone(i, "local_only:both", rows), cell.primum(i, made_of, rows)
        right.append([float((answer.argmax(1) == labels).double().mean()) for answer in (own, ours)])
    return [lost, images, *np.mean(right, 0)]


def score(name: str, cell: Cell) -> dict[str, Any]:
    """Accuracy of every model on the test images, and client by client against the better way of training alone."""
    rows = np.flatnonzero(cell.client < 0)
    test = protocols.TestSet(cell.labels[rows].numpy(), cell.own_test[rows])
    models: dict[str, list[np.ndarray]] = {}
    for i in range(len(cell.counts)):
        for way in ALONE:
            models.setdefault(way, []).append(cell.alone(i, way, rows).exp().numpy())
        models.setdefault("primum:student", []).append(cell.student[rows].exp().numpy())
        mine = np.flatnonzero(cell.client == i)
        models.setdefault("primum", []).append(cell.primum(i, mine, rows).numpy())
        own = rows[cell.own_test[rows] == i]
        for method, batch in (("primum:estimated", own), ("primum:estimated, everybody's patients", rows)):
            models.setdefault(method, []).append(cell.estimated(i, rows, batch).exp().numpy())
    accuracy = {}
    for method, answers in models.items():
        scores = [protocols.score_client(p, test, i, cell.counts[i].numpy()) for i, p in enumerate(answers)]
        by = {
            protocol: [one["accuracy"][protocol] for one in scores if one["accuracy"][protocol] is not None]
            for protocol in protocols.PROTOCOLS
        }
        accuracy[method] = {protocol: float(np.mean(values)) for protocol, values in by.items()}
    best = max(ALONE, key=lambda way: accuracy[way]["matched"])
    clients = []
    for i in range(len(cell.counts)):
        own = np.flatnonzero(test.owner == i)
        theirs, ours = (models[m][i][own].argmax(1) == test.labels[own] for m in (best, "primum"))
        lost, won = int((theirs & ~ours).sum()), int((ours & ~theirs).sum())
        clients.append({"images": len(own), "lost": lost, "won": won, "interval": paired_interval(lost, won, len(own))})
    return {"cell": name, "accuracy": accuracy, "alone": best, "clients": clients}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gates", description=__doc__)
    parser.add_argument("logits", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "primum" / "gates.json")
    parser.add_argument("--cells-only", action="store_true")
    given = parser.parse_args()
    cells = {file.stem: Cell(file) for file in sorted(given.logits.glob("*.npz"))}
    blood = {name: cell for name, cell in cells.items() if name.startswith("bloodmnist")}
    before = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {"cells": []}
    kept = [entry for entry in before["cells"] if entry["cell"] not in cells]
    stored: dict[str, Any] = {
        "levels": before["levels"] if given.cells_only else levels(blood),
        "margins": before["margins"] if given.cells_only else margins(blood),
        "margin": gate.MARGIN,
        "cells": sorted([*kept, *(score(name, cell) for name, cell in cells.items())], key=lambda entry: entry["cell"]),
        "versions": versions("cpu"),
    }
    given.out.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    for row in [*stored["levels"], *stored["margins"]]:
        print(row)
    for cell in stored["cells"]:
        print(cell["cell"], "alone:", cell["alone"])
        for method, by in cell["accuracy"].items():
            print(f"  {method:22s}", {protocol: round(100 * value, 2) for protocol, value in by.items()})
        print("  lost, won:", [(client["lost"], client["won"]) for client in cell["clients"]])


if __name__ == "__main__":
    main()
