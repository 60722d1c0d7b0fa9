"""What the verbs of `federation`, `client` and `server` share: options, folders, keys and tables."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedbicross import bundle, transport
from fedbicross.atomic import write_atomic
from fedbicross.cli.show import print_json
from fedbicross.errors import ConfigError, FedBiCrossError, RunError, UploadError, printable
from fedbicross.lazy_torch import torch

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from fedbicross.transport.federation_file import FederationFile

FederationOption = Annotated[Path, typer.Option("--federation", help="the file that all sites agreed on")]
WorkOption = Annotated[Path, typer.Option(help="where unfinished and private work is kept, by run")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or mps")]
ThreadsOption = Annotated[int | None, typer.Option(min=1, max=1024, help="CPU threads (default: torch's choice)")]
QuorumOption = Annotated[int | None, typer.Option(min=1, help="fuse with so few uploads (default: as agreed)")]
HoldOption = Annotated[
    bool, typer.Option("--hold-on-notes", help="begin nothing while an upload sticks out; a person decides")
]
TrustOption = Annotated[
    list[str] | None,
    typer.Option("--trust", help="a site whose upload is used as it is, whatever sticks out; repeatable"),
]
AcceptOption = Annotated[
    list[str] | None, typer.Option("--accept", help="go on in spite of this finding of `fedbicross check`, by code")
]
PolicyOption = Annotated[
    Path | None,
    typer.Option("--policy", help="the site's rules on what may leave (default: policy.toml, if it is here)"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="for programs")]

FEDERATION = Path("federation.toml")
WORK = Path("fedbicross-work")


def site_work(work: Path, federation: FederationFile, name: str) -> Path:
    """Where a site keeps its work for this run."""
    return work / federation.run_id / "clients" / transport.files.file_name(name)


def server_work(work: Path, federation: FederationFile) -> Path:
    """Where the server keeps its work for this run."""
    return work / federation.run_id / "server"


def set_threads(threads: int | None) -> None:
    """Fix torch's threads, if asked to."""
    if threads is not None:
        torch.set_num_threads(threads)


def keygen(out: Path, as_json: bool, to: TextIO | None = None) -> None:
    """Make a key pair: the private file for its owner only, and the public text beside it."""
    public = out.with_name(f"{out.stem}.pub")
    if out.suffix.lower() == ".pub":  # or the private key would lie where everybody looks for the public one
        raise ConfigError("key_name", f"{out} is the name of a public key; name the private one, e.g. {out.stem}.key")
    if public.exists() or public.is_symlink():
        raise ConfigError("key_exists", f"{public} exists; a key is never overwritten: choose another name")
    half = out.is_file()  # a kill came between the two files: the pair is completed
    key = bundle.keys.load_private_key(out) if half else bundle.keys.generate_key()
    if not half:
        bundle.keys.save_private_key(out, key)
    text = bundle.keys.public_text(key)
    fingerprint = bundle.keys.fingerprint(text)
    try:
        write_new(public, f"{text}\n".encode())
    except RunError:
        if not half:
            out.unlink()  # half a pair is of no use
        raise
    if as_json:
        print_json({"private": str(out), "public": str(public), "key": text, "fingerprint": fingerprint})
        return
    was_there = "; it was there already" if half else ""
    print(f"private key: {out} (never give it away, never copy it to another machine{was_there})", file=to)
    print(f"public key:  {public}\n  {text}\n  fingerprint {fingerprint} (read it out when you hand it over)", file=to)


def read_public(value: str) -> str:
    """A public key given as text, or as the path of a ``.pub`` file."""
    text = value.strip()
    if not text.startswith(bundle.keys.PREFIX):
        try:
            found = bundle.read_file(text, bundle.Limits(max_bytes=bundle.keys.MAX_KEY_FILE))
            text = found.decode("ascii", "replace").strip()
        except UploadError as error:
            problem = f"{value!r} is neither a public key nor a .pub file that can be read"
            raise ConfigError("no_key", f"{problem} ({error.args[0]})") from None
    bundle.keys.parse_public(text)
    return text


def write_new(path: Path, data: bytes) -> None:
    """Write a file all at once; one with other content is never replaced."""
    check_new(path, data)
    try:
        write_atomic(path, data)
    except OSError as error:
        raise RunError("cannot_write", f"cannot write {path}: {error.strerror or error}") from None


def check_new(path: Path, data: bytes | None = None) -> None:
    """Refuse to replace anything but the same bytes."""
    if path.is_file() and data is not None and path.stat().st_size == len(data) and path.read_bytes() == data:
        return
    if path.exists() or path.is_symlink():
        raise RunError("exists", f"{path} exists already and is something else; choose another --out, or remove it")


def site_name(federation: FederationFile, work: Path, name: str | None) -> str:
    """The site's name: as given, or the only one that has work here for this run."""
    if name is not None:
        transport.federation_file.find_client(federation, name)
        return name
    here = [known for known in federation.clients if site_work(work, federation, known).is_dir()]
    if len(here) != 1:
        found = f"several sites have work in {work}: {', '.join(here)}" if here else f"no site has work in {work}"
        raise ConfigError("which_site", f"{found}; say which one you are with --name")
    return here[0]


def owner(federation: FederationFile, key: Ed25519PrivateKey, file: Path) -> str:
    """The site whose key this is."""
    owners = {text: name for name, text in federation.clients.items()}
    name = owners.get(bundle.keys.public_text(key))
    if name is None:
        raise ConfigError("wrong_key", f"the federation file lists no site with the key in {file}")
    return name


def verdict(error: FedBiCrossError | None) -> str:
    """Accepted or refused, for a table."""
    return "ok" if error is None else f"refused, {error.code}: {error.args[0]}"


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on standard output. Cells may come from a stranger's file: they are text, whatever signs they hold."""
    table = Table(title=Text(printable(title)), title_justify="left")
    for column in header:
        table.add_column(column)
    for row in rows:
        table.add_row(*(Text(printable(" ".join(str(cell).split()))) for cell in row))
    console = Console() if sys.stdout.isatty() else Console(width=150)  # a pipe has no width of its own
    console.print(table, markup=False)
