"""`fedbicross predict` and `fedbicross export`: use a finished model, of a run or of a federation."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbicross import deploy, engine, transport
from fedbicross.cli.common import DeviceOption, JsonOption, ThreadsOption, check_new, set_threads, write_new
from fedbicross.cli.show import print_json, progress
from fedbicross.errors import ConfigError

if TYPE_CHECKING:
    from fedbicross.deploy.run_models import RunModel
    from fedbicross.messages import Predictor

MODEL = "a folder that `client personalize`, `client join` or `export` wrote, a model file, or the folder of a run"
AdaptOption = Annotated[
    bool,
    typer.Option(
        "--adapt-prior", help="answer under the class mix of these images, estimated without labels (primum:estimated)"
    ),
]
ModelOption = Annotated[Path, typer.Option(help=MODEL)]
MethodOption = Annotated[str | None, typer.Option("--method", help="of a run: the model of which method")]
ClientOption = Annotated[str | None, typer.Option("--client", help="of a run: the model of which client")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="of a run: the model of which seed")]
AloneOption = Annotated[bool, typer.Option("--alone", help="the model that the site trained without the others")]


def predict(
    images: Annotated[list[Path], typer.Argument(help="image, DICOM or NIfTI files, or folders of them")],
    model: ModelOption,
    out: Annotated[Path | None, typer.Option(help="a CSV file (default: standard output)")] = None,
    method: MethodOption = None,
    client: ClientOption = None,
    seed: SeedOption = None,
    alone: AloneOption = False,
    raw: Annotated[bool, typer.Option("--raw", help="probabilities as the networks give them, uncalibrated")] = False,
    adapt_prior: AdaptOption = False,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Class probabilities of images, as CSV. Research use only: not a medical device."""
    if out is not None:
        check_new(out)
    found = _of_run(model, method, client, seed)
    set_threads(threads)
    predictor = _of_folder(model, alone) if found is None else _ready(found, alone, raw)
    if raw:
        predictor = replace(predictor, temperature=1.0)
    paths = transport.site_data.image_files(images)
    used = engine.device.resolve_device(device)
    with progress() as shown:
        text = deploy.answers.as_csv(predictor, paths, used, shown, adapt_prior)
    if out is None:
        print(text, end="")
    else:
        write_new(out, text.encode())
        print(f"{out}: {len(text.splitlines()) - 1} images")


def export(
    model: Annotated[Path, typer.Argument(help=MODEL)],
    out: Annotated[Path, typer.Option(help="the folder to write, laid out as on the Hugging Face hub")],
    method: MethodOption = None,
    client: ClientOption = None,
    seed: SeedOption = None,
    alone: AloneOption = False,
    onnx: Annotated[bool, typer.Option("--onnx", help="also write model.onnx (needs the extra `onnx`)")] = False,
    torch: Annotated[bool, typer.Option("--torch", help="also write model.pt2, for torch without fedbicross")] = False,
    json: JsonOption = False,
) -> None:
    """Write a model for others: safetensors, configuration and card; as one graph for ONNX or torch if asked."""
    deploy.folder.check_absent(out)
    if onnx:
        deploy.graphs.require_onnx()
    found = _of_run(model, method, client, seed)
    if found is not None:
        _refuse_alone(alone)
        finished, why = deploy.run_models.finish(found)
        _note_calibration(why)
    elif model.is_dir():
        finished = deploy.folder.read_finished(model)
        if alone:
            finished = deploy.folder.own_model(finished)
    else:
        raise ConfigError("no_card", f"{model} is a file alone; name the folder that says where it came from")
    deploy.folder.write_model(out, finished, deploy.folder.HUB_CARD, onnx, torch)
    files = sorted(path.name for path in out.iterdir())
    if json:
        print_json({"path": str(out), "files": files})
        return
    print(f"{out}: {', '.join(files)}")


def _of_run(path: Path, method: str | None, client: str | None, seed: int | None) -> RunModel | None:
    """The model of a run that is meant; None for anything else."""
    runs = deploy.run_models
    if path.is_dir() and runs.is_run(path):
        return runs.choose(path, method, client, seed)
    if method is not None or client is not None or seed is not None:
        raise ConfigError("not_a_run", f"--method, --client and --seed choose among models of a run; {path} is no run")
    folder = runs.run_of(path) if path.is_file() else None
    return None if folder is None else runs.at(path, folder)


def _of_folder(path: Path, alone: bool) -> Predictor:
    predictor = deploy.folder.load_model(path, alone)
    if path.is_dir() and not alone:
        comparison = deploy.folder.read_settings(path).get("comparison") or {}
        if comparison.get("keep") == deploy.compare.ALONE and not comparison["same"]:
            _note("nothing shows that the federated model is the better one for this site; --alone uses the other")
    return predictor


def _ready(model: RunModel, alone: bool, raw: bool) -> Predictor:
    _refuse_alone(alone)
    if raw:
        return deploy.run_models.load(model)
    predictor, _, why = deploy.run_models.calibrated(model)
    _note_calibration(why)
    return predictor


def _refuse_alone(alone: bool) -> None:
    if alone:
        raise ConfigError("no_model_alone", "in a run what was trained alone is a method: --method local_only")


def _note_calibration(why: str) -> None:
    if why:
        _note(f"the probabilities are not calibrated: {why}")


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)
