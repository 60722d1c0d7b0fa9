"""`fedbicross list`: what there is to choose from."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedbicross import data, methods, models
from fedbicross.cli.show import print_json

if TYPE_CHECKING:
    from fedbicross.data import DatasetInfo


class Kind(StrEnum):
    """What can be listed."""

    methods = "methods"
    datasets = "datasets"
    models = "models"
    partitions = "partitions"
    encoders = "encoders"


def listing(
    kind: Annotated[Kind, typer.Argument(help="methods, datasets, models, partitions or encoders")],
    json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """List methods (with their variants), data sets, models, partitions or frozen encoders."""
    entries = _entries(kind)
    if json:
        print_json(entries)
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, text in entries.items():
        table.add_row(name, text)
    Console().print(table, markup=False)


def _entries(kind: Kind) -> dict[str, str]:
    if kind is Kind.methods:
        out: dict[str, Any] = {}
        names = [*methods.METHODS, *methods.PLUGINS.names()]
        for name, cls in ((name, methods.find(name)) for name in names):
            out[name] = cls.summary
            out |= {f"{name}:{variant}": cls.variant_notes.get(variant, "") for variant in cls.variants}
        return out
    if kind is Kind.models:
        return {name: info.description for name, info in models.MODELS.items()}
    if kind is Kind.encoders:
        return {name: f"{info.description}; {info.dim} features" for name, info in models.encoders.ENCODERS.items()}
    if kind is Kind.partitions:
        return dict(data.PARTITIONS)
    return {name: _data_words(info) for name, info in data.DATASETS.items()}


def _data_words(info: DatasetInfo) -> str:
    if info.refused:
        return f"not usable: {info.refused}"
    sizes = f"{', '.join(map(str, info.sizes))} px" if info.sizes else "drawn at any size, no download"
    return f"{info.task}, {len(info.classes)} classes, {info.channels} channel(s), {sizes}, {info.licence}"
