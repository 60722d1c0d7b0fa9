"""The pipeline on one page.

::

     at the client              at the server                at the client
     local data --upload()--> Upload --fuse()--> Reply --personalize()--> Predictor

Every method is these three functions. What leaves a hospital is exactly what ``upload()`` returns. Server code
is handed uploads only; nothing that ``fuse`` can reach imports ``fedbicross.data`` (a test walks the imports).
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

from fedbicross.bundle import pack, unpack, validate
from fedbicross.bundle.format import canonical_json
from fedbicross.context import Context, Store, Task
from fedbicross.errors import MethodError, RunError, UploadError
from fedbicross.settings import Settings

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Client:
    """One hospital: a name and images that never leave it."""

    name: str
    images: np.ndarray  # uint8 [n,H,W,C]
    labels: np.ndarray  # int64 [n]
    patients: np.ndarray | None = None

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the images, labels and patients."""
        digest = hashlib.sha256(str(self.images.shape).encode())
        digest.update(self.images.tobytes())
        digest.update(self.labels.astype("int64").tobytes())
        if self.patients is not None:
            digest.update("\0".join(map(str, self.patients)).encode())
        return digest.hexdigest()

    def class_counts(self, classes: int) -> list[int]:
        """How many images of each class."""
        return [int((self.labels == c).sum()) for c in range(classes)]

    @property
    def label(self) -> str:
        """The name, short enough for a terminal line."""
        return self.name if len(self.name) <= 32 else self.name[:29] + "..."


PREPROCESSING = validate.PREPROCESSING


class _UploadManifest(Settings):
    client: str
    task: Task
    preprocessing: str
    class_counts: list[int] | None
    num_samples: int | None
    extra: dict[str, Any]
    run_id: str | None


class _ReplyManifest(Settings):
    client: str | None
    info: dict[str, Any]
    run_id: str | None


class _PredictorManifest(Settings):
    task: Task
    architectures: list[str]
    combine: Literal["mean_logits", "mean_probs", "class_weighted"]
    encoder: dict[str, Any] | None = None


MANIFESTS: dict[str, type[Settings]] = {"upload": _UploadManifest, "reply": _ReplyManifest}  # of what travels


@dataclass(frozen=True)
class Upload:
    """The one file that leaves a hospital."""

    client: str
    task: Task
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    class_counts: Sequence[int] | None = None
    num_samples: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    run_id: str | None = None  # of a federation between sites: a bundle of another run is refused
    preprocessing: str = PREPROCESSING

    def pack(self) -> bytes:
        """The bytes that leave."""
        info = {
            "client": self.client,
            "task": self.task.as_json(),
            "preprocessing": self.preprocessing,
            "class_counts": None if self.class_counts is None else list(self.class_counts),
            "num_samples": self.num_samples,
            "extra": dict(self.extra),
            "run_id": self.run_id,
        }
        return pack("upload", self.tensors, info)

    @classmethod
    def unpack(cls, data: bytes) -> Upload:
        """Read an upload back."""
        tensors, info = unpack(data, "upload")
        manifest = validate.read_manifest(_UploadManifest, info)
        return cls(tensors=tensors, **dict(manifest))

    @property
    def empty(self) -> bool:
        """Nothing left the hospital."""
        return not self.tensors and self.class_counts is None and self.num_samples is None and not self.extra


@dataclass(frozen=True)
class Reply:
    """The one file that comes back. Several clients may get the same."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    client: str | None = None  # whom it is for, and of which run, where it travels between sites
    run_id: str | None = None

    def pack(self) -> bytes:
        """The bytes that come back."""
        return pack("reply", self.tensors, {"client": self.client, "info": dict(self.info), "run_id": self.run_id})

    @classmethod
    def unpack(cls, data: bytes) -> Reply:
        """Read a reply back."""
        tensors, info = unpack(data, "reply")
        return cls(tensors, **dict(validate.read_manifest(_ReplyManifest, info)))

    @property
    def empty(self) -> bool:
        """Nothing was sent back."""
        return not self.tensors and not self.info


@dataclass(frozen=True)
class Predictor:
    """What a hospital ends with: one network, several and a rule to combine them, or a constant answer."""

    task: Task
    architectures: tuple[str, ...] = ()
    states: tuple[dict[str, Tensor], ...] = ()
    combine: Literal["mean_logits", "mean_probs", "class_weighted"] = "mean_logits"
    class_weights: Tensor | None = None  # [networks, classes], for class_weighted
    constant: Tensor | None = None  # [classes]
    encoder: Mapping[str, Any] | None = None  # EncoderSpec and digest: the networks are then heads on its features

    def probabilities(
        self, images: np.ndarray, device: str = "cpu", precision: str = "fp32", store: Store | None = None
    ) -> np.ndarray:
        """Class probabilities [n,C] for uint8 images [n,H,W,C]; a store keeps the features of a frozen encoder."""
        from fedbicross.engine import predict

        return predict.probabilities(self, images, device, precision, store=store)

    def pack(self) -> bytes:
        """The bytes of the final model."""
        tensors = pack_states(self.states)
        tensors |= {} if self.class_weights is None else {"class_weights": self.class_weights}
        tensors |= {} if self.constant is None else {"constant": self.constant}
        info = {"task": self.task.as_json(), "architectures": list(self.architectures), "combine": self.combine}
        info |= {} if self.encoder is None else {"encoder": dict(self.encoder)}
        return pack("predictor", tensors, info)

    @classmethod
    def unpack(cls, data: bytes) -> Predictor:
        """Read a final model back."""
        tensors, info = unpack(data, "predictor")
        manifest = validate.read_manifest(_PredictorManifest, info)
        architectures = tuple(manifest.architectures)
        states = unpack_states(tensors, len(architectures))
        weights, constant = tensors.get("class_weights"), tensors.get("constant")
        return cls(manifest.task, architectures, tuple(states), manifest.combine, weights, constant, manifest.encoder)


def pack_states(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Several state dicts as one flat dict: ``model.0.conv.weight`` and so on."""
    return {f"model.{i}.{name}": value for i, state in enumerate(states) for name, value in state.items()}


def unpack_states(tensors: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """The inverse of ``pack_states``."""
    states: dict[str, dict[str, Tensor]] = {str(number): {} for number in range(count)}
    for full, value in tensors.items():
        prefix, _, rest = full.partition(".")
        if prefix == "model":
            index, _, name = rest.partition(".")
            if index not in states:
                raise UploadError("tensor_list", f"tensor {full[:64]!r} belongs to none of the {count} networks")
            states[index][name] = value
    return list(states.values())


class MethodConfig(Settings):
    """Base of every method's settings."""


T = TypeVar("T")
ConfigT = TypeVar("ConfigT", bound=MethodConfig)


class Method(ABC, Generic[ConfigT]):
    """The three verbs, and what a reader should know of a method before running it."""

    name: ClassVar[str]
    summary: ClassVar[str]  # one line
    Config: ClassVar[type[MethodConfig]] = MethodConfig
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # named presets of Config: "name:variant"
    variant_notes: ClassVar[Mapping[str, str]] = {}
    quick: ClassVar[Mapping[str, Any]] = {}  # settings that finish in minutes on two cores
    role: ClassVar[Literal["method", "baseline", "upper_bound"]] = "method"
    pools_data: ClassVar[bool] = False  # an upper bound that no federation could run
    personal: ClassVar[bool] = True  # False: personalize() ignores the client, so that equal replies share one model

    def __init__(self, config: ConfigT) -> None:
        self.config = config

    @property
    def needs(self) -> frozenset[str]:
        """What every upload must hold: weights, bn_stats, class_counts, num_samples. Checked before any work."""
        return frozenset()

    @property
    def uses_local_models(self) -> bool:
        """Whether upload() or personalize() asks for the client's own network, which can then be trained ahead."""
        return "weights" in self.needs

    @property
    def rounds(self) -> int:
        """How often the three verbs go round; 1 is one-shot."""
        return 1

    @property
    def refuses_mixed_models(self) -> str:
        """Why every client must have the server's architecture, in words; empty where clients may bring their own."""
        return f"{self.name} does not say that it can"

    @property
    @abstractmethod
    def leaves(self) -> str:
        """What leaves the hospital, in one sentence."""

    @abstractmethod
    def upload(self, client: Client, ctx: Context, previous: Reply | None = None) -> Upload:
        """At the client: train, and return what leaves. ``previous`` is the last round's reply, if any."""

    @abstractmethod
    def fuse(self, uploads: Sequence[Upload], ctx: Context) -> list[Reply]:
        """At the server: one reply per upload, in the same order."""

    @abstractmethod
    def personalize(self, client: Client, reply: Reply, ctx: Context) -> Predictor:
        """At the client: the model that it will use."""

    def check_upload(self, upload: Upload) -> None:
        """At the server, before ``fuse``: refuse an upload of a stranger that makes no sense for this method.

        Override it where an upload holds anything but one network of the task's architecture.
        """
        task = upload.task
        if upload.extra and self.rounds == 1:
            raise UploadError("manifest", f"{self.name} takes no 'extra', but the upload says {list(upload.extra)[:3]}")
        validate.check_class_counts(upload.class_counts, len(task.classes), upload.num_samples)
        if "weights" in self.needs:
            validate.check_model_state(upload.tensors, task.model, task.channels, len(task.classes), task.image_size)
        elif upload.tensors:
            raise UploadError("extra_tensor", f"{self.name} takes no tensors, but the upload holds some")


def check_needs(method: Method[Any], uploads: Sequence[Upload]) -> None:
    """Refuse, before any server work, uploads that lack what the method declared to need."""
    for upload in uploads:
        statistics = any(name.endswith("running_var") for name in upload.tensors)
        has = {
            "weights": bool(upload.tensors),
            "bn_stats": statistics,
            "class_counts": upload.class_counts is not None,
            "num_samples": upload.num_samples is not None,
        }
        for need in sorted(method.needs):
            if not has[need]:
                raise MethodError(f"needs_{need}", f"{method.name} needs {need}, which {upload.client!r} did not send")


def mixed_models_problem(method: Method[Any], architectures: Iterable[str], model: str, called: str = "") -> str:
    """Why these clients cannot take part, where one has another architecture than the server; empty if they can."""
    others = sorted(set(architectures) - {model})
    if not others or not method.refuses_mixed_models:
        return ""
    problem = f"{called or method.name} cannot work with clients of another architecture than the run's {model}"
    return f"{problem} ({', '.join(others)}): {method.refuses_mixed_models}"


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
        ctx.train_local_models(clients)
    done, replies = _newest_round(method, clients, ctx)
    if done:
        _end_round(method, clients, replies, done, ctx, after_round)  # a kill may have come before its end
    for number in range(done + 1, method.rounds + 1):
        folder = round_folder(ctx, method.rounds, number)
        for client, previous in zip_longest(clients, replies):
            _step(ctx, "upload", folder, client, partial(method.upload, client, ctx, previous))
        uploads = _read_shared(ctx.store, _paths("uploads", folder, clients), Upload.unpack)
        check_needs(method, uploads)
        replies = _fuse(method, uploads, folder, ctx)
        if method.rounds > 1:
            _end_round(method, clients, replies, number, ctx, after_round)
    made: dict[int, bytes] = {}  # where the client plays no part in the result, equal replies give equal models
    for client, reply in zip(clients, replies, strict=True):
        make = partial(method.personalize, client, reply, ctx)
        known = None if method.personal else made.get(id(reply))
        made[id(reply)] = _step(ctx, "personalize", ctx.scope, client, make, known)
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


def file_name(client: str) -> str:
    """A file name for any client name, however strange."""
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", client):
        return client
    return "client." + hashlib.sha256(client.encode()).hexdigest()[:16]


_FOLDERS = {"upload": "uploads", "personalize": "models"}


class _Packable(Protocol):
    def pack(self) -> bytes: ...


def _step(
    ctx: Context, verb: str, folder: str, client: Client, make: Callable[[], _Packable], known: bytes | None = None
) -> bytes:
    """The bytes of one client's step: from the store if it is done, else made (or known), recorded, timed and kept."""
    name = f"{folder}/{file_name(client.name)}"
    path = f"{_FOLDERS[verb]}/{name}.safetensors"
    data = ctx.store.load(path)
    if data is None:
        if known is None:
            with ctx.measured(verb, name):
                known = make().pack()
        data = known
        ctx.store.save(path, data)
    return data


def _fuse(method: Method[Any], uploads: Sequence[Upload], folder: str, ctx: Context) -> list[Reply]:
    """The server's step: all replies from the store, or all made anew."""
    paths = [f"replies/{folder}/{file_name(upload.client)}.safetensors" for upload in uploads]
    if any(ctx.store.load(path) is None for path in paths):
        with ctx.measured("fuse", f"{folder}/server"):
            replies = method.fuse(uploads, ctx)
        if len(replies) != len(uploads):
            raise MethodError("replies", f"{method.name} made {len(replies)} replies to {len(uploads)} uploads")
        packed = {id(reply): reply for reply in replies}  # clients often get the same reply: encode it once
        data = {key: reply.pack() for key, reply in packed.items()}
        for path, reply in zip(paths, replies, strict=True):
            ctx.store.save(path, data[id(reply)])
    return _read_shared(ctx.store, paths, Reply.unpack)


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
    import numpy as np

    patients = None
    if all(client.patients is not None for client in clients):
        patients = np.concatenate([client.patients for client in clients if client.patients is not None])
    everyone = Client(
        "all-sites-pooled",
        np.concatenate([client.images for client in clients]),
        np.concatenate([client.labels for client in clients]),
        patients,
    )
    data = _step(ctx, "personalize", ctx.scope, everyone, partial(method.personalize, everyone, Reply(), ctx))
    predictor = _read(f"models/{ctx.scope}/{everyone.name}.safetensors", data, Predictor.unpack)
    return {client.name: predictor for client in clients}


def records(ctx: Context, clients: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """The records of a finished method in a fixed order: earlier rounds, uploads, server, personalisation."""
    folder = round_folder(ctx, rounds, rounds)
    names = [f"records/upload/{folder}/{file_name(c)}.json" for c in clients]
    names += [f"records/fuse/{folder}/server.json"]
    names += [f"records/personalize/{ctx.scope}/{file_name(c)}.json" for c in [*clients, "all-sites-pooled"]]
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
    return _load_records(ctx, [_round_record(ctx, number) for number in range(1, rounds + 1)]) if rounds > 1 else []


def _load_records(ctx: Context, names: Iterable[str]) -> list[dict[str, Any]]:
    found = [ctx.store.load(name) for name in names]
    return [json.loads(data) for data in found if data is not None]
