"""The second half of `fedbicross client`: from the server's reply to a model in use."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbicross.cli.exchange import (
    FEDERATION,
    WORK,
    DeviceOption,
    FederationOption,
    JsonOption,
    ThreadsOption,
    WorkOption,
)

if TYPE_CHECKING:
    from fedbicross.exchange import Predictor

BATCH = 256  # images read and answered at a time
ModelOption = Annotated[Path, typer.Option(help="the folder that `client personalize` wrote")]


class Which(StrEnum):
    """Which images are scored."""

    held_out = "held-out"
    all = "all"


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
    from fedbicross.bundle import read_file
    from fedbicross.cli.exchange import set_threads, site_name, site_work
    from fedbicross.cli.show import print_json, progress
    from fedbicross.transport import files, model_folder
    from fedbicross.transport.site_data import load_site

    agreed = files.load_federation(federation)
    site = site_name(agreed, work, name)
    model_folder.check_absent(out)
    if onnx:
        model_folder.require_onnx()
    received = read_file(reply)
    files.open_reply(agreed, received, site)  # before images are read, which may take minutes
    client, held_out = load_site(data, agreed.task, site, agreed.hold_out, agreed.seed)
    folder = site_work(work, agreed, site)
    set_threads(threads)
    with progress() as shown:
        predictor = files.personalize(agreed, client, received, folder, shown, device=device)
    test = model_folder.score(predictor.probabilities(held_out.images), held_out.labels) if len(held_out) else None
    method = agreed.build()
    sent = folder / files.SENT
    origin = model_folder.Origin(
        client=site,
        run=agreed.run,
        method=agreed.method,
        leaves=method.leaves,
        upload_bytes=sent.stat().st_size if sent.is_file() else None,
        train_images=len(client.labels),
        hold_out=agreed.hold_out,
        seed=agreed.seed,
        settings=method.config.model_dump(),
        training=agreed.training.model_dump(),
    )
    model_folder.write_model(out, predictor, origin, test, onnx)
    if json:
        print_json({"path": str(out), "client": site, "test": test})
        return
    if test is not None:
        _print_scores(f"{site}: on images that were held out", test)
    print(f"model: {out} (read {out / model_folder.CARD} before you use it)")


def predict(
    images: Annotated[list[Path], typer.Argument(help="image files, or folders of them")],
    model: ModelOption,
    out: Annotated[Path | None, typer.Option(help="a CSV file (default: standard output)")] = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Class probabilities of images, as CSV. Research use only: not a medical device."""
    from fedbicross.cli.exchange import check_new, set_threads, write_new
    from fedbicross.cli.show import progress
    from fedbicross.engine.device import resolve_device
    from fedbicross.transport import model_folder, site_data

    if out is not None:
        check_new(out)
    predictor = model_folder.load_model(model)
    files = site_data.image_files(images)
    used = resolve_device(device)
    set_threads(threads)
    rows: list[list[str]] = []
    with progress() as shown:
        update = shown.start("predicting", len(files))
        for start in range(0, len(files), BATCH):
            part = files[start : start + BATCH]
            rows += _answers(part, predictor, used)
            update(start + len(part), "")
    text = _csv(["image", "predicted", *predictor.task.classes], rows)
    if out is None:
        print(text, end="")
    else:
        write_new(out, text.encode())
        print(f"{out}: {len(rows)} images")


def evaluate(
    model: ModelOption,
    data: Annotated[str, typer.Option(help="images with labels: folder, CSV manifest or .npz file")],
    which: Annotated[Which, typer.Option(help="held-out: those never trained on, by the federation's rule")] = (
        Which.held_out
    ),
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    json: JsonOption = False,
) -> None:
    """Accuracy, balanced accuracy, AUC, F1 and calibration of a final model on labelled images."""
    import numpy as np

    from fedbicross.cli.exchange import set_threads
    from fedbicross.cli.show import print_json
    from fedbicross.engine.device import resolve_device
    from fedbicross.errors import DataError
    from fedbicross.transport import model_folder, site_data

    predictor = model_folder.load_model(model)
    origin = model_folder.read_settings(model)["origin"]
    client, test = site_data.load_site(data, predictor.task, "site", origin["hold_out"], origin["seed"])
    images, labels = test.images, test.labels
    if which is Which.all:
        images, labels = np.concatenate([client.images, images]), np.concatenate([client.labels, labels])
    if not len(labels):
        raise DataError("empty", f"{data} holds no images that were held out; --which all scores every image")
    set_threads(threads)
    scores = model_folder.score(predictor.probabilities(images, resolve_device(device)), labels)
    if json:
        print_json({"which": which.value, **scores})
        return
    _print_scores(f"{which.value}: {len(labels):,} images of {data}", scores)
    if which is Which.all:
        print("note: where these images were trained on, the numbers are too good")


def _answers(paths: Sequence[Path], predictor: Predictor, device: str) -> list[list[str]]:
    from fedbicross.report.tables import csv_text
    from fedbicross.transport.site_data import read_files

    probabilities = predictor.probabilities(read_files(paths, predictor.task), device)
    classes = predictor.task.classes
    return [
        [csv_text(path), csv_text(classes[int(row.argmax())]), *(f"{value:.6f}" for value in row)]
        for path, row in zip(paths, probabilities, strict=True)
    ]


def _csv(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    import csv
    import io

    from fedbicross.report.tables import csv_text

    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([csv_text(title) for title in header])
    writer.writerows(rows)
    return stream.getvalue()


def _print_scores(title: str, scores: dict[str, Any]) -> None:
    from fedbicross.cli.exchange import print_table
    from fedbicross.transport.model_folder import metric_rows

    print_table(title, ("metric", "value"), [("images", f"{scores['images']:,}"), *metric_rows(scores)])
