"""The loop over seeds and methods, and what it leaves in the run's folder."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedbicross import __version__, models, seeds, sums
from fedbicross.atomic import TEMPORARY
from fedbicross.bundle.format import canonical_json
from fedbicross.context import Context, MemoryStore, Progress, Silent, Store, Task
from fedbicross.data import DATASETS, Dataset, Partition, client_images, load_dataset, make_partition, test_images
from fedbicross.data import check as check_data
from fedbicross.engine.device import out_of_memory, resolve_device, resolve_precision, set_precision
from fedbicross.engine.predict import Answers
from fedbicross.errors import ConfigError, RunError
from fedbicross.evaluate.protocols import TestSet
from fedbicross.evaluate.summary import is_alone, local_baselines
from fedbicross.federation import records, simulate
from fedbicross.messages import Client
from fedbicross.methods.base import Method
from fedbicross.report.text import duration, flops
from fedbicross.runs.config import RunConfig, check
from fedbicross.runs.environment import versions
from fedbicross.runs.progress import RememberLast
from fedbicross.runs.rows import (
    Alone,
    adapt_all,
    choose_alone,
    choose_thresholds,
    make_row,
    predict_all,
    score_round,
    seconds_by_stage,
    stored_predictions,
)
from fedbicross.runs.store import DiskStore, RunFolder, json_text
from fedbicross.settings import as_toml, parse, parse_toml, read_json

SCHEMA = 1
BASELINES = ("majority", "ensemble")  # and every way of training alone
FAST_CPU = 1e11  # operations a second: more than most processors reach in training
MOST_CLASSES = 12  # named at the start of a run
PATIENCE = 3600.0  # seconds on such a one from which a person is warned


@dataclass
class Prepared:
    """Everything that is decided before the first file is written."""

    config: RunConfig
    dataset: Dataset
    partitions: dict[int, Partition]
    device: str
    precision: str
    fast: bool  # the fast path; the plain one is the reference
    warnings: list[str]  # what is odd about the data

    @property
    def partition_text(self) -> str:
        """The content of partition.json."""
        return canonical_json(
            {"schema": SCHEMA, "partitions": {str(s): p.to_json() for s, p in self.partitions.items()}}
        )


def prepare(config: RunConfig, dataset: Dataset | None = None) -> Prepared:
    """Load the data and deal it out; every bad input shows here, before anything is written."""
    device = resolve_device(config.device)
    if dataset is None:
        if config.data.name.startswith("python:"):
            raise RunError("needs_dataset", "this run used arrays from Python: pass the same dataset to resume it")
        settings = config.data.model_dump(exclude={"name", "dir"})
        dataset = load_dataset(config.data.name, data_dir=config.data.dir, **settings)
    warnings = _judge(config, dataset)
    for name in dict.fromkeys([config.model, *config.client_models]):
        models.check(name, dataset.channels, len(dataset.classes), dataset.image_size)
    partitions = {seed: _partition(config, dataset, seed) for seed in config.seeds}
    for partition in partitions.values():
        config.models_of(partition.clients)
    fast = device == "cuda" and not config.deterministic
    precision = resolve_precision(config.precision, device)
    return Prepared(config, dataset, partitions, device, precision, fast, warnings)


def _judge(config: RunConfig, dataset: Dataset) -> list[str]:
    """Refuse data on which a result would mean nothing; a word about what may mislead."""
    name = config.data.name
    if name == "cells":  # drawn anew for every seed
        return []
    facts = check_data.Facts.of(dataset.classes, dataset.train, dataset.test)
    return check_data.settle(check_data.judge(facts, published=name in DATASETS), config.data.accept)


def _partition(config: RunConfig, dataset: Dataset, seed: int) -> Partition:
    settings = config.partition
    if settings.file is not None:
        return _saved_partition(Path(settings.file), dataset, seed)
    used = seed if settings.seed is None else settings.seed
    options = settings.model_dump(exclude={"kind", "seed", "file"})
    rng = seeds.numpy_rng(used, "partition")
    return make_partition(dataset, settings.kind, config.clients, rng, seed=used, **options)


def _saved_partition(file: Path, dataset: Dataset, seed: int) -> Partition:
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))["partitions"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError("partition_file", f"{file} is no partition file: {error}") from None
    if not isinstance(saved, dict) or str(seed) not in saved:
        raise ConfigError("partition_file", f"{file} holds no partition for seed {seed}")
    return Partition.from_json(saved[str(seed)], dataset)


def run(
    config: RunConfig,
    out: Path | None = None,
    *,
    dataset: Dataset | None = None,
    progress: Progress | None = None,
    replace: bool = False,
) -> dict[str, Any]:
    """Run a configuration and return its results; with ``out`` everything is kept there and can be resumed."""
    check(config)
    if out is not None:  # before the data are read, which may take minutes
        if RunFolder(out).held():
            raise RunError("locked", f"another process is running in {out}")
        check_place(out, replace)
    prepared = prepare(config, dataset)
    if out is None:
        return run_prepared(prepared, None, progress or Silent())
    with _new_folder(out, replace, prepared) as folder:
        return run_prepared(prepared, folder, progress or Silent())


def resume(out: Path, *, dataset: Dataset | None = None, progress: Progress | None = None) -> dict[str, Any]:
    """Continue a killed run to the results that it would have had."""
    config = stored_config(out)
    with RunFolder(out) as folder:
        prepared = prepare(config, dataset)
        check_partition(folder, prepared)
        folder.clean()
        return run_prepared(prepared, folder, progress or Silent())


def stored_config(out: Path) -> RunConfig:
    """The configuration that a run was begun with; one that was edited since is refused."""
    if not (out / "config.toml").is_file():
        raise RunError("not_a_run", f"{out} holds no run (no config.toml)")
    config = parse(RunConfig, parse_toml(DiskStore(out).load("config.toml") or b"", out / "config.toml"))
    try:
        check(config)
    except ConfigError as error:
        if error.code != "unknown_method":
            raise
        again = f"a class of your own has to be given again: fedbicross.resume({str(out)!r}, methods=[...])"
        raise ConfigError(error.code, f"{error.args[0]}; {again}") from None
    return config


def check_partition(folder: RunFolder, prepared: Prepared) -> None:
    """Refuse to go on with other images than the run was begun with."""
    if folder.store.load("partition.json") != prepared.partition_text.encode():
        raise RunError("changed", f"the data or their partition are not those that {folder.path} was started with")


# What a run killed before its config.toml leaves: nothing worth keeping.
BEGINNING = {".lock", sums.NAME, "partition.json"}


def check_place(out: Path, replace: bool) -> None:
    """Refuse a place that holds anything but, where it may be replaced, an earlier run. Touches nothing."""
    try:
        names = {entry.name for entry in out.iterdir()}
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunError("cannot_write", f"cannot write to {out}: {error.strerror}") from None
    if ".lock" in names and {name for name in names if not name.startswith(TEMPORARY)} <= BEGINNING:
        return
    a_run = {"config.toml", "partition.json"} <= names
    if names and not (a_run and replace):
        hint = f"`fedbicross resume {out}` continues it" if a_run else "it is no run of fedbicross"
        raise RunError("exists", f"{out} exists already: {hint}; choose another --out")


@contextmanager
def _new_folder(out: Path, replace: bool, prepared: Prepared) -> Iterator[RunFolder]:
    """A locked folder that can be resumed from now on; where that fails, nothing new stays behind."""
    missing = [path for path in (out, *out.parents) if not path.exists()]
    begun = False
    try:
        with RunFolder(out) as folder:
            check_place(out, replace)  # again, now that nobody else can change it
            try:
                _empty(out)
                folder.store.write("partition.json", prepared.partition_text.encode())
                folder.store.write("config.toml", as_toml(prepared.config).encode())  # last: it marks a run
                begun = True
            except OSError as error:
                for name in ("config.toml", "partition.json", sums.NAME, ".lock"):
                    (out / name).unlink(missing_ok=True)
                raise RunError("cannot_write", f"cannot write to {out}: {error.strerror}") from None
            yield folder
    finally:
        if not begun:
            for path in missing:
                with suppress(OSError):  # only what is empty goes
                    path.rmdir()


def _empty(out: Path) -> None:
    """Remove an earlier run. The two files by which it is known as one go last, in case this is killed as well."""
    for entry in sorted(out.iterdir(), key=lambda entry: (entry.name == "partition.json", entry.name == "config.toml")):
        if entry.name != ".lock":
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def run_prepared(prepared: Prepared, folder: RunFolder | None, progress: Progress) -> dict[str, Any]:
    """Every seed and method; without a folder everything stays in memory."""
    config = prepared.config
    threads = torch.get_num_threads()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    set_precision(prepared.precision, config.deterministic)
    progress = watched = RememberLast(progress)
    try:
        progress.say(_read(prepared))
        for warning in (*prepared.warnings, *_patience(prepared)):
            progress.say(f"warning: {warning}")
        rows: list[dict[str, Any]] = []
        summary = _header(prepared)
        done = progress.start("all methods", len(config.seeds) * len(config.all_methods()))
        for seed in config.seeds:
            rows += _Seed(prepared, seed, folder, progress).rows(done, summary, rows)
        results = _results(summary, rows, complete=True)
        _write_results(folder, results)
        return results
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise RunError("out_of_memory", f"out of memory in {watched.last!r}: {_smaller(watched.last)}") from None
    except OSError as error:
        where = folder.path if folder else "memory"
        raise RunError(
            "cannot_write",
            f"writing to {where} failed: {error.strerror or error}; `fedbicross resume {where}` continues it later",
        ) from None
    finally:
        torch.set_num_threads(threads)


def _read(prepared: Prepared) -> str:
    """What was read, so that classes that are none are seen before anything is trained."""
    dataset = prepared.dataset
    names = ", ".join(dataset.classes[:MOST_CLASSES]) + (", …" if len(dataset.classes) > MOST_CLASSES else "")
    images = f"{len(dataset.train):,} images to train on and {len(dataset.test):,} to test on"
    about = f" ({dataset.note})" if dataset.note and prepared.config.data.name not in DATASETS else ""
    return f"data: {dataset.name}, {images}, {len(dataset.classes)} classes: {names}{about}"


def _patience(prepared: Prepared) -> list[str]:
    """A word before days of work on a processor: what local training alone will take at least."""
    config, dataset = prepared.config, prepared.dataset
    if prepared.device != "cpu" or not any(config.build(spec).uses_local_models for spec in config.all_methods()):
        return []
    shape = dataset.channels, len(dataset.classes), dataset.image_size
    each = np.mean([models.forward_flops(name, *shape) for name in config.client_models or [config.model]])
    images, epochs = len(dataset.train.labels), config.training.epochs
    work = float(3 * each * images * epochs * len(config.seeds))  # backward costs twice as much as forward
    if work / FAST_CPU < PATIENCE:
        return []
    what = f"training {', '.join(config.architectures())} for {epochs} epochs on {images:,} images"
    cost = f"{flops(work)}, hours on a CPU (at least {duration(work / FAST_CPU)})"
    return [f"{what} is {cost}; use a GPU, --quick, fewer --epochs or --model resnet8"]


def _smaller(work: str) -> str:
    """Which setting to lower when this piece of work does not fit into memory."""
    if work.startswith("training "):
        return "lower training.batch_size, or use --precision bf16"
    if work.startswith("personalising "):
        return "lower batch_personal of the method"
    return "lower the method's batch (--set method.NAME.batch=…), or use --precision bf16"


class _Seed:
    """One seed of a run: its clients and test images, and the row of every method."""

    def __init__(self, prepared: Prepared, seed: int, folder: RunFolder | None, progress: Progress) -> None:
        self.prepared, self.seed, self.folder, self.progress = prepared, seed, folder, progress
        self.config, dataset, partition = prepared.config, prepared.dataset, prepared.partitions[seed]
        self.task = Task(tuple(dataset.classes), dataset.image_size, dataset.channels, self.config.model)
        self.clients, self.owners = make_clients(dataset, partition)
        self.images = test_images(dataset, partition)
        self.answers = Answers(self.images, prepared.device)
        self.test = TestSet(dataset.test.labels, partition.test_owner, dataset.test.patients)
        self.client_models = self.config.models_of(partition.clients)
        self.store: Store = folder.store if folder else MemoryStore()
        self.events: list[dict[str, Any]] = []  # where there is no folder
        specs = self.config.all_methods()
        # Training alone comes first, in all of its ways: the best of them is what every row is measured against.
        self.local = local_baselines(specs)
        self.order = [*self.local, *(spec for spec in specs if spec not in self.local)]
        self.alone: dict[str, dict[str, np.ndarray]] = {}
        self.bar: Alone | None = None

    def rows(
        self, done: Callable[[int, str], None], summary: dict[str, Any], earlier: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """The rows of all methods, those of ``earlier`` seeds being written along with them."""
        rows: list[dict[str, Any]] = []
        for spec in self.order:
            ctx, method = self.context(spec), self.config.build(spec)
            saved = self.store.load(f"rows/{ctx.scope}.json")
            if saved is None:
                done(len(earlier) + len(rows), spec)
            row = self._make_row(spec, method, ctx) if saved is None else _row(saved, ctx, spec)
            kept = records(ctx, [client.name for client in self.clients], method.rounds)
            stages = self._times(ctx, kept, saved is not None)
            rows.append({**row, "seconds": round(sum(stages.values()), 3), "seconds_by_stage": stages})
            for record in kept:
                _note_training(record, ctx, summary, self.clients)
            _write_results(self.folder, _results(summary, earlier + rows, complete=False))
        done(len(earlier) + len(rows), "")
        asked = self.config.all_methods()
        return sorted(rows, key=lambda row: asked.index(row["method"]))

    def context(self, spec: str) -> Context:
        """What a method of this seed is given."""
        return Context(
            task=self.task,
            training=self.config.training,
            seed=self.seed,
            device=self.prepared.device,
            precision=self.prepared.precision,
            fast=self.prepared.fast,
            scope=f"seed-{self.seed}/{spec.replace(':', '+')}",
            store=self.store,
            progress=self.progress,
            event=self._event,
            client_models=self.client_models,
        )

    def _event(self, **fields: Any) -> None:
        self.folder.event(**fields) if self.folder else self.events.append(fields)

    def _make_row(self, spec: str, method: Method[Any], ctx: Context) -> dict[str, Any]:
        """Run a method and score it."""
        if self.bar is None and self.local:
            self.alone = {name: self._finished(name) or self._predictions(name) for name in self.local}
            classes = len(self.task.classes)
            self.bar = choose_alone(self.alone, self.clients, self.test, self.owners, classes, self.config.metric)
        made = self.alone.get(spec) or self._predictions(spec)
        # A baseline that was asked for by name, such as a variant of the ensemble, is judged like a method.
        asked = method.role == "baseline" and spec not in BASELINES and not is_alone(spec)
        role = "method" if asked else method.role
        row = make_row(spec, method, self.clients, made, self.test, self.owners, ctx, self.bar, role)
        self.store.save(f"rows/{ctx.scope}.json", canonical_json(row).encode())
        return row

    def _predictions(self, spec: str) -> dict[str, np.ndarray]:
        """Run a method to the end; what an earlier run of it left is taken over."""
        ctx, method = self.context(spec), self.config.build(spec)
        place = f"method {self.order.index(spec) + 1} of {len(self.order)}"
        self.progress.say(f"== {spec}, seed {self.seed} ({place})")
        known = self.clients, self.images, self.test, self.owners, ctx
        predictors = simulate(method, self.clients, ctx, lambda number, made: score_round(number, made, *known))
        began = time.perf_counter()
        if method.adapts_prior:
            predictors = adapt_all(predictors, self.images, self.test, self.owners, ctx)
        found = predict_all(predictors, self.answers, ctx)
        if not method.pools_data:
            choose_thresholds(predictors, self.clients, ctx)
        self._event(event="evaluate", scope=ctx.scope, name="all", seconds=time.perf_counter() - began)
        return found

    def _finished(self, spec: str) -> dict[str, np.ndarray] | None:
        """What a method predicted whose row is there already."""
        ctx = self.context(spec)
        there = self.store.load(f"rows/{ctx.scope}.json") is not None
        return stored_predictions(self.clients, ctx) if there else None

    def _times(self, ctx: Context, kept: list[dict[str, Any]], row_was_there: bool) -> dict[str, float]:
        """Seconds by stage, kept when the row is made: the log may be cut later, its times may not change."""
        name = f"times/{ctx.scope}.json"
        told = self.store.load(name) if row_was_there else None
        if told is not None:
            return read_json(dict[str, float], told, name)
        found = seconds_by_stage(self.folder.events() if self.folder else self.events, ctx, kept)
        self.store.save(name, canonical_json(found).encode())
        return found


def _row(data: bytes, ctx: Context, spec: str) -> dict[str, Any]:
    """A finished row: of this method and seed."""
    name = f"rows/{ctx.scope}.json"
    row = read_json(dict[str, Any], data, name)
    if row.get("method") != spec or row.get("seed") != ctx.seed:
        raise RunError("damaged", f"{name} is the row of another method or seed; {sums.advice(name)}")
    return row


def make_clients(dataset: Dataset, partition: Partition) -> tuple[list[Client], dict[str, int]]:
    """The partition as clients; one without images takes no part. Also each name's place in the partition."""
    clients = []
    for index, name in enumerate(partition.clients):
        images, labels, patients = client_images(dataset, partition, index)
        if len(labels):
            clients.append(Client(name, images, labels, patients))
    return clients, {name: index for index, name in enumerate(partition.clients)}


def _note_training(record: Mapping[str, Any], ctx: Context, summary: dict[str, Any], clients: list[Client]) -> None:
    """Training curves of the client models, for the report; a model that was deleted is made again."""
    curves = summary["training"].setdefault(str(ctx.seed), {})
    by_key = {ctx.models.local_model_key(client): client for client in clients}
    for key in record["local_models"]:
        if key in by_key and by_key[key].name not in curves:
            trained = ctx.local_model(by_key[key])
            curves[by_key[key].name] = {
                "model": trained.architecture,
                "history": trained.history,
                "best_epoch": trained.best_epoch,
                "train_images": trained.train_images,
                "val_images": trained.val_images,
            }


def _header(prepared: Prepared) -> dict[str, Any]:
    dataset, classes = prepared.dataset, len(prepared.dataset.classes)
    everyone = {}
    for seed, partition in prepared.partitions.items():
        counts = [np.bincount(dataset.train.labels[rows], minlength=classes) for rows in partition.train_indices]
        own = prepared.config.models_of(partition.clients)
        everyone[str(seed)] = [
            {
                "client": name,
                "model": own.get(name, prepared.config.model),
                "num_samples": int(count.sum()),
                "class_counts": [int(n) for n in count],
                "excluded": not count.any(),
            }
            for name, count in zip(partition.clients, counts, strict=True)
        ]
    warnings = list(prepared.warnings)
    warnings += [warning for partition in prepared.partitions.values() for warning in partition.warnings]
    excluded = [entry["client"] for entries in everyone.values() for entry in entries if entry["excluded"]]
    warnings += [f"{client} has no images and takes no part" for client in excluded]
    if prepared.config.quick:
        warnings.append(
            "quick settings: small data, a small network and few steps; read the results as indicative only"
        )
    return {
        "name": prepared.config.name,
        "dataset": {
            "name": dataset.name,
            "classes": list(dataset.classes),
            "train_images": len(dataset.train.labels),
            "test_images": len(dataset.test.labels),
            "image_size": dataset.image_size,
            "channels": dataset.channels,
            "note": dataset.note,
            "digest": dataset.digest(),
        },
        "clients": everyone,
        "training": {},
        "warnings": list(dict.fromkeys(warnings)),
        "config": prepared.config.model_dump(),
        "versions": {"fedbicross": __version__, **versions(prepared.device)},
        "partition_sha256": hashlib.sha256(prepared.partition_text.encode()).hexdigest(),
    }


def _results(summary: Mapping[str, Any], rows: list[dict[str, Any]], complete: bool) -> dict[str, Any]:
    return {"schema": SCHEMA, "complete": complete, "rows": rows, "rows_sha256": sums.rows_digest(rows), **summary}


def _write_results(folder: RunFolder | None, results: Mapping[str, Any]) -> None:
    if folder is not None:
        folder.store.write("results.json", json_text(results).encode())
