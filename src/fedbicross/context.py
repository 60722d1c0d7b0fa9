"""What a method is given to work with: the task, named random streams, storage, records, progress and a stopwatch."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from fedbicross import models, privacy, seeds
from fedbicross.bundle.format import canonical_json, pack, unpack
from fedbicross.engine.recipe import Training
from fedbicross.stages import Part, Stage

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from fedbicross.client_models import ClientModels
    from fedbicross.engine.train import Trained
    from fedbicross.engine.workers import Workers
    from fedbicross.messages import Client
    from fedbicross.models.encoders import EncoderSpec
    from fedbicross.privacy.noise import Noise


@dataclass(frozen=True)
class Task:
    """What all sites agreed on before anyone trained; of an upload, with the architecture of its client."""

    classes: tuple[str, ...]
    image_size: int
    channels: int
    model: str  # of the server and its students; of clients too, unless they bring their own

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        return self.channels, self.image_size, self.image_size

    def as_json(self) -> dict[str, Any]:
        """The task as it stands in a manifest."""
        return {**asdict(self), "classes": list(self.classes)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Task:
        """Read back ``as_json``."""
        return cls(tuple(value["classes"]), value["image_size"], value["channels"], value["model"])


class Store(Protocol):
    """Named bytes that survive a kill; a name is a relative path."""

    def load(self, name: str) -> bytes | None:
        """The bytes, or None."""
        ...

    def lists(self, name: str) -> bool:
        """Whether it was ever saved, or a kill came just before."""
        ...

    def size(self, name: str) -> int:
        """Length in bytes; 0 where there is nothing."""
        ...

    def save(self, name: str, data: bytes) -> None:
        """Keep the bytes, all or nothing."""
        ...

    def drop(self, prefix: str) -> None:
        """Forget a name, or every name in a folder."""
        ...


class MemoryStore:
    """A store that lives as long as the process."""

    def __init__(self) -> None:
        self._content: dict[bytes, bytes] = {}  # equal bytes are kept once
        self._names: dict[str, bytes] = {}

    def load(self, name: str) -> bytes | None:
        """The bytes, or None."""
        digest = self._names.get(name)
        return None if digest is None else self._content[digest]

    def lists(self, name: str) -> bool:
        """Whether it is there."""
        return name in self._names

    def size(self, name: str) -> int:
        """Length in bytes; 0 where there is nothing."""
        return len(self.load(name) or b"")

    def save(self, name: str, data: bytes) -> None:
        """Keep the bytes."""
        digest = hashlib.sha256(data).digest()
        self._content.setdefault(digest, data)
        self._names[name] = digest

    def drop(self, prefix: str) -> None:
        """Forget a name, or every name in a folder, and the bytes that no name refers to any more."""
        for name in [n for n in self._names if n == prefix or n.startswith(prefix.rstrip("/") + "/")]:
            del self._names[name]
        used = set(self._names.values())
        self._content = {digest: data for digest, data in self._content.items() if digest in used}


class Progress(Protocol):
    """Tells a person how far the work is."""

    def start(self, label: str, total: int) -> Callable[[int, str], None]:
        """Begin a piece of work; the function returned takes (done so far, a short note)."""
        ...

    def say(self, message: str) -> None:
        """One line for the person."""
        ...


class Silent:
    """Progress for tests and libraries."""

    def start(self, label: str, total: int) -> Callable[[int, str], None]:
        """Ignore the work."""
        del label, total
        return lambda done, note: None

    def say(self, message: str) -> None:
        """Ignore the line."""
        del message


@dataclass
class Stopwatch:
    """Times the running verb, without the training and encoding that methods share. Copies of a context share one."""

    at_work: tuple[str, str] | None = None  # verb and name
    shared_seconds: float = 0.0  # of training and encoding, which are charged to every method that uses them
    _seen: tuple[float, float] = (0.0, 0.0)

    def begin(self, verb: str, name: str) -> None:
        """A verb starts."""
        self.at_work, self._seen = (verb, name), (time.perf_counter(), self.shared_seconds)

    def lap(self) -> float:
        """Seconds since the last call, so that each second is counted once."""
        (began, shared), self._seen = self._seen, (time.perf_counter(), self.shared_seconds)
        return max(self._seen[0] - began - (self.shared_seconds - shared), 0.0)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While shared work runs, checkpoints count no time: it is counted as a whole when it is done."""
        outer, self.at_work = self.at_work, None
        try:
            yield
        finally:
            self.at_work = outer


@dataclass
class Record:
    """What one call of a verb leaves behind for the report: costs, warnings, diagnosis. JSON only, no clock times."""

    flops: int = 0
    warnings: list[str] = field(default_factory=list)
    diagnosis: dict[str, dict[str, Any]] = field(default_factory=dict)
    local_models: list[str] = field(default_factory=list)  # keys of the client models and features used

    def warn(self, message: str) -> None:
        """Say in words what went wrong and which setting to change."""
        if message not in self.warnings:
            self.warnings.append(message)

    def add(self, kind: str, title: str, value: Any) -> None:
        """Add to the diagnosis: kind is scalars, curves, heatmaps, heatmaps_over_time, tables or image_strips."""
        self.diagnosis.setdefault(kind, {})[title] = value

    def as_json(self) -> dict[str, Any]:
        """The record as plain JSON."""
        return dict(vars(self))


def _no_event(**fields: Any) -> None:
    del fields


@dataclass
class Context:
    """Handed to every verb of a method. Holds no data of any client."""

    task: Task
    training: Training = field(default_factory=lambda: Training(recipe="paper"))
    seed: int = 0
    device: str = "cpu"
    precision: str = "fp32"
    fast: bool = False  # compiled and recorded steps; a GPU only
    workers: Workers | None = None  # other processes that make trajectories; none: all is done here
    scope: str = "seed-0/method"  # where this method's files live in the store
    store: Store = field(default_factory=MemoryStore)
    progress: Progress = field(default_factory=Silent)
    record: Record = field(default_factory=Record)
    event: Callable[..., None] = _no_event
    client_models: Mapping[str, str] = field(default_factory=dict)  # architecture by client; else the task's
    streams: tuple[str, ...] = ()  # prefix of the names of random streams and checkpoints: a later shot has its own
    secret_noise: bool = False  # noise of private releases from the operating system: where real sites take part
    seconds_between_stages: float = 30.0
    _last_save: float = field(default_factory=time.monotonic)
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    def rng(self, *names: str) -> np.random.Generator:
        """A NumPy stream for a named purpose."""
        return seeds.numpy_rng(self.seed, *self.streams, *names)

    def torch_rng(self, *names: str, device: str = "cpu") -> torch.Generator:
        """A torch stream for a named purpose."""
        return seeds.torch_rng(self.seed, *self.streams, *names, device=device)

    def noise(self, *names: str) -> Noise:
        """The noise of a private release; in a simulation a named stream, which whoever knows the seed can draw."""
        return privacy.noise.Secret() if self.secret_noise else privacy.noise.Stream(self.rng(*names))

    def at_shot(self, shot: int) -> Context:
        """The same context with random streams and checkpoints of this shot alone; the first has the plain ones."""
        return replace(self, streams=(f"shot-{shot}",) if shot > 1 else ())

    @contextmanager
    def measured(self, verb: str, name: str) -> Iterator[None]:
        """One call of a verb: a fresh record, kept when it succeeds, and its time, less the shared local training."""
        outer, self.record = self.record, Record()
        self.stopwatch.begin(verb, name)
        try:
            yield
            self.store.save(f"records/{verb}/{name}.json", canonical_json(self.record.as_json()).encode())
            self.event(event=verb, scope=self.scope, name=name, seconds=self.stopwatch.lap())
        finally:
            self.record, self.stopwatch.at_work = outer, None

    # --- checkpoints of named stages -----------------------------------------------------------------

    def stage(
        self, name: str, label: str, total: int, /, *, keep_end: bool = False, **parts: Part | Sequence[Part]
    ) -> Stage:
        """``total`` steps of work on these parts, new or resumed (`fedbicross.stages`)."""
        return Stage(self, name, label, total, parts, keep_end)

    def load_stage(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """What ``save_stage`` kept under this name, or None."""
        data = self.store.load(self.stage_file(name))
        return None if data is None else unpack(data, "stage")

    def save_stage(self, name: str, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
        """Checkpoint a stage, so that a killed run goes on from here."""
        self.store.save(self.stage_file(name), pack("stage", tensors, info))
        if self.stopwatch.at_work is not None:  # a resumed run does not spend this time again
            verb, what = self.stopwatch.at_work
            self.event(event="partial", verb=verb, scope=self.scope, name=what, seconds=self.stopwatch.lap())

    def save_stage_when_due(
        self, name: str, state: Callable[[], tuple[Mapping[str, Tensor], Mapping[str, Any]]]
    ) -> None:
        """Checkpoint now and then: often enough to lose little, rarely enough to cost little."""
        if time.monotonic() - self._last_save >= self.seconds_between_stages:
            self.save_stage(name, *state())
            self._last_save = time.monotonic()

    def drop_stage(self, name: str) -> None:
        """Forget one checkpoint."""
        self.store.drop(self.stage_file(name))

    def drop_stages(self) -> None:
        """Forget this method's checkpoints."""
        self.store.drop(f"stages/{self.scope}")

    def stage_file(self, name: str) -> str:
        """Where a stage's checkpoint lies in the store."""
        return "/".join(["stages", self.scope, *self.streams, f"{name}.safetensors"])

    # --- what clients train and encode: made by `client_models`, once, and shared by all methods ---------

    @property
    def models(self) -> ClientModels:
        """Makes the clients' networks and features."""
        from fedbicross.client_models import ClientModels  # torch comes with it

        return ClientModels(self)

    def with_loss(self, loss: str | None) -> Context:
        """The same context whose clients train with this loss; none: with that of the run's recipe."""
        if loss is None or loss == self.training.loss:
            return self
        return replace(self, training=self.training.model_copy(update={"loss": loss}))

    @property
    def openly(self) -> Context:
        """The same context whose clients train without differential privacy: for what never leaves them."""
        if self.training.dp is None:
            return self
        return replace(self, training=self.training.model_copy(update={"dp": None}))

    def validation_rows(self, client: Client) -> np.ndarray:
        """Which of a client's images its own training held back."""
        return self.models.validation_rows(client)

    def local_model(self, client: Client) -> Trained:
        """The client's own network by the run's recipe."""
        return self.models.local_model(client)

    def train_local_models(self, clients: Sequence[Client]) -> None:
        """Train the clients' own networks ahead."""
        self.models.train_local_models(clients)

    def features(self, source: Client | np.ndarray, spec: EncoderSpec) -> Tensor:
        """Tokens of images by a frozen encoder."""
        return self.models.features(source, spec)

    def new_model(self, rng: torch.Generator, name: str | None = None) -> torch.nn.Module:
        """A freshly initialised network of the task's architecture, or of the one named."""
        model = models.build(name or self.task.model, *self.architecture[1:])
        models.initialise(model, rng, self.training.init_scheme)
        return model

    @property
    def architecture(self) -> tuple[str, int, int, int]:
        """Arguments of ``models.build`` for the server's model of this task."""
        return self.task.model, self.task.channels, len(self.task.classes), self.task.image_size

    def model_of(self, client: Client) -> str:
        """The architecture that this client trains; the server's unless it brings its own."""
        return self.client_models.get(client.name, self.task.model)

    def task_of(self, client: Client) -> Task:
        """The task as it stands in this client's upload: with its own architecture."""
        return replace(self.task, model=self.model_of(client))

    def architecture_of(self, client: Client) -> tuple[str, int, int, int]:
        """Arguments of ``models.build`` for this client's own network."""
        return self.model_of(client), *self.architecture[1:]

    @property
    def training_seed(self) -> int:
        """The seed of everything that local training draws: the recipe's own, or else the run's."""
        return self.seed if self.training.seed is None else self.training.seed
