"""A run in TensorBoard or MLflow (extra ``track``): its settings, training curves and every method's results.

Made from the stored results after the run, so that a run never waits for a tracker, and any earlier one can be added.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedbicross.errors import ConfigError
from fedbicross.messages import file_name
from fedbicross.report.summary import clients_of, result_rows, summarise
from fedbicross.report.text import PROTOCOLS, get, mapping, number, sequence
from fedbicross.report.verdict import judge

METRICS = ("accuracy", "balanced_accuracy", "macro_auc", "macro_f1", "ece")
MOST_TEXT = 500  # characters of a setting that every tracker takes


class Scalar(NamedTuple):
    """One measured number."""

    of: tuple[str, ...]  # method or client, and seed
    name: str
    step: int  # an epoch, or 0
    value: float


def scalars(results: Mapping[str, Any]) -> Iterator[Scalar]:
    """Training curves of the clients; accuracy and the like of every method, on average and for each client."""
    for seed, clients in mapping(results.get("training")).items():
        for client, trained in mapping(clients).items():
            for entry in map(mapping, sequence(get(trained, "history"))):
                for name, value in entry.items():
                    if name != "epoch" and number(value) is not None:
                        step = int(number(entry.get("epoch")) or 0)
                        yield Scalar((client, f"seed-{seed}"), f"training/{name}", step, float(value))
    for row in result_rows(results):
        of = str(row["method"]), f"seed-{row.get('seed')}"
        every = [("mean", row), *((f"client/{client.get('client')}", client) for client in clients_of(row))]
        for whose, found in every:
            for metric in METRICS:
                for protocol in PROTOCOLS:
                    value = number(get(found, metric, protocol))
                    if value is not None:
                        yield Scalar(of, f"{whose}/{metric}/{protocol}", 0, value)


def settings(results: Mapping[str, Any]) -> dict[str, str]:
    """The run's configuration as dotted keys, and what made it."""
    flat: dict[str, str] = {}

    def walk(value: object, path: str) -> None:
        if isinstance(value, Mapping) and value:
            for key, inner in value.items():
                walk(inner, f"{path}.{key}" if path else str(key))
        else:
            flat[path] = str(value)[:MOST_TEXT]

    walk(mapping(results.get("config")), "")
    walk(mapping(results.get("versions")), "versions")
    return flat


def to_tensorboard(results: Mapping[str, Any], logs: Path) -> Path:
    """Event files under ``logs/<run>``, one folder for each method or client and seed; returns that folder."""
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError:
        raise _missing("tensorboard") from None
    folder = logs / file_name(str(results.get("name")))
    by_owner: dict[tuple[str, ...], list[Scalar]] = {}
    for scalar in scalars(results):
        by_owner.setdefault(scalar.of, []).append(scalar)
    with SummaryWriter(str(folder)) as writer:
        writer.add_text("verdict", judge(results, summarise(results)).headline)
        writer.add_text("settings", "\n".join(f"    {key} = {value}" for key, value in settings(results).items()))
    for owner, found in by_owner.items():
        with SummaryWriter(str(folder.joinpath(*map(file_name, owner)))) as writer:
            for scalar in found:
                writer.add_scalar(scalar.name, scalar.value, scalar.step)
    return folder


def to_mlflow(results: Mapping[str, Any], uri: str | None = None, page: Path | None = None) -> str:
    """One run of the experiment "fedbicross" at the tracking server ``uri`` (default: MLflow's); returns its id."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # no usage reports over the network
    try:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException
    except ImportError:
        raise _missing("mlflow") from None
    params = [Param(_key(key), value) for key, value in settings(results).items()]
    now = int(1000 * time.time())
    metrics = [Metric(_key("/".join((*s.of, s.name))), s.value, now, s.step) for s in scalars(results)]
    try:
        client = MlflowClient(uri)
        experiment = client.get_experiment_by_name("fedbicross")
        group = experiment.experiment_id if experiment else client.create_experiment("fedbicross")
        run = str(client.create_run(group, run_name=str(results.get("name"))).info.run_id)
        for start in range(0, len(params), 100):  # as many as a server takes at once
            client.log_batch(run, params=params[start : start + 100])
        for start in range(0, len(metrics), 1000):
            client.log_batch(run, metrics=metrics[start : start + 1000])
        client.set_tag(run, "verdict", judge(results, summarise(results)).headline)
        if page is not None:
            client.log_artifact(run, str(page))
        client.set_terminated(run)
    except MlflowException as error:
        raise ConfigError("tracker", f"MLflow cannot log there: {error}") from None
    return run


def _key(text: str) -> str:
    """A name that MLflow takes, of which a file may be made."""
    return "/".join(file_name(part) if part.strip(".") else "_" for part in text.replace(":", "-").split("/"))


def _missing(package: str) -> ConfigError:
    return ConfigError("no_tracker", f"{package} is not installed: pip install 'fedbicross[track]'")
