"""`fedbicross run`: methods side by side on simulated hospitals."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from fedbicross import runs
from fedbicross.cli import completion
from fedbicross.cli.show import run_and_report
from fedbicross.errors import ConfigError


class Engine(StrEnum):
    """Where the methods of a run are computed; the results are the same."""

    local = "local"
    ray = "ray"


def run(
    config: Annotated[Path | None, typer.Argument(help="a TOML file; flags and --set override it")] = None,
    case: Annotated[str | None, typer.Option(help="which [case.NAME] of a file that describes several runs")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="data set name, or a folder, CSV manifest or .npz file", autocompletion=completion.data),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="where .npz files lie")] = None,
    image_size: Annotated[int | None, typer.Option(help="pixels per side (default 28)")] = None,
    model: Annotated[
        str | None, typer.Option(help="architecture (default resnet18)", autocompletion=completion.models)
    ] = None,
    client_models: Annotated[
        str | None,
        typer.Option(
            help="comma-separated architectures of the clients, in the order of their names",
            autocompletion=completion.models,
        ),
    ] = None,
    clients: Annotated[int | None, typer.Option(help="number of hospitals (default 5)")] = None,
    partition: Annotated[
        str | None,
        typer.Option(help="how images are dealt out (default dirichlet)", autocompletion=completion.partitions),
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="Dirichlet concentration (default 0.1)")] = None,
    methods: Annotated[
        str | None, typer.Option(help="comma-separated names: a,b:variant", autocompletion=completion.methods)
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="local epochs (default 100)")] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="what the verdict goes by: accuracy (default), balanced_accuracy or macro_auc",
            autocompletion=completion.metrics,
        ),
    ] = None,
    seed: Annotated[list[int] | None, typer.Option(help="repeat for several seeds (default 0)")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or mps")] = None,
    precision: Annotated[str | None, typer.Option(help="auto (bf16 on a GPU), fp32 or bf16")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="small settings that finish in minutes on 2 cores")] = False,
    baselines: Annotated[bool, typer.Option(help="also run majority, local_only, ensemble, centralised")] = True,
    out: Annotated[Path | None, typer.Option(help="folder of the run (default runs/<name>)")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an earlier run in --out")] = False,
    engine: Annotated[Engine, typer.Option(help="local, or ray: seeds and methods spread over its workers")] = (
        Engine.local
    ),
    accept: Annotated[list[str] | None, typer.Option(help="go on in spite of this finding of `check`, by code")] = None,
    assign: Annotated[list[str] | None, typer.Option("--set", help="any setting: --set training.lr=0.01")] = None,
    json: Annotated[bool, typer.Option("--json", help="print results.json instead of the table")] = False,
) -> None:
    """Run methods on simulated hospitals; writes results.json and report.html."""
    flags: dict[str, Any] = {
        "model": model,
        "client_models": _names(client_models),
        "clients": clients,
        "methods": _names(methods),
        "metric": metric,
        "seeds": seed or None,
        "device": device,
        "precision": precision,
        "baselines": None if baselines else [],
        "data": {
            "name": data,
            "dir": None if data_dir is None else str(data_dir),
            "image_size": image_size,
            "accept": accept or None,
        },
        "partition": {"kind": partition, "alpha": alpha},
        "training": {"epochs": epochs},
        "name": None if out is None else out.name,
    }
    loaded = runs.config.load_config(config, _given(flags), assign or [], quick, case)
    if out is None and not _is_folder_name(loaded.name):
        raise ConfigError("name", f"name: {loaded.name!r} is no name for a folder in runs/; change it or give --out")
    if quick:
        typer.echo(f"quick settings (indicative only): {', '.join(_in_effect(runs.config.QUICK, loaded))}", err=True)
    folder = out or Path("runs") / loaded.name
    if engine is Engine.ray:
        if overwrite:
            raise ConfigError("engine", "--engine ray does not overwrite; choose another --out")
        run_and_report(lambda progress: runs.ray_workers.run(loaded, folder, "ray", progress), folder, json)
        return
    run_and_report(lambda progress: runs.runner.run(loaded, folder, progress=progress, replace=overwrite), folder, json)


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _in_effect(changed: Mapping[str, Any], settings: Any, table: str = "") -> list[str]:
    """What these keys are set to in the end, ``training.epochs=8``, as `--set` takes it."""
    found = []
    for key, value in changed.items():
        actual = getattr(settings, key)
        found += _in_effect(value, actual, f"{key}.") if isinstance(value, Mapping) else [f"{table}{key}={actual}"]
    return found


def _is_folder_name(name: str) -> bool:
    """A stranger's configuration must not choose where it is written."""
    return name == Path(name).name and name not in ("", "..") and name.isprintable()


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    """Drop unset flags."""
    out = {}
    for key, value in flags.items():
        inner = _given(value) if isinstance(value, dict) else value
        if inner is not None and inner != {}:
            out[key] = inner
    return out
