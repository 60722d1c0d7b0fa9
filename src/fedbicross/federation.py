"""A whole federation on one machine: ``pipeline`` with a store as the carrier of the bytes.

::

     at the client              at the server                at the client
     local data --upload()--> Upload --fuse()--> Reply --personalize()--> Predictor

Every method is these three functions. What leaves a hospital is exactly what ``upload()`` returns. Server code
is handed uploads only; nothing that ``fuse`` can reach imports ``fedbicross.data`` (a test walks the imports).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any, Protocol, TypeVar

import numpy as np

from fedbicross import pipeline, sums
from fedbicross.bundle.format import canonical_json
from fedbicross.context import Context, Record, Store
from fedbicross.errors import MethodError, RunError, UploadError
from fedbicross.messages import Client, Predictor, Reply, Upload, file_name
from fedbicross.methods.base import Method, mixed_models_problem
from fedbicross.settings import Settings, read_json

T = TypeVar("T")
POOLED = "all-sites-pooled"


class _Fusion(Settings):
    """Where the replies of a fusion lie, and how long it took."""

    folder: str
    seconds: float


class _Round(Settings):
    """What is kept of one of several rounds."""

    client_flops: int
    server_flops: int
    bytes: dict[str, list[int]]  # sent and received, by client
    warnings: list[str]
    local_models: list[str]


AfterRound = Callable[[int, Mapping[str, "Predictor"]], None]


def simulate(
    method: Method[Any], clients: Sequence[Client], ctx: Context, after_round: AfterRound | None = None
) -> dict[str, Predictor]:
    """Run a whole federation on this machine, through the bytes that would travel; one predictor per client.

    Every step is kept in ``ctx.store`` under its name, so that a second call goes on where a killed one stopped.
    ``after_round`` is shown what each of several rounds would have ended with, where the reply is the model; after a
    kill it may be shown the same round again.
    """
    clients = in_order(clients)
    problem = mixed_models_problem(method, map(ctx.model_of, clients), ctx.task.model)
    if problem:
        raise MethodError("mixed_models", problem)
    if method.pools_data:
        return _simulate_pooled(method, clients, ctx)
    if ctx.fast and method.uses_local_models:
        own = ctx if method.sends_only_the_network else ctx.openly
        own.with_loss(method.loss).train_local_models(clients)
    done, replies = _newest_round(method, clients, ctx)
    if done:
        _end_round(method, clients, replies, done, ctx, after_round)  # a kill may have come before its end
    for number in range(done + 1, method.rounds + 1):
        folder = round_folder(ctx, method.rounds, number)
        for client, previous in zip_longest(clients, replies):
            make = partial(pipeline.make_upload, method, client, ctx, previous=previous)
            _step(ctx, "uploads", folder, client, make)
        uploads = _read_shared(ctx.store, _paths("uploads", folder, clients), Upload.unpack)
        replies = _fuse(method, uploads, folder, ctx)
        if method.rounds > 1:
            _end_round(method, clients, replies, number, ctx, after_round)
    made: dict[int, bytes] = {}  # where the client plays no part in the result, equal replies give equal models
    for client, reply in zip(clients, replies, strict=True):
        known = None if method.personal or method.gated else made.get(id(reply))
        finish = partial(pipeline.personalize, method, client, reply, ctx)
        made[id(reply)] = _step(ctx, "models", ctx.scope, client, finish, known)
    ctx.drop_stages()
    models = _read_shared(ctx.store, _paths("models", ctx.scope, clients), Predictor.unpack)
    return dict(zip([client.name for client in clients], models, strict=True))


def _paths(kind: str, folder: str, clients: Sequence[Client]) -> list[str]:
    return [f"{kind}/{folder}/{file_name(client.name)}.safetensors" for client in clients]


def round_folder(ctx: Context, rounds: int, number: int) -> str:
    """Where the files of a round lie; a one-shot method needs no folder for its only one."""
    return ctx.scope if rounds == 1 else f"{ctx.scope}/round-{number:03d}"


def _end_round(
    method: Method[Any],
    clients: Sequence[Client],
    replies: Sequence[Reply],
    number: int,
    ctx: Context,
    after_round: AfterRound | None,
) -> None:
    """Keep what the report needs of a round, show its models, and only then forget the one before."""
    name = _round_record(ctx, number)
    if ctx.store.load(name) is None:
        ctx.store.save(name, canonical_json(_summarise_round(method, clients, number, ctx)).encode())
    if after_round is not None and not method.personal:
        models: dict[int, Predictor] = {}
        for client, reply in zip(clients, replies, strict=True):
            if id(reply) not in models:
                models[id(reply)] = method.personalize(client, reply, ctx)
        after_round(number, {c.name: models[id(reply)] for c, reply in zip(clients, replies, strict=True)})
    _drop_round(ctx, number - 1)


def _round_record(ctx: Context, number: int) -> str:
    return f"records/rounds/{ctx.scope}/round-{number:03d}.json"


def _summarise_round(method: Method[Any], clients: Sequence[Client], number: int, ctx: Context) -> dict[str, Any]:
    """One record for a whole round: costs by client and of the server, warnings, and the client models used."""
    folder = round_folder(ctx, method.rounds, number)
    names = [f"records/upload/{folder}/{file_name(client.name)}.json" for client in clients]
    at_clients, at_server = _load_records(ctx, names), _load_records(ctx, [f"records/fuse/{folder}/server.json"])
    both = [*at_clients, *at_server]
    return {
        "client_flops": sum(record["flops"] for record in at_clients),
        "server_flops": sum(record["flops"] for record in at_server),
        "bytes": {client.name: list(travelled(ctx, folder, client.name)) for client in clients},
        "warnings": list(dict.fromkeys(text for record in both for text in record["warnings"])),
        "local_models": list(dict.fromkeys(key for record in both for key in record["local_models"])),
    }


def travelled(ctx: Context, folder: str, client: str) -> tuple[int, int]:
    """Bytes of a client's upload and reply; a bundle without content is only a manifest and would not be sent."""
    upload, reply = (f"{kind}/{folder}/{file_name(client)}.safetensors" for kind in ("uploads", "replies"))
    sizes = [ctx.store.size(upload), ctx.store.size(reply)]
    small = 1 << 16
    if sizes[0] < small and Upload.unpack(ctx.store.load(upload) or b"").empty:
        sizes[0] = 0
    if sizes[1] < small and Reply.unpack(ctx.store.load(reply) or b"").empty:
        sizes[1] = 0
    return sizes[0], sizes[1]


def _drop_round(ctx: Context, number: int) -> None:
    """Only the newest round is kept: a hundred rounds of a large network would fill a disk."""
    for kind in ("uploads", "replies", "records/upload", "records/fuse") if number > 0 else ():
        ctx.store.drop(f"{kind}/{ctx.scope}/round-{number:03d}")


def _newest_round(method: Method[Any], clients: Sequence[Client], ctx: Context) -> tuple[int, list[Reply]]:
    """The last round of which every reply is there, so that a killed run repeats at most one; (0, []) for none."""
    for number in range(method.rounds, 0, -1) if method.rounds > 1 else ():
        paths = _paths("replies", f"{ctx.scope}/round-{number:03d}", clients)
        if all(ctx.store.size(path) for path in paths):
            return number, _read_shared(ctx.store, paths, Reply.unpack)
    return 0, []


def in_order(clients: Sequence[Client]) -> list[Client]:
    """Clients by name, so that no result depends on the order in which they are listed."""
    if not clients:
        raise MethodError("no_clients", "a federation needs at least one client with images")
    ordered = sorted(clients, key=lambda client: client.name)
    for left, right in pairwise(ordered):
        if left.name == right.name:
            raise MethodError("same_name", f"two clients are called {left.label!r}; names must differ")
    return ordered


class _Packable(Protocol):
    def pack(self) -> bytes: ...


def _step(
    ctx: Context, kind: str, folder: str, client: Client, make: Callable[[str], _Packable], known: bytes | None = None
) -> bytes:
    """The bytes of one client's step: from the store if it is done, else made (or known) and kept."""
    name = f"{folder}/{file_name(client.name)}"
    path = f"{kind}/{name}.safetensors"
    data = ctx.store.load(path)
    if data is None:
        data = make(name).pack() if known is None else known
        ctx.store.save(path, data)
    return data


def _fuse(method: Method[Any], uploads: Sequence[Upload], folder: str, ctx: Context) -> list[Reply]:
    """The server's step: all replies from the store, or all made anew."""
    paths = [f"replies/{folder}/{file_name(upload.client)}.safetensors" for upload in uploads]
    if any(ctx.store.load(path) is None for path in paths) and not _reuse_fusion(method, uploads, folder, ctx):
        began = time.perf_counter()
        replies = pipeline.fuse(method, uploads, ctx, f"{folder}/server")
        seconds = time.perf_counter() - began
        packed = {id(reply): reply for reply in replies}  # clients often get the same reply: encode it once
        data = {key: reply.pack() for key, reply in packed.items()}
        note, done = _fusion(method, uploads, folder, ctx), {"folder": folder, "seconds": seconds}
        known = ctx.store.load(note)
        # Before the replies, so that after a kill in between variants still find them.
        if known is None or read_json(_Fusion, known, note).folder != folder:
            ctx.store.save(note, canonical_json(done).encode())
        for path, reply in zip(paths, replies, strict=True):
            ctx.store.save(path, data[id(reply)])
    return _read_shared(ctx.store, paths, Reply.unpack)


def _reuse_fusion(method: Method[Any], uploads: Sequence[Upload], folder: str, ctx: Context) -> bool:
    """Copy replies that a variant with the same work at the server has made of the same uploads; whether there were.

    Its time and its record are copied too: every row is charged in full, as with local training.
    """
    place = _fusion(method, uploads, folder, ctx)
    known = ctx.store.load(place) if method.rounds == 1 else None
    if known is None:
        return False
    before = read_json(_Fusion, known, place)
    names = ["records/fuse/{}/server.json"]
    names += [f"replies/{{}}/{file_name(upload.client)}.safetensors" for upload in uploads]
    if not all(ctx.store.size(name.format(before.folder)) for name in names):
        return False  # one was deleted, as the error for a damaged file advises
    ctx.event(event="fuse", scope=ctx.scope, name=f"{folder}/server", seconds=before.seconds)
    for name in names:  # replies last: once all of them are there, nothing more is done after a kill
        ctx.store.save(name.format(folder), ctx.store.load(name.format(before.folder)) or b"")
    return True


def _fusion(method: Method[Any], uploads: Sequence[Upload], folder: str, ctx: Context) -> str:
    """Content address of a fusion: the same uploads, settings of the server and seed give the same replies."""
    paths = [f"uploads/{folder}/{file_name(upload.client)}.safetensors" for upload in uploads]
    parts = {
        "method": method.name,
        "settings": method.config.model_dump(exclude=set(method.at_client)),
        "gated": method.gated and method.reply_serves_gate,  # it then holds more
        **({"trusting": True} if method.trusting else {}),
        "task": ctx.task.as_json(),
        "seed": ctx.seed,
        "precision": f"{ctx.device}-{ctx.precision}-{ctx.fast}",
        "uploads": [hashlib.sha256(ctx.store.load(path) or b"").hexdigest() for path in paths],
    }
    return f"fusions/{hashlib.sha256(canonical_json(parts).encode()).hexdigest()[:32]}.json"


def _read_shared(store: Store, paths: Sequence[str], unpack_one: Callable[[bytes], T]) -> list[T]:
    """Decode stored files, equal bytes once only, so that a hundred clients share one ensemble in memory."""
    objects: dict[bytes, T] = {}
    out = []
    for path in paths:
        data = store.load(path) or b""
        digest = hashlib.sha256(data).digest()
        if digest not in objects:
            objects[digest] = _read(path, data, unpack_one)
        out.append(objects[digest])
    return out


def _read(path: str, data: bytes, unpack_one: Callable[[bytes], T]) -> T:
    """Decode one stored file; a damaged one is named, so that it can be deleted and made again."""
    try:
        return unpack_one(data)
    except UploadError as error:
        raise RunError("damaged", f"{path} is damaged ({error.args[0]}); delete it and resume") from None


def _simulate_pooled(method: Method[Any], clients: Sequence[Client], ctx: Context) -> dict[str, Predictor]:
    """The upper bound: one imaginary site that holds everybody's images. No server is involved."""
    everyone = pooled(clients)
    make = partial(pipeline.personalize, method, everyone, Reply(), ctx)
    data = _step(ctx, "models", ctx.scope, everyone, make)
    predictor = _read(f"models/{ctx.scope}/{everyone.name}.safetensors", data, Predictor.unpack)
    return {client.name: predictor for client in clients}


def pooled(clients: Sequence[Client]) -> Client:
    """One imaginary site that holds everybody's images."""
    patients = None
    if all(client.patients is not None for client in clients):
        patients = np.concatenate([client.patients for client in clients if client.patients is not None])
    images, labels = (np.concatenate([getattr(client, part) for client in clients]) for part in ("images", "labels"))
    return Client(POOLED, images, labels, patients)


def records(ctx: Context, clients: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """The records of a finished method in a fixed order: earlier rounds, uploads, server, personalisation."""
    folder = round_folder(ctx, rounds, rounds)
    names = [f"records/upload/{folder}/{file_name(c)}.json" for c in clients]
    names += [f"records/fuse/{folder}/server.json"]
    names += [f"records/personalize/{ctx.scope}/{file_name(c)}.json" for c in [*clients, POOLED]]
    earlier = [
        {
            "flops": record["client_flops"] + record["server_flops"],
            "warnings": record["warnings"],
            "diagnosis": {},
            "local_models": record["local_models"],
        }
        for record in round_records(ctx, rounds)[:-1]
    ]
    return [*earlier, *_load_records(ctx, names)]


def round_records(ctx: Context, rounds: int) -> list[dict[str, Any]]:
    """What was kept of each of several rounds; nothing for a one-shot method."""
    names = [_round_record(ctx, number) for number in range(1, rounds + 1)] if rounds > 1 else []
    return [read_json(_Round, data, name).model_dump() for name, data in _kept(ctx, names).items()]


def _load_records(ctx: Context, names: Iterable[str]) -> list[dict[str, Any]]:
    return [read_json(Record, data, name).as_json() for name, data in _kept(ctx, names).items()]


def _kept(ctx: Context, names: Iterable[str]) -> dict[str, bytes]:
    """The records that were made. One that was made and is gone is an error, since it would change the results."""
    found = {name: ctx.store.load(name) for name in names}
    for name, data in found.items():
        if data is None and ctx.store.lists(name):
            raise RunError("damaged", f"{name} is missing; {sums.advice(name)}")
    return {name: data for name, data in found.items() if data is not None}
