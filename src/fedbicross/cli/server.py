"""`fedbicross server`: what the server does. It never sees an image."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbicross import bundle, transport
from fedbicross.cli import common
from fedbicross.cli.run import Engine
from fedbicross.cli.show import print_json, progress
from fedbicross.errors import ConfigError, UploadError

if TYPE_CHECKING:
    from fedbicross.transport.federation_file import FederationFile
    from fedbicross.transport.files import Received

app = typer.Typer(help="What the server does: check uploads, fuse them.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def keygen(
    out: Annotated[Path, typer.Option(help="file of the private key; the public one gets the ending .pub")],
    json: common.JsonOption = False,
) -> None:
    """Make the server's key pair."""
    common.keygen(out, json)


@app.command()
def verify(
    files: Annotated[list[Path], typer.Argument(help="uploads, or folders of them")],
    federation: common.FederationOption = common.FEDERATION,
    json: common.JsonOption = False,
) -> None:
    """Check uploads as `fuse` would and use none; ends with 5 if any is refused."""
    agreed = transport.files.load_federation(federation)
    paths, ignored = _uploads(files)
    rows: list[dict[str, Any]] = []
    for path, client, error in transport.files.verify_files(agreed, paths):
        row = {"file": str(path), "client": client, "ok": error is None}
        rows.append({**row, "code": error.code if error else None, "verdict": common.verdict(error)})
    good = {row["client"] for row in rows if row["ok"]}
    missing = [name for name in agreed.clients if name not in good]
    if json:
        print_json({"files": rows, "missing": missing, "ignored": ignored, "quorum": agreed.quorum})
    else:
        shown = [(row["file"], row["client"] or "?", row["verdict"]) for row in rows]
        common.print_table(f"uploads to run {agreed.run_id}", ("file", "client", "verdict"), shown)
        absent = ", ".join(missing) or "none"
        print(f"{len(good)} of {len(agreed.clients)} sites, quorum {agreed.quorum}; missing: {absent}")
        for line in ignored:
            print(f"not looked at: {line}")
    if not all(row["ok"] for row in rows) or not rows:
        raise typer.Exit(UploadError.exit_status)


@app.command()
def fuse(
    uploads: Annotated[list[Path], typer.Argument(help="the folder of uploads, or the files")],
    key: Annotated[Path, typer.Option(help="the server's private key")],
    out: Annotated[Path, typer.Option(help="folder for the replies, one file a site")] = Path("replies"),
    federation: common.FederationOption = common.FEDERATION,
    quorum: common.QuorumOption = None,
    work: common.WorkOption = common.WORK,
    device: common.DeviceOption = "auto",
    threads: common.ThreadsOption = None,
    engine: Annotated[Engine, typer.Option(help="local, or ray: trajectories made by its workers")] = Engine.local,
    workers: Annotated[int | None, typer.Option(min=1, help="of --engine ray (default: one a GPU, or as fit)")] = None,
    hold_on_notes: common.HoldOption = False,
    trust: common.TrustOption = None,
    json: common.JsonOption = False,
) -> None:
    """Fuse the uploads and write one signed reply for each site; the same command again goes on after a kill."""
    if workers is not None and engine is Engine.local:
        raise ConfigError("engine", "--workers is for --engine ray")
    agreed = transport.files.load_federation(federation)
    private = bundle.keys.load_private_key(key)
    paths, ignored = _uploads(uploads)
    common.set_threads(threads)
    with progress() as shown:
        for line in ignored:
            shown.say(f"not looked at: {line}")
        received = transport.files.receive(agreed, {str(path): path for path in paths})
        folder = common.server_work(work, agreed)
        options: dict[str, Any] = {"quorum": quorum, "device": device, "engine": engine.value, "workers": workers}
        options |= {"hold_on_notes": hold_on_notes, "trust": trust or ()}
        replies = transport.files.fuse_received(agreed, received, folder, private, shown, **options)
    targets = {name: out / f"{transport.files.file_name(name)}.safetensors" for name in replies}
    for name, target in targets.items():  # all or none
        common.check_new(target, replies[name])
    for name, target in targets.items():
        common.write_new(target, replies[name])
    rows = _fates(agreed, received, {name: str(target) for name, target in targets.items()})
    log = folder / transport.files.AUDIT
    last = bundle.audit.verify(log).last
    if json:
        facts = {"sites": rows, "refused": _refused(received), "ignored": ignored}
        print_json({**facts, "audit": str(log), "audit_last": last})
        return
    common.print_table(f"run {agreed.run_id}", ("site", "upload", "reply"), [list(row.values()) for row in rows])
    if received.refused:
        common.print_table("refused", ("file", "why"), [(row["file"], row["why"]) for row in _refused(received)])
    print(f"audit log: {log}\n  ends with {last} (write it down: it shows later whether lines are missing)")


@app.command("audit")
def check_log(
    log: Annotated[Path, typer.Argument(help="the audit.jsonl of a server's work folder")],
    last: Annotated[
        str | None, typer.Option(help="the digest that `fuse` printed: shows whether lines are missing")
    ] = None,
    json: common.JsonOption = False,
) -> None:
    """Check the server's log: no line changed, removed or moved; with --last none missing at the end."""
    chain = bundle.audit.verify(log, last)
    if json:
        print_json(chain._asdict())
        return
    print(f"{log}: {chain.entries:,} entries, none changed, removed or moved\n  ends with {chain.last}")
    if last is None:
        print("whether lines are missing at the end shows only with --last and the digest that `fuse` printed")


def _uploads(given: list[Path]) -> tuple[list[Path], list[str]]:
    """The files to look at, and a line about everything else that lies in the folders."""
    paths: list[Path] = []
    ignored: list[str] = []
    for path in given:
        if path.is_dir():
            found = bundle.list_bundles(path)
            paths += found.bundles
            ignored += found.ignored
        else:
            paths.append(path)
    return list(dict.fromkeys(paths)), ignored


def _fates(agreed: FederationFile, received: Received, replies: dict[str, str]) -> list[dict[str, str]]:
    """The outcome for each site."""
    rows = []
    for name in agreed.clients:
        upload = received.sources.get(name, "kept from before" if name in replies else "missing")
        reply = replies.get(name, "none: it came too late" if name in received.uploads else "none")
        rows.append({"site": name, "upload": upload, "reply": reply})
    return rows


def _refused(received: Received) -> list[dict[str, str]]:
    return [
        {"file": source, "code": entry.error.code, "why": common.verdict(entry.error)}
        for source, entry in received.refused.items()
    ]
