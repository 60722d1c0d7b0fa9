"""`fedbicross client`: what a hospital does. Keys, training, and a look at what leaves; the rest is in client_model."""

from __future__ import annotations

import hashlib
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbicross import bundle, transport
from fedbicross.cli import client_model, exchange
from fedbicross.cli.exchange import (
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
    site_work,
    verdict,
    write_new,
)
from fedbicross.cli.show import print_json, progress
from fedbicross.errors import ConfigError, FedBiCrossError, UploadError

if TYPE_CHECKING:
    from fedbicross.bundle import Header
    from fedbicross.transport.federation_file import FederationFile

app = typer.Typer(help="What a hospital does: train, send, receive, use.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def keygen(
    out: Annotated[Path, typer.Option(help="file of the private key; the public one gets the ending .pub")],
    json: JsonOption = False,
) -> None:
    """Make the site's key pair."""
    exchange.keygen(out, json)


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
        print_json({"path": str(target), "client": site, "run": agreed.run, **_facts(sent)})
        return
    print(f"{target}: {len(sent):,} bytes, ready to be handed to the server of run {agreed.run_id}")
    print(f"what leaves: {agreed.build().leaves}")
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
    _check_readable(header)
    there = federation.is_file() or federation != FEDERATION
    agreed = transport.files.load_federation(federation) if there else None
    if json:
        print_json({**_facts(data), **_described(header), "checked": _verdict(data, header, agreed)})
        return
    print_table(str(file), ("what", "content"), _words(data, header, agreed))
    if tensors:
        rows = [
            (name, info.dtype, " × ".join(map(str, info.shape)) or "one number", f"{info.end - info.start:,}")
            for name, info in header.tensors.items()
        ]
        print_table("tensors", ("name", "type", "shape", "bytes"), rows)


app.command()(client_model.personalize)
app.command()(client_model.predict)
app.command()(client_model.evaluate)


def _facts(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _check_readable(header: Header) -> None:
    """Only an upload or a reply can be put into words, and only one whose manifest has the fields of its kind."""
    if header.kind not in transport.files.MANIFESTS:
        raise UploadError("wrong_kind", f"a bundle of kind {header.kind[:32]!r} is neither an upload nor a reply")
    bundle.validate.read_manifest(transport.files.MANIFESTS[header.kind], header.manifest)


def _described(header: Header) -> dict[str, Any]:
    sizes = {name: info.end - info.start for name, info in header.tensors.items()}
    return {"kind": header.kind, "manifest": header.manifest, "signer": header.signer, "tensors": sizes}


def _verdict(data: bytes, header: Header, agreed: FederationFile | None) -> str:
    """What the receiver of this file would say of it."""
    if agreed is None:
        return "not checked: no federation file given"
    try:
        if header.kind == "upload":
            transport.files.verify_upload(agreed, data)
        else:
            transport.files.open_reply(agreed, data, str(header.manifest.get("client")))
    except FedBiCrossError as error:
        return verdict(error)
    return "ok"


def _words(data: bytes, header: Header, agreed: FederationFile | None) -> list[tuple[str, str]]:
    """The file line by line, for somebody who has to sign that it may leave."""
    manifest = header.manifest
    try:
        signer = "nobody" if header.signer is None else bundle.keys.fingerprint(header.signer)
    except ConfigError:
        signer = "no readable key"
    rows = [("kind", header.kind), ("bytes", f"{len(data):,}"), ("SHA-256", str(_facts(data)["sha256"]))]
    rows += [("run", str(manifest.get("run_id"))), ("signed by the key", signer)]
    rows += [("from" if header.kind == "upload" else "to", str(manifest.get("client")))]
    rows += _networks(header)
    if header.kind == "upload":
        rows += [("images per class", _counts(manifest)), ("number of images", _plain(manifest.get("num_samples")))]
        rows += [("further numbers and words", _plain(manifest.get("extra")))]
    else:
        rows += [("further numbers and words", _plain(manifest.get("info")))]
    if agreed is not None:
        rows += [("the method says", agreed.build().leaves if header.kind == "upload" else "a reply of the server")]
    return [*rows, ("checked", _verdict(data, header, agreed))]


def _networks(header: Header) -> list[tuple[str, str]]:
    """Which tensors are the weights of a network, which its statistics, and which are something else."""

    def weigh(names: list[str]) -> str:
        count, total = len(names), sum(header.tensors[n].end - header.tensors[n].start for n in names)
        return f"{count} tensor(s), {total:,} bytes"

    if header.kind != "upload":
        return [("tensors", weigh(list(header.tensors)))]
    task = header.manifest["task"]
    try:
        network = bundle.validate.model_tensors(
            task["model"], task["channels"], len(task["classes"]), task["image_size"]
        )
    except UploadError:
        network = {}
    # Not by its name alone: a tensor of another shape could hold anything.
    part = {name for name, info in header.tensors.items() if network.get(name, (0, 0))[1] == info.shape}
    rest = [name for name in header.tensors if name not in part]
    weights = [name for name in header.tensors if name in part and not _statistic(name)]
    statistics = [name for name in header.tensors if name in part and _statistic(name)]
    return [
        (f"weights of a {task['model']}", weigh(weights)),
        ("means and variances of its features on the site's images", weigh(statistics)),
        ("tensors that are no part of the network", f"{weigh(rest)}: {', '.join(rest)}" if rest else "none"),
    ]


def _statistic(name: str) -> bool:
    return name.endswith(("running_mean", "running_var", "num_batches_tracked"))


def _counts(manifest: dict[str, Any]) -> str:
    counts = manifest["class_counts"]
    if counts is None:
        return "not in the file"
    return ", ".join(f"{name}: {count}" for name, count in zip_longest(manifest["task"]["classes"], counts))


def _plain(value: object) -> str:
    return "not in the file" if value in (None, {}, []) else str(value)
