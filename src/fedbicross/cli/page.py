"""`fedbicross client inspect`: a person looks at a file on a page of this machine, and says yes or no."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbicross import bundle, transport
from fedbicross.cli import describe_bundle
from fedbicross.cli.common import FEDERATION, FederationOption, JsonOption
from fedbicross.cli.show import print_json

if TYPE_CHECKING:
    from fedbicross.transport.federation_file import FederationFile

REFUSED = 1
MINUTES = 60.0  # until no answer counts as no
PortOption = Annotated[int, typer.Option(min=0, max=65535, help="of the page on this machine (0: any free one)")]


def inspect(
    file: Annotated[Path, typer.Argument(help="an upload or a reply")],
    federation: FederationOption = FEDERATION,
    port: PortOption = 0,
    wait: Annotated[float, typer.Option(min=0.01, help="minutes until no answer counts as no")] = MINUTES,
    json: JsonOption = False,
) -> None:
    """Look at an upload or a reply on a page of this machine, and decide. Ends with 1 if the answer is no."""
    there = federation.is_file() or federation != FEDERATION
    agreed = transport.files.load_federation(federation) if there else None
    allowed = ask(bundle.read_file(file), str(file), agreed, port, wait)
    if json:
        print_json({"file": str(file), "allowed": allowed})
    else:
        print(f"{file}: {'allowed' if allowed else 'not allowed'}")
    if not allowed:
        raise typer.Exit(REFUSED)


def ask(data: bytes, name: str, agreed: FederationFile | None, port: int = 0, minutes: float = MINUTES) -> bool:
    """Show these bytes on a page until somebody decides about them."""

    def tell(address: str) -> None:
        print(f"look at it in a browser on this machine: {address}", file=sys.stderr, flush=True)

    return transport.local_page.ask(view(data, name, agreed), port, 60 * minutes, tell)


def view(data: bytes, name: str, agreed: FederationFile | None) -> dict[str, Any]:
    """All that the page shows. A file that cannot be read is refused here, as everywhere."""
    header = bundle.inspect(data, bundle.REPLY)
    describe_bundle.check_readable(header)
    upload = header.kind == "upload"
    rows = dict(describe_bundle.words(data, header, agreed))
    checked = rows.pop("checked")
    leaves = "Beside your public key it is the only file that leaves this site."
    used = "It is the server's reply to this site. Your model will be made of it."
    whole = "signed by this site, of this run, and whole; it holds what the method needs and nothing else"
    return {
        "name": name,
        "title": "May this file leave?" if upload else "May this file be used?",
        "about": leaves if upload else used,
        "yes": "Yes, it may leave" if upload else "Yes, use it",
        "checked": checked if checked != "ok" else f"Checked: {whole if upload else 'signed by the server, whole'}.",
        "state": "good" if checked == "ok" else "unknown" if agreed is None else "bad",
        "rows": list(rows.items()),
        "tensors": describe_bundle.tensor_rows(data, header),
    }
