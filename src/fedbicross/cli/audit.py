"""`fedbicross audit`: what an upload gives away. Of a site before it leaves, or of a finished run's features."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedbicross import bundle, disclosure, runs, transport
from fedbicross.cli import common, site
from fedbicross.cli.show import print_json, progress
from fedbicross.errors import PolicyError

app = typer.Typer(help="What an upload gives away.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def upload(
    file: Annotated[Path, typer.Argument(help="the upload, before it is sent")],
    data: Annotated[str, typer.Option(help="the same images as in `client train`")],
    key: Annotated[Path, typer.Option(help="the site's private key, which signs the statement")],
    federation: common.FederationOption = common.FEDERATION,
    out: Annotated[Path | None, typer.Option(help="the statement (default: beside the upload, .audit.json)")] = None,
    policy: common.PolicyOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="minutes on two cores: a weaker attacker")] = False,
    shadows: Annotated[int | None, typer.Option(min=4, help="shadow networks, an even number")] = None,
    images: Annotated[int | None, typer.Option(min=20, help="of each kind, at most")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="of a shadow's training, at most")] = None,
    canaries: Annotated[int | None, typer.Option(min=20, help="images with wrong labels")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="of the inversion")] = None,
    work: common.WorkOption = common.WORK,
    device: common.DeviceOption = "auto",
    threads: common.ThreadsOption = None,
    json: common.JsonOption = False,
) -> None:
    """At a site: attack its own upload, and write a signed statement of what was found."""
    given = {"shadows": shadows, "images": images, "epochs": epochs, "canaries": canaries, "steps": steps}
    trying = disclosure.effort.effort(quick, **given)
    rules = disclosure.policy.policy_here(policy)
    agreed = transport.files.load_federation(federation)
    private = bundle.keys.load_private_key(key)
    who = common.owner(agreed, private, key)
    sent = bundle.read_file(file, bundle.UPLOAD)
    transport.files.verify_upload(agreed, sent)
    target = out or file.with_suffix(".audit.json")
    page = target.with_suffix(".html")
    common.check_new(target)
    common.check_new(page)
    common.set_threads(threads)
    here = site.Site(agreed, who, data, work, device)
    client, held_out, names = here.load_named()
    with progress() as shown:
        done = transport.files.audit_file(
            agreed,
            client,
            site.for_audit(here, held_out, names),
            private,
            sent,
            here.folder,
            shown,
            device=device,
            trying=trying,
            policy=rules,
        )
    common.write_new(page, done.html)
    common.write_new(target, done.json)
    lying = here.folder / f"{transport.site_audit.place(sent)}-private.json"
    if json:
        print_json({"path": str(target), "page": str(page), "private": str(lying), **done.body})
    else:
        _print(done, str(file))
        print(f"statement: {target} (signed), {page}; check it with `fedbicross audit verify {target}`")
        if done.memorised:
            print(f"known by heart: {len(done.memorised)} training images, named in {lying}; that file stays here")
    if done.reasons:
        raise PolicyError("policy_audit", f"the site's policy keeps this upload here: {'; '.join(done.reasons)}")


def _print(done: transport.files.Audited, file: str) -> None:
    rows = disclosure.statement.rows(done.body["found"])
    if rows:
        common.print_table(file, ("measure", "value (95 % interval)", "if nothing leaks"), rows)
    for line in done.body["not_covered"]:
        print(f"not covered: {line}")
    if not done.body["images"]["made_here"]:
        print("note: this upload was not made in this work folder; if these are other images, the audit says nothing")


@app.command()
def verify(
    statement: Annotated[Path, typer.Argument(help="the statement, .json")],
    federation: common.FederationOption = common.FEDERATION,
    key: Annotated[
        str | None, typer.Option(help="NAME=KEY of the site, in place of a federation file; KEY may be a .pub file")
    ] = None,
    file: Annotated[Path | None, typer.Option("--upload", help="the upload that it should be about")] = None,
    page: Annotated[Path | None, typer.Option(help="its page (default: the .html beside it, if there)")] = None,
    json: common.JsonOption = False,
) -> None:
    """Check who signed a statement, and that page and upload are the ones that it was made for."""
    limits = bundle.Limits(max_bytes=disclosure.statement.MAX_BYTES)
    if key is None:
        allowed = transport.files.load_federation(federation).clients
    else:
        name, _, text = key.partition("=")
        if not text:
            raise typer.BadParameter("--key is NAME=KEY")
        allowed = {name: common.read_public(text)}
    beside = statement.with_suffix(".html")
    shown = page or (beside if beside.is_file() else None)
    body = disclosure.statement.verify(
        bundle.read_file(statement, limits),
        allowed,
        page=None if shown is None else bundle.read_file(shown, limits),
        upload=None if file is None else bundle.read_file(file, bundle.UPLOAD),
    )
    if json:
        print_json(body)
        return
    print(f"{statement}: signed by {body['client']!r} on {body['made']}")
    print(f"page:   {shown or 'not given'}{'' if shown is None else ', as signed'}")
    digest = body["upload"]["sha256"]
    print(f"upload: SHA-256 {digest}{'' if file is None else f', which is {file}'}")
    if body["policy"] is None:
        print("policy: none was given")
    else:
        print(f"policy: {'; '.join(body['policy']['reasons']) or 'within it'}")


@app.command("run")
def run(
    folder: Annotated[Path, typer.Argument(help="the run's folder")],
    methods: Annotated[str | None, typer.Option(help="comma-separated; default: all with synthetic features")] = None,
    clients: Annotated[str | None, typer.Option(help="comma-separated; default: the one with most images")] = None,
    images: Annotated[int, typer.Option(min=2, help="images that the attacker tries to rebuild")] = 200,
    pixels: Annotated[int, typer.Option(min=8, max=512, help="per side of what he rebuilds")] = 32,
    epochs: Annotated[int, typer.Option(min=1, help="of the attacker's training")] = 100,
    json: Annotated[bool, typer.Option("--json", help="print audit.json instead of the table")] = False,
) -> None:
    """Of a finished run: distance of synthetic features to real ones, a reconstruction attack with controls, costs."""
    given = [[part.strip() for part in (text or "").split(",") if part.strip()] for text in (methods, clients)]
    settings = disclosure.tokens.AuditSettings(images=images, pixels=pixels, epochs=epochs)
    with progress() as shown:
        results = runs.audit.audit(folder, given[0], given[1], settings, shown)
    if json:
        print_json(results)
        return
    for row in runs.audit.table(results):
        for title, cell in zip(runs.audit.HEADER, row, strict=True):
            print(f"{title:>30}  {cell}")
        print()
    print(f"written: {folder / 'audit.json'}, {folder / 'tables' / 'audit.md'}, {folder / 'audit'}/*.png")
