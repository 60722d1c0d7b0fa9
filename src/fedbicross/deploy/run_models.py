"""The models of a run: found by method, client and seed, and made ready for use like those of a federation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbicross.bundle import Limits, read_file
from fedbicross.context import Context, Task
from fedbicross.deploy import compare
from fedbicross.deploy.folder import Finished, Origin, checked
from fedbicross.errors import ConfigError, FedBiCrossError, RunError, UploadError, nearest
from fedbicross.evaluate.summary import is_alone
from fedbicross.federation import POOLED, pooled
from fedbicross.messages import Client, Predictor, file_name
from fedbicross.parts.calibration import LEAST_IMAGES, calibrate
from fedbicross.runs import runner
from fedbicross.runs.config import RunConfig
from fedbicross.settings import parse, parse_toml
from fedbicross.sums import Sums

MARKS = ("config.toml", "partition.json")  # by these a folder is known as a run
MAX_RESULTS = 1 << 30  # bytes
SCORES = ("accuracy", "accuracy_interval", "balanced_accuracy", "macro_auc", "macro_f1", "ece", "confusion")


@dataclass(frozen=True)
class RunModel:
    """One model of a run: whose, by which method, under which seed."""

    run: Path
    seed: int
    method: str
    client: str

    @property
    def file(self) -> Path:
        """Where it lies; of methods that pool the images there is one for all."""
        folder = self.run / "models" / f"seed-{self.seed}" / self.method.replace(":", "+")
        own, shared = (folder / f"{file_name(name)}.safetensors" for name in (self.client, POOLED))
        return shared if shared.is_file() and not own.is_file() else own


def is_run(path: Path) -> bool:
    """Whether this is the folder of a run."""
    return all((path / name).is_file() for name in MARKS)


def run_of(file: Path) -> Path | None:
    """The run that a model file belongs to, if its place says so: ``RUN/models/seed-0/METHOD/CLIENT.safetensors``."""
    parents = file.absolute().parents
    return parents[3] if len(parents) > 3 and parents[2].name == "models" and is_run(parents[3]) else None


def choose(run: Path, method: str | None = None, client: str | None = None, seed: int | None = None) -> RunModel:
    """The one model that is meant; where more than one could be, the error names them."""
    partitions = _partitions(run)
    seeds = [int(text) for text in partitions if (run / "models" / f"seed-{text}").is_dir()]
    if not seeds:
        raise RunError("no_models", f"{run} holds no models yet; `fedbicross resume {run}` goes on with it")
    the_seed = _one("seed", seeds, seed)
    folder = run / "models" / f"seed-{the_seed}"
    methods = sorted(path.name.replace("+", ":") for path in folder.iterdir() if path.is_dir())
    the_method = _one("method", methods, method)
    the_client = _one("client", partitions[str(the_seed)], client)
    found = RunModel(run, the_seed, the_method, the_client)
    if not found.file.is_file():
        why = "it had no images, or the run is not finished"
        raise RunError("no_models", f"{run} holds no model of {the_method} for {the_client!r}: {why}")
    return found


def at(file: Path, run: Path) -> RunModel:
    """The model in this file of a run."""
    seed, method = int(file.absolute().parents[1].name.removeprefix("seed-")), file.absolute().parent.name
    names = [name for name in _partitions(run)[str(seed)] if file_name(name) == file.stem]
    return RunModel(run, seed, method.replace("+", ":"), names[0] if names else POOLED)


def load(model: RunModel) -> Predictor:
    """The model as the run left it."""
    data = read_file(model.file, linked=True)  # a run keeps equal bytes once, under several names
    Sums(model.run).check(model.file.relative_to(model.run).as_posix(), data)
    return checked(data)


def calibrated(model: RunModel) -> tuple[Predictor, int, str]:
    """The model, on how many images its probabilities are calibrated, and if on none, why."""
    predictor, config = load(model), _config(model.run)
    if predictor.constant is not None:
        return predictor, 0, "a constant answer is as sure as its class is frequent"
    try:
        images, labels = validation_images(model, config, predictor.task)
    except FedBiCrossError as error:  # the images may have been moved, or be arrays of a notebook
        return predictor, 0, str(error.args[0])
    if len(labels) < LEAST_IMAGES:
        return predictor, 0, f"{len(labels)} validation images are too few, {LEAST_IMAGES} are needed"
    return calibrate(predictor, images, labels), len(labels), ""


def finish(model: RunModel) -> tuple[Finished, str]:
    """The model with all that its run knows of it; and why its probabilities are not calibrated, or nothing."""
    config = _config(model.run)
    predictor, count, why = calibrated(model)
    scores, sent, size = _scores(model)
    method = config.build(model.method)
    origin = Origin(
        kind="run",
        client=model.client,
        run=config.name,
        method=model.method,
        leaves=method.leaves(config.training),
        upload_bytes=sent,
        train_images=size,
        hold_out=0.0,
        seed=model.seed,
        settings=method.config.model_dump(),
        training=config.training.model_dump(),
    )
    return Finished(predictor, origin, None, count, scores), why


def validation_images(model: RunModel, config: RunConfig, task: Task) -> tuple[np.ndarray, np.ndarray]:
    """The images of the client that no training of this method has used, and their labels."""
    prepared = runner.prepare(config.model_copy(update={"device": "cpu"}))
    if _read(model.run, "partition.json").decode() != prepared.partition_text:
        raise RunError("changed", f"the data or their partition are not those that {model.run} was started with")
    partition = prepared.partitions[model.seed]
    clients, _ = runner.make_clients(prepared.dataset, partition)
    method = config.build(model.method)
    client = pooled(clients) if method.pools_data else _named(clients, model.client)
    models = config.models_of(partition.clients)
    ctx = Context(task, config.training, seed=model.seed, client_models=models)
    rows = method.held_back(client, ctx)
    return client.images[rows], client.labels[rows]


def _named(clients: Iterable[Client], name: str) -> Client:
    found = next((client for client in clients if client.name == name), None)
    if found is None:
        raise RunError("no_models", f"{name!r} takes no part in this run")
    return found


def _config(run: Path) -> RunConfig:
    return parse(RunConfig, parse_toml(_read(run, MARKS[0]), run / MARKS[0]))


def _read(run: Path, name: str) -> bytes:
    """A file of the run, which must be as the run wrote it."""
    data = read_file(run / name, Limits(max_bytes=MAX_RESULTS))
    Sums(run).check(name, data)
    return data


def _partitions(run: Path) -> dict[str, list[str]]:
    """The names of the clients, by seed."""
    try:
        found = json.loads(_read(run, MARKS[1]))["partitions"]
        return {str(int(seed)): [str(name) for name in partition["clients"]] for seed, partition in found.items()}
    except (UploadError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise RunError("not_a_run", f"{run} holds no run (no readable {MARKS[1]})") from None


def _one(what: str, known: list[Any], asked: Any) -> Any:
    if asked is None and len(known) == 1:
        return known[0]
    if asked is None:
        names = ", ".join(map(str, known))
        raise ConfigError("which_model", f"the run has several; say which with --{what} (one of: {names})")
    if asked not in known:
        raise ConfigError(f"no_{what}", f"the run has no {what} {asked!r}{nearest(str(asked), map(str, known))}")
    return asked


def _scores(model: RunModel) -> tuple[dict[str, Any], int | None, int]:
    """What results.json says of this model: its scores beside training alone, bytes sent, images trained on."""
    try:
        results = json.loads(_read(model.run, "results.json"))
        sizes = {entry["client"]: int(entry["num_samples"]) for entry in results["clients"][str(model.seed)]}
        rows = {row["method"]: row for row in results["rows"] if row["seed"] == model.seed}
        if model.client == POOLED:
            return dict.fromkeys(("test", "alone", "comparison")), None, sum(sizes.values())
        row = _of(rows[model.method], model.client)
        bar = rows[model.method]["alone"]
        measured = bar is not None and not is_alone(model.method)
        test, own = _matched(row), _matched(_of(rows[bar], model.client)) if measured else None
        scores = {"test": test, "alone": own, "comparison": compare.judge(row["against_alone"], test, own)}
        return scores, row["upload_bytes"] or None, sizes[model.client]
    except (UploadError, ValueError, KeyError, TypeError, StopIteration, RecursionError):
        problem = f"{model.run} says nothing of {model.method} at {model.client!r}"
        raise RunError("no_results", f"{problem}; `fedbicross resume {model.run}` finishes it") from None


def _of(row: Mapping[str, Any], client: str) -> Mapping[str, Any]:
    return next(entry for entry in row["clients"] if entry["client"] == client)


def _matched(found: Mapping[str, Any]) -> dict[str, Any] | None:
    """The scores on the client's own test images, in the form of ``compare.score``."""
    images = found["test_images"]["matched"]
    return {"images": images, **{key: found[key]["matched"] for key in SCORES}} if images else None
