"""`fedbicross client join`: a hospital's whole way, one command that is given again whenever it is its turn.

Keys, agreement, check of the images, training, upload; then the reply, the model, and whether taking part helped.
Everything passes through one folder (`transport.post`). What is done is not done again, so that the command can be
stopped anywhere. Two things a person has to say: the fingerprint heard on the telephone, and that the file may leave.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbicross import bundle, deploy, disclosure, transport
from fedbicross.cli import common, describe_bundle, page, site
from fedbicross.errors import ConfigError, RunError
from fedbicross.methods.base import RECEIVES

if TYPE_CHECKING:
    from fedbicross.transport.federation_file import FederationFile
    from fedbicross.transport.post import Post

PostOption = Annotated[
    Path, typer.Option(help="the folder that travels: public keys, agreement, uploads and replies (a memory stick)")
]
FEDERATION = common.FEDERATION


def join(
    post: PostOption,
    data: Annotated[str, typer.Option(help="folder of class folders, CSV manifest or .npz file")],
    name: Annotated[str | None, typer.Option(help="the site's name (default: that of the only .key file here)")] = None,
    out: Annotated[Path, typer.Option(help="folder of the final model")] = Path("model"),
    fingerprint: Annotated[
        str | None, typer.Option(help="of the agreement, as the server's people read it to you on the telephone")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="the upload may leave: do not ask")] = False,
    on_page: Annotated[bool, typer.Option("--page", help="ask on a page of this machine, not in the terminal")] = False,
    port: page.PortOption = 0,
    accept: common.AcceptOption = None,
    policy: common.PolicyOption = None,
    work: common.WorkOption = common.WORK,
    device: common.DeviceOption = "auto",
    threads: common.ThreadsOption = None,
) -> None:
    """A site's whole way: give the same command again at every turn; it does what can be done and says what is next."""
    rules = disclosure.policy.policy_here(policy)
    travel = transport.post.Post(post)
    travel.require()
    who = name or _only_key()
    _make_key(travel, who)
    agreed = _agree(travel, fingerprint)
    if agreed is None:
        print("next: the server writes the agreement; then give this command again")
        return
    key = bundle.keys.load_private_key(_key_file(who))
    transport.files.check_key(agreed, who, key)
    common.set_threads(threads)
    here = site.Site(agreed, who, data, work, device)
    if out.exists():
        if deploy.folder.read_settings(out)["origin"].get("run") != agreed.run:
            raise RunError("exists", f"{out} holds the model of another run; choose another --out")
        deploy.folder.load_model(out)  # whatever is wrong with it is said
        print(f"finished: {out} (read {out / deploy.folder.CARD} before you use it)")
        return
    reply = travel.reply(who)
    if not reply.exists() and not reply.is_symlink():
        upload = site.train(here, key, accept or [], rules)
        _send(travel, who, upload, agreed, yes, on_page, port)
        print("next: the server fuses; then give this command again")
        return
    received = bundle.read_file(reply)
    transport.files.open_reply(agreed, received, who)
    if on_page and not page.ask(received, str(reply), agreed, port):
        raise RunError("not_allowed", f"{reply} was not allowed to be used; no model was made")
    scores = site.finish(here, received, out)
    site.print_scores(f"{who}: on images that were held out", scores)
    print(f"finished: {out} (read {out / deploy.folder.CARD} before you use it)")


def _key_file(name: str) -> Path:
    return Path(f"{name}.key")


def _only_key() -> str:
    found = sorted(path.stem for path in Path().glob("*.key"))
    if len(found) != 1:
        there = f"several keys are here: {', '.join(found)}" if found else "no key is here yet"
        raise ConfigError("which_site", f"{there}; say who you are with --name")
    return found[0]


def _make_key(post: Post, name: str) -> None:
    """The site's key pair, and its public half in the folder that travels."""
    if transport.files.file_name(name) != name:
        raise ConfigError("client_name", f"--name {name!r}: letters, digits, . _ and - only, at most 64")
    private = _key_file(name)
    if not private.exists():
        common.keygen(private, as_json=False)
    public = bundle.keys.public_text(bundle.keys.load_private_key(private))
    there = post.public_key(name)
    if there.exists() and transport.post.read_public_key(there) != public:
        raise ConfigError("other_key", f"{there} is another key: this name is taken, or your own key was made anew")
    common.write_new(there, f"{public}\n".encode())


def _agree(post: Post, fingerprint: str | None) -> FederationFile | None:
    """The agreement: the one that was compared here before, or the one that arrived, once it is compared."""
    if FEDERATION.exists():
        agreed = transport.files.load_federation(FEDERATION)
        if post.federation.is_file():
            arrived = transport.files.load_federation(post.federation)
            if arrived.fingerprint != agreed.fingerprint:
                raise ConfigError(
                    "other_agreement", f"{post.federation} is not the agreement in {FEDERATION}; ask which one is right"
                )
        return agreed
    if not post.federation.exists():
        return None
    agreed = transport.files.load_federation(post.federation)
    print(f"agreement: run {agreed.run_id}, {agreed.method}, {len(agreed.clients)} sites")
    print(f"classes:   {', '.join(agreed.classes)}")
    method = agreed.build()
    print(f"leaves:    {method.leaves(agreed.training)}")
    print(f"others:    {RECEIVES[method.others_receive]}")
    if fingerprint is None:
        if not sys.stdin.isatty():
            raise ConfigError(
                "not_compared", "call the server's people and let them read the fingerprint to you: --fingerprint '…'"
            )
        fingerprint = typer.prompt("fingerprint, as it is read to you on the telephone")
    if _digits(fingerprint) != _digits(agreed.fingerprint):
        raise ConfigError(
            "fingerprint", f"{post.federation} has another fingerprint: a slip, or somebody changed it on the way"
        )
    common.write_new(FEDERATION, transport.files.federation_text(agreed).encode())
    return agreed


def _digits(text: str) -> str:
    return "".join(sign for sign in text.lower() if sign in "0123456789abcdef")


def _send(post: Post, name: str, upload: bytes, agreed: FederationFile, yes: bool, on_page: bool, port: int) -> None:
    """Put the upload into the folder that travels, once a person has said that it may leave."""
    own, target = Path(f"{name}.safetensors"), post.upload(name)
    common.write_new(own, upload)
    if target.is_file() and bundle.read_file(target, bundle.UPLOAD) == upload:
        print(f"sent:      {target}")
        return
    if on_page:
        allowed = page.ask(upload, str(own), agreed, port)
    else:
        header = bundle.inspect(upload, bundle.UPLOAD)
        common.print_table(str(own), ("what leaves", "content"), describe_bundle.words(upload, header, agreed))
        if not yes and not sys.stdin.isatty():
            raise ConfigError("not_allowed", f"look at {own}; if it may leave, give the same command with --yes")
        allowed = yes or typer.confirm("may this file leave?")
    if not allowed:
        raise RunError("not_allowed", f"{own} was not allowed to leave; nothing was put into {post.folder}")
    common.write_new(target, upload)
    print(f"sent:      {target}, {len(upload):,} bytes")
