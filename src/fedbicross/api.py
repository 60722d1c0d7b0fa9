"""The library's front door: run a federation from Python with plain arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

from fedbicross.context import Progress, Silent
from fedbicross.data import Dataset
from fedbicross.errors import ConfigError
from fedbicross.methods import PLUGINS
from fedbicross.methods.base import Method
from fedbicross.results import Results
from fedbicross.runs import progress as progresses
from fedbicross.runs import runner
from fedbicross.runs.config import load_config


def run(
    source: str | Path | Dataset = "cells",
    *,
    methods: Sequence[str | type[Method[Any]]] | None = None,
    baselines: Sequence[str | type[Method[Any]]] | None = None,
    method: Mapping[str, Mapping[str, Any]] | None = None,
    clients: int | None = None,
    partition: Mapping[str, Any] | None = None,
    model: str | None = None,
    client_models: Sequence[str] | None = None,
    training: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    seeds: Sequence[int] | None = None,
    device: Literal["auto", "cpu", "cuda", "mps"] | None = None,
    precision: Literal["auto", "fp32", "bf16"] | None = None,
    deterministic: bool | None = None,
    threads: int | None = None,
    metric: Literal["accuracy", "balanced_accuracy", "macro_auc"] | None = None,
    quick: bool = False,
    name: str | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool | Progress = True,
) -> Results:
    """Run methods on simulated hospitals and return the results.

    What is None has the default of the configuration, where every setting is explained (docs/configuration.md).

    :param source: a data set's name, the path of images, or a ``Dataset`` of your own arrays
    :param methods: names such as ``"fedavg"`` or ``"primum:student"``, and classes of your own
    :param baselines: rows that come along; ``[]`` for none
    :param method: settings by method, ``{"fedavg": {"rounds": 3}}``
    :param clients: number of simulated hospitals
    :param partition: how images are dealt out, ``{"kind": "dirichlet", "alpha": 0.1}``
    :param model: architecture, ``"resnet8"``
    :param client_models: architectures of the clients, in the order of their names
    :param training: of the clients, ``{"recipe": "modern", "epochs": 12}``
    :param data: further settings of the images, ``{"image_size": 64, "train_size": 1000}``
    :param seeds: one row for each method and seed
    :param device: where to compute; ``"auto"`` takes a GPU if there is one
    :param precision: of numbers; ``"auto"`` is bf16 on a GPU, fp32 elsewhere
    :param deterministic: on a GPU, the same numbers every time, more slowly
    :param threads: of the CPU; another number adds up in another order
    :param metric: what the verdict judges by
    :param quick: small settings that finish in minutes on two cores
    :param name: the run's name in its results
    :param out: a folder to keep the run in; it gets a report there, and can be resumed
    :param overwrite: replace an earlier run in ``out``
    :param progress: show what is going on; or an object of your own with ``start`` and ``say``
    """
    dataset = source if isinstance(source, Dataset) else None
    given: dict[str, Any] = {
        "methods": _names(methods),
        "baselines": _names(baselines),
        "method": method,
        "clients": clients,
        "partition": partition,
        "model": model,
        "client_models": None if client_models is None else list(client_models),
        "training": training,
        "seeds": None if seeds is None else list(seeds),
        "device": device,
        "precision": precision,
        "deterministic": deterministic,
        "threads": threads,
        "metric": metric,
        "name": name,
        "data": {**(data or {}), "name": f"python:{dataset.name}" if dataset else str(source)},
    }
    config = load_config(flags={key: value for key, value in given.items() if value is not None}, quick=quick)
    folder = None if out is None else Path(out)
    with _shown(progress) as shown:
        found = runner.run(config, folder, dataset=dataset, progress=shown, replace=overwrite)
    return _finished(found, folder)


def resume(
    out: str | Path,
    *,
    dataset: Dataset | None = None,
    methods: Sequence[type[Method[Any]]] = (),
    progress: bool | Progress = True,
) -> Results:
    """Continue a killed run to the results that it would have had.

    A run on arrays of your own needs the same ``dataset`` again, and one with ``methods`` of your own their classes.
    """
    _names(methods)
    with _shown(progress) as shown:
        found = runner.resume(Path(out), dataset=dataset, progress=shown)
    return _finished(found, Path(out))


def _names(methods: Sequence[str | type[Method[Any]]] | None) -> list[str] | None:
    """The methods by name; a class is made known to this process."""
    if isinstance(methods, str):
        raise ConfigError("methods", f"methods: a list is needed, [{methods!r}]")
    return None if methods is None else [one if isinstance(one, str) else PLUGINS.give(one) for one in methods]


def _shown(progress: bool | Progress) -> AbstractContextManager[Progress]:
    if isinstance(progress, bool):
        return progresses.shown() if progress else nullcontext(Silent())
    return nullcontext(progress)


def _finished(found: dict[str, Any], folder: Path | None) -> Results:
    results = Results(found, folder)
    if folder is not None:
        results.report()
    return results
