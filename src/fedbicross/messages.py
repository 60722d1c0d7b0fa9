"""What travels in a federation: a client's images stay in `Client`; `Upload`, `Reply` and `Predictor` are files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from fedbicross import engine
from fedbicross.bundle import pack, unpack, validate
from fedbicross.context import Store, Task
from fedbicross.errors import UploadError
from fedbicross.privacy.statement import Statement
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


class Agreement(Settings):
    """What the sites of a federation agreed on besides the task: signed with every file that travels."""

    members: str  # SHA-256 over the names and keys of all sites and the server
    purpose: str
    expires: str | None  # the last day, in UTC


class _UploadManifest(Settings):
    client: str
    task: Task
    preprocessing: str
    class_counts: list[int] | None
    num_samples: int | None
    extra: dict[str, Any]
    run_id: str | None
    agreement: Agreement | None
    privacy: Statement | None = None


class _ReplyManifest(Settings):
    client: str | None
    info: dict[str, Any]
    run_id: str | None
    agreement: Agreement | None


class _PredictorManifest(Settings):
    task: Task
    architectures: list[str]
    combine: Literal["mean_logits", "mean_probs", "class_weighted", "consensus"]
    encoder: dict[str, Any] | None = None
    temperature: float = 1.0


MANIFESTS: dict[str, type[Settings]] = {"upload": _UploadManifest, "reply": _ReplyManifest}  # of what travels


def _plain(agreement: Agreement | None) -> dict[str, Any] | None:
    return None if agreement is None else agreement.model_dump()


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
    agreement: Agreement | None = None  # likewise
    privacy: Statement | None = None  # none: without differential privacy
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
            "agreement": _plain(self.agreement),
        }
        if self.privacy is not None:
            info["privacy"] = self.privacy.model_dump()
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
    agreement: Agreement | None = None

    def pack(self) -> bytes:
        """The bytes that come back."""
        about = {"client": self.client, "run_id": self.run_id, "agreement": _plain(self.agreement)}
        return pack("reply", self.tensors, {**about, "info": dict(self.info)})

    @classmethod
    def unpack(cls, data: bytes) -> Reply:
        """Read a reply back."""
        tensors, info = unpack(data, "reply")
        return cls(tensors, **dict(validate.read_manifest(_ReplyManifest, info)))

    @property
    def empty(self) -> bool:
        """Nothing was sent back."""
        return not self.tensors and not self.info


TABLES = ("class_weights", "constant", "log_prior", "referral")  # of a predictor, beside its networks


@dataclass(frozen=True)
class Predictor:
    """What a hospital ends with: one network, several and a rule to combine them, or a constant answer."""

    task: Task
    architectures: tuple[str, ...] = ()
    states: tuple[dict[str, Tensor], ...] = ()
    combine: Literal["mean_logits", "mean_probs", "class_weighted", "consensus"] = "mean_logits"
    class_weights: Tensor | None = None  # [networks, classes], for class_weighted and consensus
    constant: Tensor | None = None  # [classes]
    encoder: Mapping[str, Any] | None = None  # EncoderSpec and digest: the networks are then heads on its features
    log_prior: Tensor | None = None  # [classes], for consensus: added to what the networks say
    referral: Tensor | None = None  # [classes]: when the last network answers alone (`engine.combine.refer`)
    temperature: float = 1.0  # the answer is p^(1/T), renormalised (`parts.calibration`): how sure, never which class

    def probabilities(
        self, images: np.ndarray, device: str = "cpu", precision: str = "fp32", store: Store | None = None
    ) -> np.ndarray:
        """Class probabilities [n,C] for uint8 images [n,H,W,C]; a store keeps the features of a frozen encoder."""
        return engine.predict.probabilities(self, images, device, precision, store=store)

    def pack(self) -> bytes:
        """The bytes of the final model."""
        tensors = pack_states(self.states)
        tensors |= {name: table for name in TABLES if (table := getattr(self, name)) is not None}
        info: dict[str, Any] = {"task": self.task.as_json(), "architectures": list(self.architectures)}
        info["combine"] = self.combine
        info |= {} if self.encoder is None else {"encoder": dict(self.encoder)}
        info |= {} if self.temperature == 1 else {"temperature": self.temperature}
        return pack("predictor", tensors, info)

    @classmethod
    def unpack(cls, data: bytes) -> Predictor:
        """Read a final model back."""
        tensors, info = unpack(data, "predictor")
        manifest = validate.read_manifest(_PredictorManifest, info)
        architectures = tuple(manifest.architectures)
        states = unpack_states(tensors, len(architectures))
        tables = {name: tensors.get(name) for name in TABLES}
        more: dict[str, Any] = {"encoder": manifest.encoder, "temperature": manifest.temperature, **tables}
        return cls(manifest.task, architectures, tuple(states), manifest.combine, **more)


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


_DEVICES = {"CON", "PRN", "AUX", "NUL", *(f"{port}{n}" for port in ("COM", "LPT") for n in range(10))}  # on Windows


def file_name(client: str) -> str:
    """A file name for any client name, however strange."""
    device = client.partition(".")[0].upper() in _DEVICES
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", client) and not device:
        return client
    return "client." + hashlib.sha256(client.encode()).hexdigest()[:16]
