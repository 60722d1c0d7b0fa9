"""The three verbs between sites that share nothing but files: bytes in, bytes out, everything signed.

::

     site                            server                               site
     make_upload() --bytes--> receive(), fuse_uploads() --bytes--> open_reply(), personalize()

The result equals ``simulate()`` on the same data, names and seed. Every step keeps its work in a folder, so that the
same call again goes on where a killed one stopped and a finished one costs nothing. Bytes from outside are verified
before anything else touches them. This module never imports ``fedbicross.data``: the server runs it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbicross import seeds
from fedbicross.bundle import REPLY, UPLOAD, audit, inspect, keys, read_file, sign, validate
from fedbicross.bundle.format import canonical_json
from fedbicross.bundle.sign import check_signer
from fedbicross.context import Context, Progress, Silent
from fedbicross.errors import ConfigError, FedBiCrossError, MethodError, RunError, UploadError
from fedbicross.federation import PREPROCESSING, Client, Predictor, Reply, Upload, check_needs, file_name
from fedbicross.runs.store import RunFolder
from fedbicross.transport.federation_file import (
    CountPolicy,
    FederationFile,
    federation_text,
    find_client,
    load_federation,
    new_federation,
)

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from torch import Tensor

__all__ = [
    "AUDIT",
    "FederationFile",
    "Received",
    "Refused",
    "check_networks",
    "federation_text",
    "fuse_received",
    "fuse_uploads",
    "load_federation",
    "make_upload",
    "new_federation",
    "open_reply",
    "personalize",
    "receive",
    "verify_upload",
]

AUDIT = "audit.jsonl"  # in the server's work folder
SCOPE = "federation"
SENT = "upload.safetensors"
SITE = "site.json"
FUSION = "fusion.json"


# --- at the site ---------------------------------------------------------------------------------------------


def make_upload(
    federation: FederationFile,
    client: Client,
    key: Ed25519PrivateKey,
    work: Path,
    progress: Progress | None = None,
    *,
    device: str = "auto",
) -> bytes:
    """Train, and return the signed bytes that leave; if they lie in ``work`` already, nothing is trained again."""
    if keys.public_text(key) != find_client(federation, client.name):
        raise ConfigError("wrong_key", f"this key is not the one that the federation file lists for {client.name!r}")
    _check_images(federation, client)
    with _folder(work) as folder:
        ctx = _site_context(federation, client, folder, progress, device)
        data = folder.store.load(SENT)
        if data is None or inspect(data, UPLOAD).signer != keys.public_text(key):  # a new key signs the same again
            method = federation.build()
            with ctx.measured("upload", f"{SCOPE}/{file_name(client.name)}"):
                upload = method.upload(client, ctx)
            upload = replace(_apply_counts(federation.class_counts, upload), run_id=federation.run)
            data = sign(upload.pack(), key)
            verify_upload(federation, data)  # what the server would refuse is refused here, before it travels
            folder.store.save(SENT, data)
            ctx.drop_stages()
        verify_upload(federation, data)
        return data


def _check_images(federation: FederationFile, client: Client) -> None:
    expected = (federation.image_size, federation.image_size, federation.channels)
    if client.images.shape[1:] != expected or not len(client.labels):
        raise ConfigError(
            "images", f"{client.label}: images [n, H, W, C] must be {expected}, got {client.images.shape}"
        )
    if client.labels.min() < 0 or client.labels.max() >= len(federation.classes):
        raise ConfigError("labels", f"{client.label}: labels must lie in 0..{len(federation.classes) - 1}")


def _apply_counts(policy: CountPolicy, upload: Upload) -> Upload:
    """The minimum-count rule: a count that could point at a person stays here."""
    counts, total = upload.class_counts, upload.num_samples
    numbers = [*(counts or ()), *([] if total is None else [total])]
    if not any(0 < number < policy.smallest for number in numbers):
        return upload
    if policy.below == "refuse":
        raise MethodError(
            "small_count",
            f"a count below class_counts.smallest = {policy.smallest} would leave; "
            "agree on below = 'round_up', or on a method that sends no counts",
        )
    if counts is not None:
        counts = [_rounded(number, policy.smallest) for number in counts]
    if total is not None:
        total = _rounded(total, policy.smallest) if counts is None else sum(counts)
    return replace(upload, class_counts=counts, num_samples=total)


def _rounded(number: int, smallest: int) -> int:
    return smallest if 0 < number < smallest else number


def open_reply(federation: FederationFile, data: bytes, client_name: str) -> Reply:
    """Verify that these bytes are this run's reply to this client, signed by the server."""
    find_client(federation, client_name)
    header = inspect(data, REPLY)
    check_signer(header, {"server": federation.server})
    _check_run(federation, header.manifest.get("run_id"), "reply")
    validate.check_client(header.manifest.get("client"), client_name)
    reply = Reply.unpack(data)
    validate.check_finite(reply.tensors)
    return reply


def personalize(
    federation: FederationFile,
    client: Client,
    reply: bytes,
    work: Path,
    progress: Progress | None = None,
    *,
    device: str = "auto",
) -> Predictor:
    """The model that the site will use; if it lies in ``work`` already, nothing is trained again."""
    opened = open_reply(federation, reply, client.name)
    _check_images(federation, client)
    with _folder(work) as folder:
        ctx = _site_context(federation, client, folder, progress, device)
        name = f"models/{hashlib.sha256(reply).hexdigest()[:32]}.safetensors"
        data = folder.store.load(name)
        if data is None:
            method = federation.build()
            with ctx.measured("personalize", f"{SCOPE}/{file_name(client.name)}"), _naming_bad_replies():
                predictor = method.personalize(client, opened, ctx)
                check_networks(predictor)
            data = predictor.pack()
            folder.store.save(name, data)
            ctx.drop_stages()
        return Predictor.unpack(data)


def check_networks(predictor: Predictor) -> None:
    """Every network of a model has the tensors of its architecture, and finite values."""
    task = predictor.task
    if predictor.encoder is not None:  # heads: their sizes follow from their tensors, so that building one checks them
        from fedbicross.models import heads

        for architecture, state in zip(predictor.architectures, predictor.states, strict=True):
            heads.load(architecture, state, len(task.classes))
            validate.check_finite(state)
        return
    for architecture, state in zip(predictor.architectures, predictor.states, strict=True):
        expected = validate.model_tensors(architecture, task.channels, len(task.classes), task.image_size)
        found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
        if found != expected:
            raise UploadError("architecture", f"the networks in the file are not those of a {architecture}")
        validate.check_finite(state)


@contextmanager
def _naming_bad_replies() -> Iterator[None]:
    """A signed reply can still be wrong: what torch or a lookup says of its content becomes one line."""
    try:
        yield
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        text = " ".join(str(error).split())[:200]
        raise UploadError("bad_reply", f"the reply does not hold what the method expects ({text})") from error


def _site_context(
    federation: FederationFile, client: Client, folder: RunFolder, progress: Progress | None, device: str
) -> Context:
    """The context of a site's work, refusing a folder that was begun with other images or for another run."""
    kept = folder.store.load(SITE)
    before = json.loads(kept) if kept else None
    ctx = _context(federation, folder, progress, before["device"] if before and device == "auto" else device)
    now = {"run": federation.run, "client": client.name, "data": client.digest, "device": ctx.device}
    if before is None:
        folder.store.save(SITE, canonical_json(now).encode())
    for key, what in (("run", "for another run"), ("client", "for another client"), ("data", "with other images")):
        if before is not None and before[key] != now[key]:
            raise RunError("changed", f"{folder.path} was begun {what}; choose another --work, or empty it")
    return ctx


# --- at the server -------------------------------------------------------------------------------------------


def verify_upload(federation: FederationFile, data: bytes) -> Upload:
    """The upload in these bytes, if it is a listed client's, signed by that client, for this run, and fit for use."""
    header = inspect(data, UPLOAD)
    name = check_signer(header, federation.clients)  # an upload's signer is also its sender
    _check_run(federation, header.manifest.get("run_id"), "upload")
    upload = Upload.unpack(data)
    validate.check_same_task([upload], federation.task)
    if upload.task.model != federation.model:
        raise UploadError(
            "task_model", f"{name!r} has model {upload.task.model!r}, the federation {federation.model!r}"
        )
    if upload.preprocessing != PREPROCESSING:
        raise UploadError("task_preprocessing", f"{name!r} prepares pixels as {upload.preprocessing[:60]!r}")
    method = federation.build()
    check_needs(method, [upload])
    method.check_upload(upload)
    return upload


def _check_run(federation: FederationFile, found: object, what: str) -> None:
    if found == federation.run:
        return
    run_id = found.partition("+")[0] if isinstance(found, str) else None
    if run_id == federation.run_id:
        raise UploadError("other_settings", f"this {what} was made under other settings of run {run_id!r}")
    validate.check_run(run_id, federation.run_id)


@dataclass(frozen=True)
class Refused:
    """Why a file was not taken, and the digest by which it can be found again (none: it was never read)."""

    error: FedBiCrossError
    sha256: str | None = None


@dataclass(frozen=True)
class Received:
    """What came in: what may be used, what was refused and why, and who is missing."""

    files: dict[str, bytes] = field(default_factory=dict)  # the verified bytes by client
    uploads: dict[str, Upload] = field(default_factory=dict)
    refused: dict[str, Refused] = field(default_factory=dict)  # by source
    sources: dict[str, str] = field(default_factory=dict)  # source by client
    missing: tuple[str, ...] = ()


def receive(federation: FederationFile, uploads: Mapping[str, bytes | Path]) -> Received:
    """Verify each upload on its own: bytes, or a file that is read once. Keys say where it came from, for messages.

    A client that sends two different files is refused altogether: the server must not choose for it.
    """
    files: dict[str, bytes] = {}
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
            files[name], opened[name], sources[name] = data, upload, source
        elif files[name] != data:
            twice.add(name)
            refused[source] = Refused(_two(name, sources[name]), digest)
    for name in twice:
        refused[sources[name]] = Refused(_two(name, "another file"), _sha256(files[name]))
        del files[name], opened[name], sources[name]
    names = sorted(files)
    missing = tuple(name for name in sorted(federation.clients) if name not in files)
    return Received(
        {name: files[name] for name in names},
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
    *,
    quorum: int | None = None,
    device: str = "auto",
) -> dict[str, bytes]:
    """The signed reply to each client whose upload takes part.

    Refused and missing uploads are named and left out; fewer than the quorum is an error. The first call fixes who
    takes part: later calls go on with exactly these bytes, name what came late, and refuse what changed.
    """
    received = receive(federation, uploads)
    return fuse_received(federation, received, work, server_key, progress, quorum=quorum, device=device)


def fuse_received(
    federation: FederationFile,
    received: Received,
    work: Path,
    server_key: Ed25519PrivateKey,
    progress: Progress | None = None,
    *,
    quorum: int | None = None,
    device: str = "auto",
) -> dict[str, bytes]:
    """``fuse_uploads`` after ``receive``."""
    if keys.public_text(server_key) != federation.server:
        raise ConfigError("wrong_key", "this key is not the one that the federation file lists for the server")
    with _folder(work) as folder:
        log = folder.path / AUDIT
        ctx = _context(federation, folder, progress, device)
        _tell(received, ctx, log)
        taking_part = _taking_part(federation, received, folder, quorum, ctx.progress, log)
        paths = {name: f"replies/{file_name(name)}.safetensors" for name in taking_part}
        found = {name: folder.store.load(path) for name, path in paths.items()}
        if any(data is None for data in found.values()):
            for name, reply in _fuse(federation, list(taking_part.values()), ctx).items():
                addressed = replace(reply, client=name, run_id=federation.run)
                found[name] = data = sign(addressed.pack(), server_key)
                folder.store.save(paths[name], data)
                audit.append(log, {"what": "reply", "client": name, "sha256": _sha256(data)})
            ctx.drop_stages()
        return {name: data for name, data in found.items() if data is not None}


def _fuse(federation: FederationFile, uploads: list[Upload], ctx: Context) -> dict[str, Reply]:
    """The method's own step, on uploads in the order of their names, as ``simulate`` has them."""
    method = federation.build()
    with ctx.measured("fuse", f"{SCOPE}/server"):
        replies = method.fuse(uploads, ctx)
        for warning in ctx.record.warnings:
            ctx.progress.say(f"note: {warning}")
    if len(replies) != len(uploads):
        raise MethodError("replies", f"{method.name} made {len(replies)} replies to {len(uploads)} uploads")
    return {upload.client: reply for upload, reply in zip(uploads, replies, strict=True)}


def _tell(received: Received, ctx: Context, log: Path) -> None:
    """Say and log what came in, and what a person should look at."""
    for source, refused in received.refused.items():
        error = refused.error
        ctx.progress.say(f"refused {source}: {error}")
        entry = {"what": "refused", "source": source[:200], "code": error.code, "reason": error.args[0]}
        audit.append(log, {**entry, "sha256": refused.sha256})
    for name, data in received.files.items():
        audit.append(log, {"what": "accepted", "client": name, "sha256": _sha256(data)})
    for name in received.missing:
        ctx.progress.say(f"missing: {name}")
    for flag in validate.flag_suspicious(list(received.uploads.values()), _initial_network(ctx)):
        ctx.progress.say(f"note: {flag}")
        audit.append(log, {"what": "note", "reason": flag})


def _initial_network(ctx: Context) -> dict[str, Tensor] | None:
    """The weights from which every site started, if they started alike: who sends them back trained nothing."""
    if ctx.training.init != "shared":
        return None
    seed = ctx.seed if ctx.training.seed is None else ctx.training.seed
    return ctx.new_model(seeds.torch_rng(seed, "init")).state_dict()


def _taking_part(
    federation: FederationFile,
    received: Received,
    folder: RunFolder,
    quorum: int | None,
    progress: Progress,
    log: Path,
) -> dict[str, Upload]:
    """Who takes part: fixed by the first call that reaches the quorum, and kept with the bytes."""
    kept = folder.store.load(FUSION)
    if kept is not None:
        return _as_before(federation, received, folder, json.loads(kept), progress)
    needed = federation.quorum if quorum is None else quorum
    if len(received.uploads) < max(needed, 1):
        raise MethodError(
            "quorum",
            f"{len(received.uploads)} of {len(federation.clients)} uploads can be used, {needed} are needed; "
            f"missing: {', '.join(received.missing) or 'none'}",
        )
    validate.check_same_task(list(received.uploads.values()))
    for name, data in received.files.items():
        folder.store.save(f"uploads/{file_name(name)}.safetensors", data)
    digests = {name: _sha256(data) for name, data in received.files.items()}
    folder.store.save(FUSION, canonical_json({"run": federation.run, "uploads": digests}).encode())
    audit.append(log, {"what": "fusion", "clients": sorted(digests), "missing": list(received.missing)})
    return received.uploads


def _as_before(
    federation: FederationFile, received: Received, folder: RunFolder, begun: Mapping[str, Any], progress: Progress
) -> dict[str, Upload]:
    """The uploads with which this fusion was begun, from the copies kept then."""
    if begun["run"] != federation.run:
        raise RunError("changed", f"{folder.path} was begun for another run; choose another --work")
    out = {}
    for name, digest in sorted(begun["uploads"].items()):
        if name in received.files and _sha256(received.files[name]) != digest:
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
    return out


# --- both ----------------------------------------------------------------------------------------------------


def _context(federation: FederationFile, folder: RunFolder, progress: Progress | None, device: str) -> Context:
    from fedbicross.engine.device import resolve_device, resolve_precision, set_precision

    used = resolve_device(device)
    set_precision(resolve_precision("auto", used))
    return Context(
        task=federation.task,
        training=federation.training,
        seed=federation.seed,
        device=used,
        precision=resolve_precision("auto", used),
        fast=used == "cuda",
        scope=SCOPE,
        store=folder.store,
        progress=progress or Silent(),
        event=folder.event,
    )


@contextmanager
def _folder(work: Path) -> Iterator[RunFolder]:
    """The work folder, locked and mended; a full disk is an error in one line, and the same call again goes on."""
    with RunFolder(work) as folder:
        folder.clean()
        try:
            yield folder
        except OSError as error:
            raise RunError(
                "cannot_write", f"writing to {work} failed: {error.strerror or error}; the same command goes on later"
            ) from None


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
