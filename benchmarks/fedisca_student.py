"""What becomes of FedISCA's student after each trajectory: `python -m benchmarks.fedisca_student --data-dir DIR`.

BloodMNIST, five clients, small networks and short trajectories, so that one core is enough. With the adaptation of the
authors' code the images and the teacher's answers do not depend on the student. So they are made once for a seed, and
students that differ in one thing each learn from the very same ones. After every trajectory is told: the accuracy on
test images, how often student and teacher agree on finished images and on test images, and, where it is asked for, the
accuracy with the same weights and batch-norm statistics measured anew. Nothing is chosen by any of it. Ways that are
stored are kept.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbicross import engine, parts, steps
from fedbicross.context import Context, Task
from fedbicross.engine.device import normalise, to_device
from fedbicross.engine.student import Student
from fedbicross.messages import Client, Upload
from fedbicross.methods import create
from fedbicross.methods.fedisca import FedISCAConfig
from fedbicross.runs import runner
from fedbicross.runs.config import load_config
from fedbicross.runs.environment import versions
from fedbicross.steps.trajectory import Sample, Teacher, Trajectory

ROOT = Path(__file__).resolve().parents[1]
CELLS: list[tuple[str, dict[str, Any], int]] = [
    (name, partition, seed)
    for name, partition in (("iid", {"kind": "iid"}), ("α = 0.5", {"kind": "dirichlet", "alpha": 0.5}))
    for seed in (0, 1, 2)
]
COMMON: dict[str, Any] = {
    "model": "resnet8",
    "clients": 5,
    "data": {"name": "bloodmnist", "train_size": 4000, "test_size": 1000},
    "training": {"recipe": "modern", "epochs": 8, "batch_size": 32},
    "device": "cpu",
}
BASE: dict[str, Any] = {"steps": 100, "batch": 32, "epochs": 6, "lr_synthesis": 0.1, "lr": 0.1}
WAYS: dict[str, dict[str, Any]] = {  # settings, and the order in which the samples come
    "rate 0.1, no memory": {},
    "rate 0.02 with a cosine": {"lr": 0.02, "schedule": "cosine"},
    "the same samples, shuffled": {"order": "shuffled"},
    "the first trajectory every time": {"order": "first"},
    "memory of 300, one replay": {"memory": 300},
    "no noise adaptation": {"adaptation": "none"},
    "finished images only": {"intermediate": False, "adaptation": "none"},
    "alpha_bn = 1": {"alpha_bn": 1.0},
}
REFERENCE = next(iter(WAYS))
LAST = 5  # of a trajectory's samples that are said to be nearly finished, every fourth before the end
REAL = 960  # training images by which statistics are measured


@dataclass(frozen=True)
class Bench:
    """One federation: what students learn from, and what they are asked about."""

    ctx: Context
    uploads: Sequence[Upload]
    test: Tensor
    labels: Tensor
    real: Tensor


def federation(partition: Mapping[str, Any], seed: int, common: Mapping[str, Any]) -> Bench:
    """The clients' networks, trained once."""
    config = load_config(None, {**common, "partition": dict(partition), "seeds": [seed]}, [])
    prepared = runner.prepare(config)
    found = prepared.dataset
    clients, _ = runner.make_clients(found, prepared.partitions[seed])
    ctx = Context(Task(tuple(found.classes), found.image_size, found.channels, config.model), config.training, seed)
    method = create("fedisca", {"fedisca": dict(BASE)})
    uploads = [method.upload(client, ctx) for client in clients]
    test, labels = _images(found.test.images), torch.from_numpy(found.test.labels)
    return Bench(ctx, uploads, test, labels, _images(_some(clients, ctx)))


def _images(images: np.ndarray) -> Tensor:
    return normalise(to_device(images, "cpu"))


def _some(clients: Sequence[Client], ctx: Context) -> np.ndarray:
    everything = np.concatenate([client.images for client in clients])
    return everything[ctx.rng("study", "real").permutation(len(everything))[:REAL]]


def trajectories(bench: Bench, config: FedISCAConfig) -> tuple[Teacher, list[list[Sample]]]:
    """The teacher, and its images with soft labels; the last trajectory is one that no student learns from."""
    ctx = bench.ctx
    teacher = parts.teachers.load_teacher(config, "fedisca", bench.uploads, ctx)
    settings = parts.teachers.inversion_settings(config, ctx.task.image_size)
    made = []
    for epoch in range(config.epochs + 1):
        rng = ctx.torch_rng("synthesis", "cluster-0", f"trajectory-{epoch}")
        path = Trajectory.start(teacher, settings, ctx.task.image_shape, len(ctx.task.classes), rng)
        made.append([sample._replace(images=sample.images.clone(), loss=None) for sample in path])
    return teacher, made


def order_of(made: Sequence[Sequence[Sample]], order: str, config: FedISCAConfig, ctx: Context) -> list[list[Sample]]:
    """What a student sees, trajectory by trajectory: as it was made, or otherwise."""
    if not config.intermediate:
        finished = [samples[-1] for samples in made]
        rng = ctx.rng("study", "finished")
        draws = (rng.integers(0, epoch + 1, len(samples)) for epoch, samples in enumerate(made))
        return [[finished[i] for i in drawn] for drawn in draws]
    if order == "first":
        return [list(made[0]) for _ in made]
    if order == "shuffled":
        flat = [sample for samples in made for sample in samples]
        mixed = [flat[i] for i in ctx.rng("study", "shuffled").permutation(len(flat))]
        starts = np.cumsum([0, *map(len, made)])
        shown = [mixed[start:end] for start, end in pairwise(starts.tolist())]
    else:
        shown = [list(samples) for samples in made]
    if config.adaptation == "none":
        return [[sample._replace(adapted=sample.original, lam=0.0) for sample in samples] for samples in shown]
    return shown


@torch.no_grad()
def answers(model: nn.Module, images: Tensor) -> Tensor:
    """The class that a network in evaluation mode gives each image."""
    model.eval()
    return torch.cat([model(part).argmax(1) for part in torch.split(images, 200)])


@torch.no_grad()
def measured_anew(model: nn.Module, images: Tensor, rng: torch.Generator) -> nn.Module:
    """A copy with the same weights, whose batch-norm statistics are the plain mean over these images, well mixed."""
    copied = copy.deepcopy(model).train()
    for module in copied.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # the mean over all batches
    for part in torch.split(images[torch.randperm(len(images), generator=rng)], 96):
        copied(part)
    return copied.eval()


def _agree(model: nn.Module, samples: Iterable[Sample]) -> float | None:
    chosen = list(samples)
    if not chosen:
        return None
    same = answers(model, torch.cat([sample.images for sample in chosen]))
    return _share(same == torch.cat([sample.original for sample in chosen]).argmax(1))


def _share(right: Tensor) -> float:
    return round(float(right.float().mean()), 4)


def learn(
    bench: Bench, way: str, settings: Mapping[str, Any], teacher: Teacher, made: Sequence[Sequence[Sample]]
) -> list[dict[str, Any]]:
    """One student; what is known of it after each trajectory."""
    values = dict(settings)
    order = str(values.pop("order", "as made"))
    config, ctx = FedISCAConfig(**values), bench.ctx
    *learnt, fresh = made
    shown = order_of(learnt, order, config, ctx)
    student = parts.students.new_student(ctx, 0, config.distillation_steps)
    memory = steps.sources.SampleMemory(config.memory, config.replays, lambda seen: ctx.rng("memory", f"sample-{seen}"))
    said = torch.cat([teacher.original(part).argmax(1) for part in torch.split(bench.test, 200)])
    rows = []
    done, total = 0, sum(map(len, shown))
    for epoch, samples in enumerate(shown):
        for sample in samples:
            lr = config.lr * engine.recipe.lr_multiplier(config.schedule, done / total)
            parts.students.learn(student, sample, config, lr)
            for earlier in memory.replay_and_keep(sample):
                parts.students.learn(student, earlier, config, lr, track=False)
            done += 1
        model = copy.deepcopy(student.model).eval()
        own = answers(model, bench.test)
        seen = learnt[: epoch + 1] if order == "as made" else learnt[:1] if order == "first" else learnt
        newest = seen[-1]
        row: dict[str, Any] = {"way": way, "trajectory": epoch + 1, "accuracy": _share(own == bench.labels)}
        row["agreement"] = {
            "newest": _agree(model, [newest[-1]]),
            "earlier": _agree(model, [past[-1] for past in learnt[:epoch]]) if order == "as made" else None,
            "fresh": _agree(model, [fresh[-1]]),
            "test": _share(own == said),
        }
        row["given"] = torch.bincount(own, minlength=len(ctx.task.classes)).tolist()
        if epoch in (0, len(shown) - 1) or way == REFERENCE:
            row["statistics"] = _with_statistics(bench, student, newest, seen)
        rows.append(row)
    return rows


def _with_statistics(
    bench: Bench, student: Student, newest: Sequence[Sample], seen: Sequence[Sequence[Sample]]
) -> dict[str, float]:
    """Accuracy on test images with the same weights and other batch-norm statistics."""
    count = len(newest)
    some = range(count - 1, -1, -max(count // 10, 1))
    sets = {
        "nearly finished, newest trajectory": [newest[i].images for i in range(count - 1, -1, -4)[:LAST]],
        "finished, all trajectories": [samples[-1].images for samples in seen],
        "every noise level, all trajectories": [samples[i].images for samples in seen for i in some],
        "real training images": [bench.real],
    }
    out = {}
    for name, images in sets.items():
        model = measured_anew(student.model, torch.cat(images), bench.ctx.torch_rng("study", "mixed"))
        out[name] = _share(answers(model, bench.test) == bench.labels)
    return out


def synthesis_of(settings: Mapping[str, Any]) -> tuple[Any, ...]:
    """What the images of a way depend on."""
    return (settings.get("alpha_bn"),)


def cell(
    bench: Bench,
    base: Mapping[str, Any],
    ways: Mapping[str, Mapping[str, Any]],
) -> Iterable[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """For each way the rows of its student, and what is known of its teacher."""
    kept: dict[tuple[Any, ...], tuple[Teacher, list[list[Sample]]]] = {}
    for way, settings in ways.items():
        began = time.perf_counter()
        if synthesis_of(settings) not in kept:
            chosen = {key: value for key, value in settings.items() if key == "alpha_bn"}
            kept = {synthesis_of(settings): trajectories(bench, FedISCAConfig(**{**base, **chosen}))}
        teacher, made = kept[synthesis_of(settings)]
        said = torch.cat([teacher.original(part).argmax(1) for part in torch.split(bench.test, 200)])
        finished = torch.cat([samples[-1].original.argmax(1) for samples in made[:-1]])
        wanted = torch.arange(made[0][0].images.shape[0]) % len(bench.ctx.task.classes)
        told = {
            "accuracy": _share(said == bench.labels),
            "recognises": _share(finished == wanted.repeat(len(made) - 1)),
        }
        rows = learn(bench, way, {**base, **settings}, teacher, made)
        rows[-1]["seconds"] = round(time.perf_counter() - began, 1)
        yield rows, {"way": way, **told}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fedisca_student", description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--cells", type=int, nargs="*", default=range(len(CELLS)), help="numbers; none: all")
    parser.add_argument("--ways", type=int, nargs="*", default=range(len(WAYS)), help="numbers; none: all")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "benchmarks" / "fedisca-student.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {"rows": [], "teachers": []}
    common = {**COMMON, "data": {**COMMON["data"], "dir": str(given.data_dir)}}
    for name, partition, seed in [CELLS[i] for i in given.cells]:
        known = {row["way"] for row in found["rows"] if (row["partition"], row["seed"]) == (name, seed)}
        ways = {way: WAYS[way] for way in [list(WAYS)[i] for i in given.ways] if way not in known}
        if not ways:
            continue
        where = {"partition": name, "seed": seed}
        for rows, teacher in cell(federation(partition, seed, common), BASE, ways):
            found["rows"] += [{**where, **row} for row in rows]
            found["teachers"].append({**where, **teacher})
            print(where, teacher, [row["accuracy"] for row in rows], rows[-1], flush=True)
            stored = {**found, "config": COMMON, "method": BASE, "ways": WAYS, "versions": versions("cpu")}
            given.out.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
