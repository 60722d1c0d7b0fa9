"""What surrounds a method while it works: the task, named random streams, storage, records and progress."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from fedbicross import seeds
from fedbicross.bundle.format import canonical_json
from fedbicross.engine.recipe import Training
from fedbicross.errors import MethodError
from fedbicross.stages import Part, Stage
from fedbicross.surroundings import MemoryStore as MemoryStore
from fedbicross.surroundings import Progress as Progress
from fedbicross.surroundings import Silent as Silent
from fedbicross.surroundings import Stopwatch as Stopwatch
from fedbicross.surroundings import Store as Store
from fedbicross.surroundings import Task as Task

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from fedbicross.engine.spread import Workers
    from fedbicross.engine.train import Trained
    from fedbicross.exchange import Client
    from fedbicross.models.encoders import EncoderSpec


@runtime_checkable
class _HasImages(Protocol):
    """The part of a client that is encoded."""

    @property
    def name(self) -> str: ...
    @property
    def images(self) -> np.ndarray: ...
    @property
    def digest(self) -> str: ...
    @property
    def label(self) -> str: ...


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
    streams: tuple[str, ...] = ()  # before the names of random streams and checkpoints: a later shot has its own
    seconds_between_stages: float = 30.0
    _last_save: float = field(default_factory=time.monotonic)
    watch: Stopwatch = field(default_factory=Stopwatch)

    def rng(self, *names: str) -> np.random.Generator:
        """A NumPy stream for a named purpose."""
        return seeds.numpy_rng(self.seed, *self.streams, *names)

    def torch_rng(self, *names: str, device: str = "cpu") -> torch.Generator:
        """A torch stream for a named purpose."""
        return seeds.torch_rng(self.seed, *self.streams, *names, device=device)

    def at_shot(self, shot: int) -> Context:
        """The same context with random streams and checkpoints of this shot alone; the first has the plain ones."""
        return replace(self, streams=(f"shot-{shot}",) if shot > 1 else ())

    @contextmanager
    def measured(self, verb: str, name: str) -> Iterator[None]:
        """One call of a verb: a fresh record, kept when it succeeds, and its time, less the shared local training."""
        outer, self.record = self.record, Record()
        self.watch.begin(verb, name)
        try:
            yield
            self.store.save(f"records/{verb}/{name}.json", canonical_json(self.record.as_json()).encode())
            self.event(event=verb, scope=self.scope, name=name, seconds=self.watch.lap())
        finally:
            self.record, self.watch.at_work = outer, None

    # --- checkpoints of named stages -----------------------------------------------------------------

    def stage(
        self, name: str, label: str, total: int, /, *, keep_end: bool = False, **parts: Part | Sequence[Part]
    ) -> Stage:
        """``total`` steps of work on these parts, begun or gone on with (`fedbicross.stages`)."""
        return Stage(self, name, label, total, parts, keep_end)

    def load_stage(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """What ``save_stage`` kept under this name, or None."""
        from fedbicross.bundle import unpack

        data = self.store.load(self._stage(name))
        return None if data is None else unpack(data, "stage")

    def save_stage(self, name: str, tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
        """Checkpoint a stage, so that a killed run goes on from here."""
        from fedbicross.bundle import pack

        self.store.save(self._stage(name), pack("stage", tensors, info))
        if self.watch.at_work is not None:  # what a checkpoint keeps of the work it also keeps of its time
            verb, what = self.watch.at_work
            self.event(event="partial", verb=verb, scope=self.scope, name=what, seconds=self.watch.lap())

    def save_stage_when_due(
        self, name: str, state: Callable[[], tuple[Mapping[str, Tensor], Mapping[str, Any]]]
    ) -> None:
        """Checkpoint now and then: often enough to lose little, rarely enough to cost little."""
        if time.monotonic() - self._last_save >= self.seconds_between_stages:
            self.save_stage(name, *state())
            self._last_save = time.monotonic()

    def drop_stage(self, name: str) -> None:
        """Forget one checkpoint."""
        self.store.drop(self._stage(name))

    def drop_stages(self) -> None:
        """Forget this method's checkpoints."""
        self.store.drop(f"stages/{self.scope}")

    def _stage(self, name: str) -> str:
        return "/".join(["stages", self.scope, *self.streams, f"{name}.safetensors"])

    # --- client models, trained once and shared by all methods ---------------------------------------

    def local_model(self, client: Client) -> Trained:
        """The client's own network by the run's recipe: trained on first use, then shared by content."""
        from fedbicross.engine.train import Trained

        key = self.local_model_key(client)
        if key not in self.record.local_models:
            self.record.local_models.append(key)
        began = time.perf_counter()
        self.train_local_models([client])
        result = Trained.unpack(self.store.load(_model_file(key)) or b"")
        self.watch.shared_seconds += time.perf_counter() - began
        self.record.flops += result.flops
        return result

    def train_local_models(self, clients: Sequence[Client]) -> None:
        """Train those of the clients' own networks that are not there yet, on a GPU side by side."""
        from fedbicross.engine.train import side_by_side

        keys = {self.local_model_key(client): client for client in clients}
        missing = {key: client for key, client in keys.items() if not self.store.size(_model_file(key))}
        if not missing:
            return
        began = time.perf_counter()
        jobs = [self._local_training(key, client) for key, client in missing.items()]
        side_by_side(jobs, self.device if self.fast else "cpu")
        seconds = (time.perf_counter() - began) / len(jobs)  # a fair share: they ran together
        for key, client in missing.items():
            self.event(event="trained", key=key, client=client.name, seconds=seconds)

    def _local_training(self, key: str, client: Client) -> Generator[None, None, Trained]:
        """One client's training, which begins at the first ``next`` and keeps its result."""
        stream = ("init",) if self.training.init == "shared" else ("init", client.name)
        model = self.new_model(seeds.torch_rng(self._training_seed, *stream), self.model_of(client))
        update = self.progress.start(f"training {client.label}", self.training.epochs)
        trained = yield from self._train(
            client,
            model,
            self.training,
            store=self.store,
            checkpoint=f"stages/training/{key}.safetensors",
            on_epoch=lambda epoch, entry: update(epoch, _epoch_note(entry)),
        )
        self.store.save(_model_file(key), trained.pack())
        return trained

    def train_further(
        self,
        client: Client,
        start: Mapping[str, Tensor] | None,
        *,
        epochs: int,
        first_epoch: int,
        total_epochs: int,
    ) -> dict[str, Tensor]:
        """A short visit of training from ``start`` (none: the shared initialisation); the last epoch's weights."""
        model = self.new_model(seeds.torch_rng(self._training_seed, "init"), self.model_of(client))
        if start is not None:
            model.load_state_dict(dict(start))
        last = self.training.model_copy(update={"select": "last"})
        from fedbicross.engine.train import side_by_side

        job = self._train(client, model, last, epochs=epochs, first_epoch=first_epoch, total_epochs=total_epochs)
        (trained,) = side_by_side([job])
        self.record.flops += trained.flops
        return trained.state

    def retrain(
        self, client: Client, start: Mapping[str, Tensor], *, visit: str, epochs: int | None = None
    ) -> dict[str, Tensor]:
        """Local training once more, by the run's whole recipe but from ``start``; ``visit`` names its batches.

        The images held back for validation are those of the first training: none of them has been trained on.
        """
        from fedbicross import models
        from fedbicross.engine.train import side_by_side

        model = models.build(*self.architecture_of(client))
        try:
            model.load_state_dict(dict(start))
        except RuntimeError:
            text = f"{client.label} has a {self.model_of(client)}, which the weights of the reply do not fit"
            raise MethodError("wrong_weights", text) from None
        count = self.training.epochs if epochs is None else epochs
        update = self.progress.start(f"training {client.label}, {visit}", count)
        job = self._train(
            client,
            model,
            self.training,
            epochs=count,
            visit=(visit,),
            store=self.store,
            checkpoint=self._stage(f"{visit}-{self.local_model_key(client)}"),
            on_epoch=lambda epoch, entry: update(epoch, _epoch_note(entry)),
        )
        (trained,) = side_by_side([job])
        self.record.flops += trained.flops
        return trained.state

    def _train(
        self, client: Client, model: torch.nn.Module, recipe: Training, **options: Any
    ) -> Generator[None, None, Trained]:
        from fedbicross import models
        from fedbicross.engine.train import training

        return training(
            model,
            self.model_of(client),
            client.images,
            client.labels,
            client.patients,
            recipe,
            seed=self._training_seed,
            stream=("training", client.name),
            label=client.label,
            forward_flops=models.forward_flops(*self.architecture_of(client)),
            device=self.device,
            precision=self.precision,
            fast=self.fast,
            **options,
        )

    def local_model_key(self, client: Client) -> str:
        """Content address: the same data, recipe, architecture and seed give the same network."""
        parts = {
            "client": client.name,
            "data": client.digest,
            "task": self.task_of(client).as_json(),
            "training": self.training.model_dump(),
            "seed": self._training_seed,
            "precision": f"{self.device}-{self.precision}",
        }
        return hashlib.sha256(canonical_json(parts).encode()).hexdigest()[:32]

    # --- features of a frozen encoder, computed once and shared by all methods ------------------------

    def features(self, source: _HasImages | np.ndarray, spec: EncoderSpec) -> Tensor:
        """Tokens [n, 1 + L, dim] of a client's images (or of any uint8 images), shared by the content of each image."""
        from fedbicross.engine.tokens import boxes, token_sequences
        from fedbicross.models.encoders import load_encoder

        images = source.images if isinstance(source, _HasImages) else source
        label = source.label if isinstance(source, _HasImages) else "images"
        times = [time.perf_counter()]
        update = self.progress.start(f"encoding {label}", 1)

        def on_view(done: int, total: int) -> None:
            times.append(time.perf_counter())
            update(done // total, f"view {done} of {total}")

        tokens = token_sequences(images, spec, self.device, self.store, on_view)
        encoder = load_encoder(spec.name, self.device, spec.size)
        self.record.flops += encoder.flops * tokens.shape[0] * tokens.shape[1]
        if isinstance(source, _HasImages):  # like local training: every method that uses a view is charged in full
            parts = {"data": source.digest, "encoder": spec.name, "size": encoder.size, "digest": encoder.digest}
            for box, (start, end) in zip(
                boxes(images.shape[1], spec.window, spec.stride), pairwise(times), strict=True
            ):
                place = {**parts, "box": list(box), "device": self.device}
                key = "features-" + hashlib.sha256(canonical_json(place).encode()).hexdigest()[:32]
                if key not in self.record.local_models:
                    self.record.local_models.append(key)
                self.event(event="encoded", key=key, client=source.name, seconds=end - start)
            self.watch.shared_seconds += times[-1] - times[0]
        return tokens

    def shared(self, kind: str, client: Client, settings: Mapping[str, Any], make: Callable[[], bytes]) -> bytes:
        """Bytes that a client makes once and that methods share: the same data, settings and seed give the same.

        As with local training, every method that uses them is charged the full time.
        """
        parts = {
            "client": client.name,
            "data": client.digest,
            "task": self.task.as_json(),
            "settings": dict(settings),
            "validation": self.training.validation,
            "seed": self.seed,
            "precision": f"{self.device}-{self.precision}",
        }
        key = f"{kind}-{hashlib.sha256(canonical_json(parts).encode()).hexdigest()[:32]}"
        if key not in self.record.local_models:
            self.record.local_models.append(key)
        began, inner = time.perf_counter(), self.watch.shared_seconds
        data = self.store.load(f"client_models/{key}.safetensors")
        if data is None:
            with self.watch.aside():
                data = make()
            self.store.save(f"client_models/{key}.safetensors", data)
            seconds = time.perf_counter() - began - (self.watch.shared_seconds - inner)
            self.event(event="trained", key=key, client=client.name, seconds=seconds)
        self.watch.shared_seconds = inner + time.perf_counter() - began
        return data

    def new_model(self, rng: torch.Generator, name: str | None = None) -> torch.nn.Module:
        """A freshly initialised network of the task's architecture, or of the one named."""
        from fedbicross import models

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
    def _training_seed(self) -> int:
        return self.seed if self.training.seed is None else self.training.seed


def _model_file(key: str) -> str:
    return f"client_models/{key}.safetensors"


def _epoch_note(entry: Mapping[str, Any]) -> str:
    accuracy = entry.get("val_accuracy")
    return f"loss {entry['train_loss']:.3f}" + ("" if accuracy is None else f", validation {accuracy:.1%}")
