"""`fedbicross validate`: check a configuration before a minute of work, without loading torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedbicross import runs
from fedbicross.cli.show import print_json
from fedbicross.settings import as_toml


def validate(
    config: Annotated[Path, typer.Argument(help="a TOML file")],
    case: Annotated[str | None, typer.Option(help="which [case.NAME] of a file that describes several runs")] = None,
    assign: Annotated[list[str] | None, typer.Option("--set", help="any setting: --set training.lr=0.01")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="check with the quick settings")] = False,
    json: Annotated[bool, typer.Option("--json", help="print the resolved configuration as JSON")] = False,
) -> None:
    """Check a configuration and print it fully resolved."""
    loaded = runs.config.load_config(config, None, assign or [], quick, case)
    if json:
        print_json(loaded.model_dump())
        return
    if loaded.client_models:
        print(f"# clients, in the order of their names: {', '.join(loaded.client_models)}, and so on from the start")
        print(f"# students of the server, and the pooled network: {loaded.model}")
    print(as_toml(loaded))
