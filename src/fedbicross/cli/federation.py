"""`fedbicross federation`: write down what all sites agree on, and read it back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fedbicross import bundle, runs, transport
from fedbicross.cli import completion
from fedbicross.cli.common import FEDERATION, JsonOption, check_new, keygen, print_table, read_public, write_new
from fedbicross.cli.show import print_json
from fedbicross.errors import ConfigError

SERVER_KEY = Path("server.key")
app = typer.Typer(help="Set up a federation of real sites.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def init(
    classes: Annotated[str, typer.Option(help="class names, comma-separated, in the order of the outputs")],
    server: Annotated[str | None, typer.Option(help="the server's public key, or its .pub file")] = None,
    client: Annotated[
        list[str] | None, typer.Option(help="NAME=KEY for each site; KEY is a public key or a .pub file")
    ] = None,
    post: Annotated[
        Path | None,
        typer.Option(help="the folder that travels: its NAME.pub are the sites, and the file goes there too"),
    ] = None,
    out: Annotated[Path, typer.Option(help="the file to write")] = FEDERATION,
    run_id: Annotated[str | None, typer.Option(help="name of this run (default: a random one)")] = None,
    image_size: Annotated[int, typer.Option(help="pixels per side")] = 28,
    channels: Annotated[int, typer.Option(help="1: grey, 3: RGB")] = 3,
    model: Annotated[
        str | None, typer.Option(help="architecture (default resnet18)", autocompletion=completion.models)
    ] = None,
    method: Annotated[str, typer.Option(help="name or name:variant", autocompletion=completion.methods)] = "fedbicross",
    epochs: Annotated[int | None, typer.Option(help="local epochs (default 100)")] = None,
    seed: Annotated[int, typer.Option(help="of every random stream")] = 0,
    quorum: Annotated[int | None, typer.Option(help="uploads that the server waits for (default: all)")] = None,
    purpose: Annotated[str | None, typer.Option(help="what the models may be used for, in a line")] = None,
    expires: Annotated[str | None, typer.Option(help="last day of this agreement, YYYY-MM-DD (default: none)")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="small settings for a rehearsal")] = False,
    assign: Annotated[list[str] | None, typer.Option("--set", help="any setting: --set training.lr=0.01")] = None,
    json: JsonOption = False,
) -> None:
    """Write federation.toml, to be given to every site."""
    if post is not None:
        transport.post.Post(post).require()
    sites = _sites(client or [], post)
    key = _server_key(post) if server is None else read_public(server)
    values: dict[str, Any] = {key: runs.config.QUICK[key] for key in ("model", "training")} if quick else {}
    given = {
        "model": model,
        "run_id": run_id,
        "quorum": quorum,
        "purpose": purpose,
        "expires": expires,
        "training": {} if epochs is None else {"epochs": epochs},
    }
    values = runs.config.merge(values, {key: value for key, value in given.items() if value not in (None, {})})
    for text in assign or []:
        values = runs.config.merge(values, runs.config.parse_assignment(text))
    fixed = {"image_size": image_size, "channels": channels, "method": method, "seed": seed, "quick": quick}
    federation = transport.federation_file.new_federation(
        classes=[name.strip() for name in classes.split(",") if name.strip()],
        server=key,
        clients=sites,
        **{**fixed, **values},
    )
    content = transport.federation_file.federation_text(federation).encode()
    targets = [out] if post is None else [out, transport.post.Post(post).federation]
    for target in targets:
        check_new(target, content)
    for target in targets:
        write_new(target, content)
    if json:
        print_json({"path": str(out), "run_id": federation.run_id, "fingerprint": federation.fingerprint})
        return
    print(f"{out}: run {federation.run_id}, {len(sites)} sites, {federation.method}")
    print(f"fingerprint: {federation.fingerprint}")
    for name, text in sites.items():
        print(f"  {name}: {bundle.keys.fingerprint(text)}")
    where = "Give this file to every site" if post is None else f"It is in {post}, too, for every site"
    print(f"{where}; each compares the fingerprint with you by telephone before it trains.")


def _sites(given: list[str], post: Path | None) -> dict[str, str]:
    """Names and public keys: as given, else those that lie in the folder that travels."""
    sites: dict[str, str] = {}
    for text in given:
        name, sign, key = text.partition("=")
        if not sign or not name.strip():
            raise ConfigError("bad_client", f"--client {text!r}: expected NAME=KEY")
        if name.strip() in sites:
            raise ConfigError("bad_client", f"--client: {name.strip()!r} is named twice")
        sites[name.strip()] = read_public(key)
    if not sites and post is not None:
        sites = transport.post.Post(post).public_keys()
    if not sites:
        raise ConfigError("clients", "no sites: name them with --client NAME=KEY, or --post a folder with their keys")
    return sites


def _server_key(post: Path | None) -> str:
    """The server's public key; with a folder that travels its pair is made here, as that of a site is."""
    if post is None:
        raise ConfigError("no_key", "--server is missing: the server's public key, or its .pub file")
    if not SERVER_KEY.exists():
        keygen(SERVER_KEY, as_json=False, to=sys.stderr)
    return bundle.keys.public_text(bundle.keys.load_private_key(SERVER_KEY))


@app.command()
def status(
    post: Annotated[Path, typer.Option(help="the folder that travels: keys, agreement, uploads and replies")],
    json: JsonOption = False,
) -> None:
    """Say how far a federation has come and whose turn it is, by the files in a folder; none of them is used."""
    found = transport.post.status(transport.post.Post(post))
    if json:
        print_json(found)
        return
    title = "no agreement yet" if found["run"] is None else f"run {found['run']}, quorum {found['quorum']}"
    columns = ("site", "key", "upload", "reply")
    print_table(title, columns, [[row[column] for column in columns] for row in found["sites"]])
    print(f"next: {found['next']}")


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="the federation file")] = FEDERATION,
    json: JsonOption = False,
) -> None:
    """Check a federation file and say in words what was agreed."""
    federation = transport.federation_file.load_federation(file)
    method = federation.build()
    if json:
        resolved = {**federation.model_dump(), "settings": method.config.model_dump()}
        print_json(
            {
                **resolved,
                "fingerprint": federation.fingerprint,
                "run": federation.run,
                "leaves": method.leaves(federation.training),
            }
        )
        return
    counts = federation.class_counts
    small = (
        f"counts below {counts.smallest}: {counts.below.replace('_', ' ')}" if counts.smallest else "sent as they are"
    )
    rows = [
        ("fingerprint", federation.fingerprint),
        ("run", federation.run),
        ("classes", ", ".join(federation.classes)),
        ("images", f"{federation.image_size} px, {federation.channels} channel(s)"),
        ("model", federation.model),
        ("method", f"{federation.method}: {method.summary}"),
        ("training", f"{federation.training.recipe} recipe, {federation.training.as_trained.epochs} epochs"),
        ("what leaves", method.leaves(federation.training)),
        ("class counts", small if counts.send else "never leave"),
        ("held out", f"{federation.hold_out:.0%} of the patients, where a site names no test images"),
        ("purpose", federation.purpose or "not written down"),
        ("last day", federation.expires or "none"),
        ("quorum", f"{federation.quorum} of {len(federation.clients)}"),
        ("server", bundle.keys.fingerprint(federation.server)),
        *((f"site {name}", bundle.keys.fingerprint(key)) for name, key in federation.clients.items()),
    ]
    print_table(str(file), ("agreed", "value"), rows)
