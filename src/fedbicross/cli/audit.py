"""`fedbicross audit`: what the synthetic features of a finished run are worth, and what they give away."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedbicross import runs
from fedbicross.cli.show import print_json, progress


def audit(
    folder: Annotated[Path, typer.Argument(help="the run's folder")],
    methods: Annotated[str | None, typer.Option(help="comma-separated; default: all with synthetic features")] = None,
    clients: Annotated[str | None, typer.Option(help="comma-separated; default: the one with most images")] = None,
    images: Annotated[int, typer.Option(min=2, help="images that the attacker tries to rebuild")] = 200,
    pixels: Annotated[int, typer.Option(min=8, max=512, help="per side of what he rebuilds")] = 32,
    epochs: Annotated[int, typer.Option(min=1, help="of the attacker's training")] = 100,
    json: Annotated[bool, typer.Option("--json", help="print audit.json instead of the table")] = False,
) -> None:
    """Distance of synthetic features to real ones, a reconstruction attack with controls, and costs."""
    names = [[part.strip() for part in (text or "").split(",") if part.strip()] for text in (methods, clients)]
    settings = runs.audit.AuditSettings(images=images, pixels=pixels, epochs=epochs)
    with progress() as shown:
        results = runs.audit.audit(folder, names[0], names[1], settings, shown)
    if json:
        print_json(results)
        return
    for row in runs.audit.table(results):
        for title, cell in zip(runs.audit.HEADER, row, strict=True):
            print(f"{title:>30}  {cell}")
        print()
    print(f"written: {folder / 'audit.json'}, {folder / 'tables' / 'audit.md'}, {folder / 'audit'}/*.png")
