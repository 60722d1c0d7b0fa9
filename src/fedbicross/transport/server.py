"""At the server, which never sees an image: verify what came in, fuse it once, sign a reply to each."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedbicross import engine as engines
from fedbicross import pipeline, seeds
from fedbicross.bundle import UPLOAD, audit, keys, read_file, sign, validate
from fedbicross.bundle.format import canonical_json
from fedbicross.context import Context, Progress
from fedbicross.errors import ConfigError, FedBiCrossError, MethodError, RunError, UploadError, printable
from fedbicross.lazy_torch import torch
from fedbicross.messages import Reply, Upload, file_name
from fedbicross.runs.store import RunFolder
from fedbicross.settings import Settings, read_json
from fedbicross.transport.federation_file import FederationFile, find_client
from fedbicross.transport.verify import open_reply, verify_upload
from fedbicross.transport.work import SCOPE, make_context, say_warnings, work_folder

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from torch import Tensor

AUDIT = "audit.jsonl"  # in the server's work folder
FUSION = "fusion.json"


@dataclass(frozen=True)
class Refused:
    """Why a file was not taken, and the digest by which it can be found again (none: it was never read)."""

    error: FedBiCrossError
    sha256: str | None = None


class _Begun(Settings):
    """What a fusion was begun with; kept in its work folder."""

    run: str
    server: str  # its key
    clients: dict[str, str]  # name and key of every member
    uploads: dict[str, str]  # SHA-256 by client
    trusted: list[str] = []  # whose uploads are used as they are, whatever sticks out


@dataclass(frozen=True)
class Received:
    """What came in: what may be used, what was refused and why, and who is missing.

    ``files`` are read again where their bytes are needed, and must be the same: no upload is in memory twice.
    """

    files: dict[str, bytes | Path] = field(default_factory=dict)  # what was verified, by client
    digests: dict[str, str] = field(default_factory=dict)  # SHA-256 of the verified bytes
    uploads: dict[str, Upload] = field(default_factory=dict)
    refused: dict[str, Refused] = field(default_factory=dict)  # by source
    sources: dict[str, str] = field(default_factory=dict)  # source by client
    missing: tuple[str, ...] = ()


def receive(federation: FederationFile, uploads: Mapping[str, bytes | Path]) -> Received:
    """Verify each upload on its own: bytes, or a file that is read once. Keys say where it came from, for messages.

    A client that sends two different files is refused altogether: the server must not choose for it.
    """
    files: dict[str, bytes | Path] = {}
    digests: dict[str, str] = {}
    sources: dict[str, str] = {}
    opened: dict[str, Upload] = {}
    refused: dict[str, Refused] = {}
    twice: set[str] = set()
    for source, given in uploads.items():
        digest = None
        try:
            data = given if isinstance(given, bytes) else read_file(given, UPLOAD)
            digest = _sha256(data)
            upload = verify_upload(federation, data)
        except (UploadError, MethodError) as error:
            refused[source] = Refused(error, digest)
            continue
        name = upload.client
        if name not in files:
            files[name], digests[name], opened[name], sources[name] = given, digest, upload, source
        elif digests[name] != digest:
            twice.add(name)
            refused[source] = Refused(_two(name, sources[name]), digest)
    for name in sorted(twice):
        refused[sources[name]] = Refused(_two(name, "another file"), digests[name])
        del files[name], digests[name], opened[name], sources[name]
    method = federation.build()
    for name, why in pipeline.who_differs({n: method.must_agree(upload) for n, upload in opened.items()}).items():
        refused[sources[name]] = Refused(why, digests[name])
        del files[name], digests[name], opened[name], sources[name]
    names = sorted(files)
    missing = tuple(name for name in sorted(federation.clients) if name not in files)
    return Received(
        {name: files[name] for name in names},
        {name: digests[name] for name in names},
        {name: opened[name] for name in names},
        refused,
        {name: sources[name] for name in names},
        missing,
    )


def _two(name: str, other: str) -> UploadError:
    return UploadError("two_uploads", f"{name!r} sent two different uploads (the other: {other}); keep the right one")


def fuse_uploads(
    federation: FederationFile,
    uploads: Mapping[str, bytes | Path],
    work: Path,
    server_key: Ed25519PrivateKey,
    progress: Progress | None = None,
    **options: Any,
) -> dict[str, bytes]:
    """``receive``, then ``fuse_received`` with its options."""
    return fuse_received(federation, receive(federation, uploads), work, server_key, progress, **options)


def fuse_received(
    federation: FederationFile,
    received: Received,
    work: Path,
    server_key: Ed25519PrivateKey,
    progress: Progress | None = None,
    *,
    quorum: int | None = None,
    device: str = "auto",
    engine: Literal["local", "ray"] = "local",
    workers: int | None = None,
    hold_on_notes: bool = False,
    trust: Collection[str] = (),
) -> dict[str, bytes]:
    """The signed reply to each client whose upload takes part.

    Refused and missing uploads are named and left out; fewer than the quorum is an error. The first call fixes who
    takes part: later calls go on with exactly these bytes, name what came late, and refuse what changed.

    An upload that sticks out is noted, limited or left out by `parts.defence`, unless its sender is among those that
    the operator chooses to ``trust``; with ``hold_on_notes`` nothing is begun while there is any other note.

    With ``engine="ray"`` trajectories are made by that many ``workers``; the replies are the same.
    """
    if keys.public_text(server_key) != federation.server:
        raise ConfigError("wrong_key", "this key is not the one that the federation file lists for the server")
    for name in trust:
        find_client(federation, name)
    with work_folder(work) as folder:
        log = folder.path / AUDIT
        ctx = make_context(federation, folder, progress, device)
        if engine == "ray":  # before any work: the package may be missing
            ctx.workers = engines.workers.Workers(workers, ctx.device, ctx.precision, ctx.progress.say)
        _tell(received, ctx, log)
        if folder.store.load(FUSION) is None:
            _judge(federation, received, ctx, log, quorum, hold_on_notes, trust)
            _begin(federation, received, folder, sorted(trust), log)
        taking_part, trusted = _as_before(federation, received, folder, ctx.progress)
        paths = {name: f"replies/{file_name(name)}.safetensors" for name in taking_part}
        found = {name: folder.store.load(path) for name, path in paths.items()}
        for name, kept in found.items():
            _check_kept(federation, name, kept, folder)
        if all(data is not None for data in found.values()):
            ctx.progress.say("done before: the replies are those that were made then")
        else:
            with _binding_nobody(federation, ctx, log):
                for name, reply in _fuse(federation, list(taking_part.values()), ctx, trusted).items():
                    addressed = replace(reply, client=name, run_id=federation.run, agreement=federation.agreement)
                    found[name] = data = sign(addressed.pack(), server_key)
                    folder.store.save(paths[name], data)
                    audit.append(log, {"what": "reply", "client": name, "sha256": _sha256(data)})
            ctx.drop_stages()
        return {name: data for name, data in found.items() if data is not None}


def _fuse(
    federation: FederationFile, uploads: list[Upload], ctx: Context, trusted: Collection[str]
) -> dict[str, Reply]:
    """The method's own step, on uploads in the order of their names, as ``simulate`` has them."""
    method, name = federation.build(), f"{SCOPE}/server"
    with ctx.workers or nullcontext():
        replies = pipeline.fuse(method, uploads, ctx, name, trusted)
        if ctx.workers is not None and not ctx.workers.actors:
            ctx.progress.say(f"note: nothing was spread: this {method.name} makes no trajectories")
    told = replies[0].info.get("notes", ())  # before anything was begun
    say_warnings(ctx, "fuse", name, told=told)
    return {upload.client: reply for upload, reply in zip(uploads, replies, strict=True)}


@contextmanager
def _binding_nobody(federation: FederationFile, ctx: Context, log: Path) -> Iterator[None]:
    """If the method cannot work with the uploads, or makes replies that nobody can use, the fusion can be begun again.

    What may be the machine's fault keeps its work: hours of it, perhaps.
    """
    try:
        yield
    except (UploadError, MethodError) as error:
        _unbind(error, ctx, log)
        raise
    except (
        *(ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError),
        torch.linalg.LinAlgError,  # type: ignore[attr-defined]
    ) as error:
        what = f"{federation.method} cannot work with these uploads ({type(error).__name__}: {error})"
        unforeseen = MethodError("unexpected", what)
        _unbind(unforeseen, ctx, log)
        raise unforeseen from error
    except (FedBiCrossError, OSError):
        raise
    except Exception as error:  # a full memory, a lost GPU, a worker that is gone
        if engines.device.out_of_memory(error):
            raise
        failed = RunError(
            "unexpected",
            f"{federation.method} ended with {type(error).__name__}: {error}; the same command goes on, and if it ends "
            "so again, leave a file out and use another --work",
        )
        audit.append(log, {"what": "failed", "code": failed.code, "reason": failed.args[0]})
        raise failed from error


def _unbind(error: FedBiCrossError, ctx: Context, log: Path) -> None:
    audit.append(log, {"what": "failed", "code": error.code, "reason": error.args[0]})
    ctx.drop_stages()
    ctx.store.drop("replies")  # some may have been made already
    ctx.store.drop(FUSION)  # last: who is killed before it goes on with the same uploads


def _tell(received: Received, ctx: Context, log: Path) -> None:
    """Say and log what came in, and what a person should look at."""
    for source, refused in received.refused.items():
        error = refused.error
        ctx.progress.say(f"refused {source}: {error}")
        entry = {"what": "refused", "source": printable(source)[:200], "code": error.code, "reason": error.args[0]}
        audit.append(log, {**entry, "sha256": refused.sha256})
    for name, digest in received.digests.items():
        audit.append(log, {"what": "accepted", "client": name, "sha256": digest})
    for name in received.missing:
        ctx.progress.say(f"missing: {name}")


def _judge(
    federation: FederationFile,
    received: Received,
    ctx: Context,
    log: Path,
    quorum: int | None,
    hold_on_notes: bool,
    trust: Collection[str],
) -> None:
    """Before anything is begun: are there enough uploads, and what should a person look at?"""
    uploads = list(received.uploads.values())
    needed = max(federation.quorum if quorum is None else quorum, 1)
    _check_quorum(federation, received, len(uploads), needed)
    flags = validate.flag_suspicious(uploads, _initial_network(ctx))
    seen = pipeline.look_at(federation.build(), uploads, ctx, trust)
    notes = [*flags, *((note.client, str(note)) for note in seen.notes)]
    for _, text in notes:
        ctx.progress.say(f"note: {text}")
        audit.append(log, {"what": "note", "reason": text})
    still_open = [text for client, text in notes if client not in trust]
    if hold_on_notes and still_open:
        raise MethodError(
            "held",
            f"{len(still_open)} notes hold this fusion, the first: {still_open[0]}; take files out (on Flower "
            "--without the site), --trust the site, or do without --hold-on-notes",
        )
    _check_quorum(federation, received, len(seen.uploads), needed)


def _check_quorum(federation: FederationFile, received: Received, usable: int, needed: int) -> None:
    if usable < needed:
        raise MethodError(
            "quorum",
            f"{usable} of {len(federation.clients)} uploads can be used, {needed} are needed; "
            f"missing: {', '.join(received.missing) or 'none'}; --quorum goes on with fewer",
        )


def _initial_network(ctx: Context) -> dict[str, Tensor] | None:
    """The weights from which every site started, if they started alike: who sends them back trained nothing."""
    if ctx.training.init != "shared":
        return None
    return ctx.new_model(seeds.torch_rng(ctx.training_seed, "init")).state_dict()


def _begin(federation: FederationFile, received: Received, folder: RunFolder, trusted: list[str], log: Path) -> None:
    """Fix who takes part, whatever comes later, and keep the bytes."""
    validate.check_same_task(list(received.uploads.values()))
    for name in received.files:
        folder.store.save(f"uploads/{file_name(name)}.safetensors", _again(received, name))
    begun = _Begun(
        run=federation.run,
        server=federation.server,
        clients=federation.clients,
        uploads=received.digests,
        trusted=trusted,
    )
    folder.store.save(FUSION, canonical_json(begun.model_dump()).encode())
    audit.append(log, {"what": "fusion", "clients": sorted(received.files), "missing": list(received.missing)})


def _as_before(
    federation: FederationFile, received: Received, folder: RunFolder, progress: Progress
) -> tuple[dict[str, Upload], list[str]]:
    """The uploads with which this fusion was begun, from the copies kept then, and who was trusted."""
    begun = read_json(_Begun, folder.store.load(FUSION) or b"", FUSION)
    if begun.run != federation.run:
        raise RunError("changed", f"{folder.path} was begun for another run; choose another --work")
    if (begun.server, begun.clients) != (federation.server, federation.clients):
        gone = [name for name, key in begun.clients.items() if federation.clients.get(name) != key]
        other = "a site was added, or the server has another key"
        who = f"no longer listed, or with another key: {', '.join(gone)}" if gone else other
        raise RunError(
            "members_changed",
            f"the fusion in {folder.path} was begun with other members ({who}); "
            "fuse anew in another --work, with uploads that were signed for the new list",
        )
    out = {}
    for name, digest in sorted(begun.uploads.items()):
        if received.digests.get(name, digest) != digest:
            raise RunError(
                "uploads_changed",
                f"{name!r} sent another upload after the fusion in {folder.path} had begun; "
                "put the first one back, or fuse again from the start in another --work",
            )
        data = folder.store.load(f"uploads/{file_name(name)}.safetensors") or b""
        if _sha256(data) != digest:
            raise RunError("damaged", f"the copy of {name!r}'s upload in {folder.path} is damaged; use another --work")
        out[name] = received.uploads.get(name) or verify_upload(federation, data)
    for late in sorted(set(received.uploads) - set(out)):
        progress.say(f"late: {late} came after the fusion had begun and takes no part; another --work fuses anew")
    return out, begun.trusted


def begun_with(work: Path) -> list[str]:
    """The sites that take part in the fusion begun in this folder; none where none was."""
    file = work / FUSION
    return sorted(read_json(_Begun, file.read_bytes(), FUSION).uploads) if file.is_file() else []


def _again(received: Received, name: str) -> bytes:
    """The verified bytes of an upload."""
    given = received.files[name]
    data = given if isinstance(given, bytes) else read_file(given, UPLOAD)
    if _sha256(data) != received.digests[name]:
        raise UploadError("changing", f"{name!r}'s upload changed while it was read: try again")
    return data


def _check_kept(federation: FederationFile, name: str, kept: bytes | None, folder: RunFolder) -> None:
    """A reply that was made before is handed out only if its receiver would take it."""
    if kept is not None:
        try:
            open_reply(federation, kept, name)
        except UploadError as error:
            raise RunError(
                "damaged", f"the reply to {name!r} in {folder.path} is not one to send ({error}); use another --work"
            ) from None


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
