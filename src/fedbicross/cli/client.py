"""`fedbicross client`: what a hospital does. Keys, training, a look at what leaves; the final model and its use."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from fedbicross import bundle, engine, parts, report, transport
from fedbicross.cli import common, describe_bundle
from fedbicross.cli.common import (
    FEDERATION,
    WORK,
    AcceptOption,
    DeviceOption,
    FederationOption,
    JsonOption,
    ThreadsOption,
    WorkOption,
    check_new,
    print_table,
    set_threads,
    site_name,
    site_work,
    write_new,
)
from fedbicross.cli.show import print_json, progress
from fedbicross.errors import ConfigError, DataError

if TYPE_CHECKING:
    from fedbicross.messages import Predictor

BATCH = 256  # images read and answered at a time
AdaptOption = Annotated[
    bool,
    typer.Option(
        "--adapt-prior", help="answer under the class mix of these images, estimated without labels (primum:estimated)"
    ),
]
ModelOption = Annotated[Path, typer.Option(help="the folder that `client personalize` wrote")]
app = typer.Typer(help="What a hospital does: train, send, receive, use.", no_args_is_help=True, rich_markup_mode=None)


class Which(StrEnum):
    """Which images are scored."""

    held_out = "held-out"
    all = "all"


@app.command()
def keygen(
    out: Annotated[Path, typer.Option(help="file of the private key; the public one gets the ending .pub")],
    json: JsonOption = False,
) -> None:
    """Make the site's key pair."""
    common.keygen(out, json)


@app.command()
def train(
    data: Annotated[str, typer.Option(help="folder of class folders, CSV manifest or .npz file")],
    key: Annotated[Path, typer.Option(help="the site's private key")],
    federation: FederationOption = FEDERATION,
    name: Annotated[str | None, typer.Option(help="the site's name (default: whose key this is)")] = None,
    out: Annotated[Path | None, typer.Option(help="the file to send (default: <name>.safetensors)")] = None,
    accept: AcceptOption = None,
    work: WorkOption = WORK,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    json: JsonOption = False,
) -> None:
    """Train on the site's own images and write the one file that leaves."""
    agreed = transport.files.load_federation(federation)
    private = bundle.keys.load_private_key(key)
    owners = {text: owner for owner, text in agreed.clients.items()}
    site = name or owners.get(bundle.keys.public_text(private))
    if site is None:
        raise ConfigError("wrong_key", f"the federation file lists no site with the key in {key}")
    transport.files.check_key(agreed, site, private)
    folder = site_work(work, agreed, site)
    target = out or Path(f"{transport.files.file_name(site)}.safetensors")
    kept = folder / transport.files.SENT
    check_new(target, kept.read_bytes() if kept.is_file() else None)  # before hours of training, not after
    client, held_out = transport.site_data.load_site(data, agreed.task, site, agreed.hold_out, agreed.seed)
    warnings = transport.site_data.check_site(client, held_out, agreed.classes, accept or [])
    set_threads(threads)
    with progress() as shown:
        for warning in warnings:
            shown.say(f"warning: {warning}")
        shown.say(f"{site}: {len(client.labels):,} images to train on, {len(held_out):,} held out")
        sent = transport.files.make_upload(agreed, client, private, folder, shown, device=device)
    write_new(target, sent)
    if json:
        print_json({"path": str(target), "client": site, "run": agreed.run, **describe_bundle.facts(sent)})
        return
    print(f"{target}: {len(sent):,} bytes, ready to be handed to the server of run {agreed.run_id}")
    print(f"what leaves: {agreed.build().upload_summary}")
    print(f"look at it:  fedbicross client show {target}")


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="an upload or a reply")],
    federation: FederationOption = FEDERATION,
    tensors: Annotated[bool, typer.Option("--tensors", help="list every tensor")] = False,
    json: JsonOption = False,
) -> None:
    """Say in words what exactly a file holds; nothing in it is used."""
    data = bundle.read_file(file)
    header = bundle.inspect(data, bundle.REPLY)
    describe_bundle.check_readable(header)
    there = federation.is_file() or federation != FEDERATION
    agreed = transport.files.load_federation(federation) if there else None
    if json:
        print_json(describe_bundle.as_json(data, header, agreed))
        return
    print_table(str(file), ("what", "content"), describe_bundle.words(data, header, agreed))
    if tensors:
        rows = [
            (name, info.dtype, " × ".join(map(str, info.shape)) or "one number", f"{info.end - info.start:,}")
            for name, info in header.tensors.items()
        ]
        print_table("tensors", ("name", "type", "shape", "bytes"), rows)


@app.command()
def personalize(
    reply: Annotated[Path, typer.Option(help="the server's reply to this site")],
    data: Annotated[str, typer.Option(help="the same images as in `client train`")],
    out: Annotated[Path, typer.Option(help="folder of the final model")],
    federation: FederationOption = FEDERATION,
    name: Annotated[str | None, typer.Option(help="the site's name (default: the one that trained here)")] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="also write model.onnx (needs the extra `onnx`)")] = False,
    work: WorkOption = WORK,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    json: JsonOption = False,
) -> None:
    """Make the site's final model from the server's reply, and test it on the images that were held out."""
    agreed = transport.files.load_federation(federation)
    site = site_name(agreed, work, name)
    transport.model_folder.check_absent(out)
    if onnx:
        transport.model_folder.require_onnx()
    received = bundle.read_file(reply)
    transport.files.open_reply(agreed, received, site)  # before images are read, which may take minutes
    client, held_out = transport.site_data.load_site(data, agreed.task, site, agreed.hold_out, agreed.seed)
    folder = site_work(work, agreed, site)
    set_threads(threads)
    with progress() as shown:
        predictor = transport.files.personalize(agreed, client, received, folder, shown, device=device)
    test = None
    if len(held_out):
        test = transport.model_folder.score(predictor.probabilities(held_out.images), held_out.labels)
    method = agreed.build()
    sent = folder / transport.files.SENT
    origin = transport.model_folder.Origin(
        client=site,
        run=agreed.run,
        method=agreed.method,
        leaves=method.upload_summary,
        upload_bytes=sent.stat().st_size if sent.is_file() else None,
        train_images=len(client.labels),
        hold_out=agreed.hold_out,
        seed=agreed.seed,
        settings=method.config.model_dump(),
        training=agreed.training.model_dump(),
    )
    transport.model_folder.write_model(out, predictor, origin, test, onnx)
    if json:
        print_json({"path": str(out), "client": site, "test": test})
        return
    if test is not None:
        _print_scores(f"{site}: on images that were held out", test)
    print(f"model: {out} (read {out / transport.model_folder.CARD} before you use it)")


@app.command()
def predict(
    images: Annotated[list[Path], typer.Argument(help="image files, or folders of them")],
    model: ModelOption,
    out: Annotated[Path | None, typer.Option(help="a CSV file (default: standard output)")] = None,
    adapt_prior: AdaptOption = False,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Class probabilities of images, as CSV. Research use only: not a medical device."""
    if out is not None:
        check_new(out)
    predictor = transport.model_folder.load_model(model)
    paths = transport.site_data.image_files(images)
    used = engine.device.resolve_device(device)
    set_threads(threads)
    rows: list[list[str]] = []
    if adapt_prior:
        everything = transport.site_data.read_files(paths, predictor.task)
        predictor = parts.class_mix.adapt_prior(predictor, everything, used)
    with progress() as shown:
        update = shown.start("predicting", len(paths))
        for start in range(0, len(paths), BATCH):
            part = paths[start : start + BATCH]
            rows += _answers(part, predictor, used)
            update(start + len(part), "")
    text = _csv(["image", "predicted", *predictor.task.classes], rows)
    if out is None:
        print(text, end="")
    else:
        write_new(out, text.encode())
        print(f"{out}: {len(rows)} images")


@app.command()
def evaluate(
    model: ModelOption,
    data: Annotated[str, typer.Option(help="images with labels: folder, CSV manifest or .npz file")],
    which: Annotated[Which, typer.Option(help="held-out: those never trained on, by the federation's rule")] = (
        Which.held_out
    ),
    adapt_prior: AdaptOption = False,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    json: JsonOption = False,
) -> None:
    """Accuracy, balanced accuracy, AUC, F1 and calibration of a final model on labelled images."""
    predictor = transport.model_folder.load_model(model)
    origin = transport.model_folder.read_settings(model)["origin"]
    client, test = transport.site_data.load_site(data, predictor.task, "site", origin["hold_out"], origin["seed"])
    images, labels = test.images, test.labels
    if which is Which.all:
        images, labels = np.concatenate([client.images, images]), np.concatenate([client.labels, labels])
    if not len(labels):
        raise DataError("empty", f"{data} holds no images that were held out; --which all scores every image")
    used = engine.device.resolve_device(device)
    set_threads(threads)
    if adapt_prior:
        predictor = parts.class_mix.adapt_prior(predictor, images, used)
    scores = transport.model_folder.score(predictor.probabilities(images, used), labels)
    if json:
        print_json({"which": which.value, **scores})
        return
    _print_scores(f"{which.value}: {len(labels):,} images of {data}", scores)
    if which is Which.all:
        print("note: where these images were trained on, the numbers are too good")


def _answers(paths: Sequence[Path], predictor: Predictor, device: str) -> list[list[str]]:
    probabilities = predictor.probabilities(transport.site_data.read_files(paths, predictor.task), device)
    classes = predictor.task.classes
    return [
        [*map(report.tables.csv_text, (path, classes[int(row.argmax())])), *(f"{value:.6f}" for value in row)]
        for path, row in zip(paths, probabilities, strict=True)
    ]


def _csv(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([report.tables.csv_text(title) for title in header])
    writer.writerows(rows)
    return stream.getvalue()


def _print_scores(title: str, scores: dict[str, Any]) -> None:
    rows = transport.model_folder.metric_rows(scores)
    print_table(title, ("metric", "value"), [("images", f"{scores['images']:,}"), *rows])
