"""`fedbicross flower`: the same files over a network, on Flower."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedbicross import disclosure
from fedbicross.cli import common
from fedbicross.cli.show import print_json
from fedbicross.errors import RunError
from fedbicross.transport import flower

app = typer.Typer(
    help="Carry uploads and replies over a network with Flower.", no_args_is_help=True, rich_markup_mode=None
)


@app.command()
def certificates(
    host: Annotated[
        list[str], typer.Option(help="name or address by which sites reach the server; repeat for several")
    ],
    out: Annotated[Path, typer.Option(help="folder for ca.crt, server.crt and server.key")] = Path("certificates"),
) -> None:
    """At the server: make the certificates for TLS. Sites get ca.crt only."""
    flower.certificates.make_certificates(out, host)
    print(f"{out}: give {flower.certificates.CA} to every site, keep the rest")


@app.command("node-key")
def node_key(
    out: Annotated[Path, typer.Option(help="the private file; .pub is put beside it")] = Path("node.key"),
) -> None:
    """At a site: make the key by which its node is let in."""
    flower.certificates.make_node_key(out)
    print(f"{out}: keep it; send {out}.pub to the server")


@app.command()
def up(
    key: Annotated[Path, typer.Option(help="the server's private key, which signs the replies")],
    federation: common.FederationOption = common.FEDERATION,
    certificates: Annotated[Path, typer.Option(help="folder made by `flower certificates`")] = Path("certificates"),
    work: common.WorkOption = common.WORK,
    host: Annotated[str, typer.Option(help="address to listen on; 0.0.0.0 for all")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="the only port that sites need to reach")] = 8000,
    device: common.DeviceOption = "auto",
    node_megabytes: Annotated[
        int, typer.Option(min=1, help="most that one site's node may bring in one run; more is refused unread")
    ] = 256,
) -> None:
    """At the server: start the SuperLink behind a gate that lets only nodes in, and stay; Ctrl-C ends it."""
    settings = flower.settings.server_settings(federation=federation, key=key, work=work, device=device)
    with flower.deploy.listen(host, port) as listener:
        link, beside = flower.deploy.superlink(settings, certificates, listener, node_megabytes << 20, _say)
        flower.deploy.compact(work)
        flower.supervise.stay(link, beside, _say)


@app.command()
def admit(
    public_key: Annotated[Path, typer.Argument(help="a site's node key (.pub)")],
    name: Annotated[str, typer.Option(help="the site's name in the federation file")],
    work: common.WorkOption = common.WORK,
) -> None:
    """At the server: let a site's node in."""
    flower.deploy.register(work, public_key, name)
    print(f"{name} may connect")


@app.command()
def join(
    server: Annotated[str, typer.Option(help="HOST:PORT of the SuperLink")],
    key: Annotated[Path, typer.Option(help="the site's private key, which signs its upload")],
    data: Annotated[Path, typer.Option(help="the site's images: folder, CSV manifest or .npz")],
    ca: Annotated[Path, typer.Option(help="ca.crt of the server")] = Path("ca.crt"),
    node_key: Annotated[Path, typer.Option(help="key made by `flower node-key`")] = Path("node.key"),
    federation: common.FederationOption = common.FEDERATION,
    accept: common.AcceptOption = None,
    policy: common.PolicyOption = None,
    work: common.WorkOption = common.WORK,
    device: common.DeviceOption = "auto",
) -> None:
    """At a site: start the SuperNode and stay; it answers when the server asks."""
    rules = policy or (disclosure.policy.FILE if disclosure.policy.policy_here(policy) else None)
    places: dict[str, str | Path] = {"federation": federation, "key": key, "work": work, "data": data}
    if rules is not None:
        disclosure.policy.load_policy(rules)  # a mistake is named here, where somebody reads it
        places["policy"] = rules
    settings = flower.settings.site_settings(**places, device=device, accept=",".join(accept or []))
    if flower.deploy.lock_is_void():
        typer.echo("note: as root the app folder cannot be closed; start the node as a user of its own", err=True)
    flower.deploy.supernode(settings, server, ca, node_key, _say).become()


@app.command()
def run(
    work: common.WorkOption = common.WORK,
    deadline_hours: Annotated[float, typer.Option(help="the run ends after this, whoever is missing")] = 72.0,
    grace_hours: Annotated[float, typer.Option(help="with the quorum there: how long the rest is waited for")] = 24.0,
    quorum: common.QuorumOption = None,
    hold_on_notes: common.HoldOption = False,
    trust: common.TrustOption = None,
    without: Annotated[
        list[str] | None, typer.Option("--without", help="a site that takes no part in this run; repeatable")
    ] = None,
    json: common.JsonOption = False,
) -> None:
    """At the server: ask the sites, fuse, deliver, and say who got what. The same command again goes on."""
    chosen = {"deadline_seconds": deadline_hours * 3600, "grace_seconds": grace_hours * 3600}
    options = flower.settings.RunOptions.from_run_config(
        {**chosen, "quorum": quorum or 0, "hold_on_notes": hold_on_notes}
    )
    summary = flower.deploy.run(work, options, _say, trust or (), without or ())
    if json:
        print_json(summary)
    else:
        _print(summary)
    if summary["undelivered"]:
        waiting = ", ".join(summary["undelivered"])
        raise RunError("undelivered", f"replies wait here for {waiting}; the same command again brings them")


def _print(summary: dict[str, Any]) -> None:
    for site, state in sorted(summary["delivered"].items()):
        print(f"{site}: {state.replace('_', ' ')}")
    for site, code in sorted(summary["unusable"].items()):
        print(f"{site}: upload cannot be used ({code})")
    for label, words in (
        ("missing", "no upload"),
        ("late", "upload came too late"),
        ("undelivered", "reply waits here"),
    ):
        for site in summary[label]:
            declined = summary["declined"].get(site) if label == "missing" else None
            print(f"{site}: {words}" + (f"; its own policy refuses ({declined})" if declined else ""))


def _say(line: str) -> None:
    typer.echo(line, err=True)
