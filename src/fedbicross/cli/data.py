"""`fedbicross data`: download a data set explicitly, or look at one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from fedbicross import data, engine
from fedbicross.cli.show import print_json, progress
from fedbicross.errors import DataError

app = typer.Typer(help="Download a data set, or look at one.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="a MedMNIST name, e.g. bloodmnist")],
    data_dir: Annotated[Path | None, typer.Option(help="where to put the file (default: where `run` looks)")] = None,
    image_size: Annotated[int, typer.Option(help="pixels per side: 28, 64, 128 or 224")] = 28,
    url: Annotated[str | None, typer.Option(help="another address of the same file")] = None,
    md5: Annotated[str | None, typer.Option(help="expected MD5, instead of the published one")] = None,
    sha256: Annotated[str | None, typer.Option(help="expected SHA-256")] = None,
    json: Annotated[bool, typer.Option("--json", help="print the path as JSON")] = False,
) -> None:
    """Download one file, with checksum; a broken download is resumed by running this again."""
    folder = data.default_data_dir() if data_dir is None else data_dir
    with progress() as shown:
        updates: dict[int, object] = {}

        def update(done: int, total: int | None) -> None:
            if total and total not in updates:
                updates[total] = shown.start(f"downloading {name}", total)
            if total:
                updates[total](done, "")  # type: ignore[operator]

        path = data.fetch.fetch(name, image_size, folder, url=url, md5=md5, sha256=sha256, progress=update)
    if json:
        print_json({"path": str(path)})
    else:
        print(path)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="a data set, or the path of a folder, CSV manifest or .npz file")],
    data_dir: Annotated[Path | None, typer.Option(help="where .npz files lie")] = None,
    image_size: Annotated[int, typer.Option(help="pixels per side")] = 28,
    grid: Annotated[Path | None, typer.Option(help="also write a PNG with images of every class")] = None,
    json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Count the images per class; with --grid also look at some."""
    dataset = data.load_dataset(name, data_dir=data_dir, image_size=image_size)
    counts = {
        split: [int(n) for n in np.bincount(part.labels, minlength=len(dataset.classes))]
        for split, part in (("train", dataset.train), ("test", dataset.test))
    }
    if grid is not None:
        try:
            engine.images.write_class_grid(dataset.train.images, dataset.train.labels, len(dataset.classes), grid)
        except OSError as error:
            raise DataError("cannot_write", f"cannot write {grid}: {error.strerror}") from None
    if json:
        shape = {"image_size": dataset.image_size, "channels": dataset.channels}
        print_json({"name": dataset.name, "classes": list(dataset.classes), **shape, **counts, "note": dataset.note})
        return
    print(f"{dataset.name}: {dataset.image_size} px, {dataset.channels} channel(s). {dataset.note}")
    for label, train, test in zip(dataset.classes, counts["train"], counts["test"], strict=True):
        print(f"  {label[:60]:<32} train {train:>6}   test {test:>6}")
    if grid is not None:
        print(f"images: {grid}")
