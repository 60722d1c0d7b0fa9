"""What clients train and encode: their own networks, features of frozen encoders, and parts that methods share.

Each is made once and kept by its content, so that every method of a run uses the same bytes; each method that uses one
is charged its full cost.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedbicross import models, seeds
from fedbicross.bundle.format import canonical_json
from fedbicross.engine.recipe import Training
from fedbicross.engine.tokens import boxes, token_sequences
from fedbicross.engine.train import Trained, split_validation, train_together, training
from fedbicross.errors import MethodError
from fedbicross.models.encoders import EncoderSpec, load_encoder

if TYPE_CHECKING:
    from fedbicross.context import Context
    from fedbicross.messages import Client
    from fedbicross.privacy.noise import Noise


class ClientModels:
    """Makes them, with the task, recipe, streams and store of a context. Has no state of its own."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx

    def local_model(self, client: Client) -> Trained:
        """The client's own network by the run's recipe: trained on first use, then shared by content."""
        key = self.local_model_key(client)
        self._note_use(key)
        began = time.perf_counter()
        self.train_local_models([client])
        result = Trained.unpack(self.ctx.store.load(_model_file(key)) or b"")
        self.ctx.stopwatch.shared_seconds += time.perf_counter() - began
        self.ctx.record.flops += result.flops
        return result

    def forget(self, client: Client) -> None:
        """Drop the client's own network from the store."""
        self.ctx.store.drop(_model_file(self.local_model_key(client)))

    def validation_rows(self, client: Client) -> np.ndarray:
        """Which of a client's images its own training held back."""
        rng = seeds.numpy_rng(self.ctx.training_seed, "training", client.name, "validation-split")
        return split_validation(client.labels, client.patients, self.ctx.training.validation, rng)[1]

    def train_local_models(self, clients: Sequence[Client]) -> None:
        """Train those of the clients' own networks that are not there yet, on a GPU side by side."""
        keys = {self.local_model_key(client): client for client in clients}
        missing = {key: client for key, client in keys.items() if not self.ctx.store.size(_model_file(key))}
        if not missing:
            return
        began = time.perf_counter()
        jobs = [self._local_training(key, client) for key, client in missing.items()]
        train_together(jobs, self.ctx.device if self.ctx.fast else "cpu")
        seconds = (time.perf_counter() - began) / len(jobs)  # a fair share: they ran together
        for key, client in missing.items():
            self.ctx.event(event="trained", key=key, client=client.name, seconds=seconds)

    def _local_training(self, key: str, client: Client) -> Generator[None, None, Trained]:
        """One client's training, which begins at the first ``next`` and keeps its result."""
        model = self.first_model(client.name, self.ctx.model_of(client))
        update = self.ctx.progress.start(f"training {client.label}", self.ctx.training.as_trained.epochs)
        trained = yield from self._train(
            client,
            model,
            self.ctx.training,
            store=self.ctx.store,
            checkpoint=f"stages/training/{key}.safetensors",
            on_epoch=lambda epoch, entry: update(epoch, _epoch_note(entry)),
        )
        self.ctx.store.save(_model_file(key), trained.pack())
        return trained

    def first_model(self, client: str, architecture: str) -> torch.nn.Module:
        """The network with which a client's training begins: everybody who knows the recipe can make it."""
        stream = ("init",) if self.ctx.training.init == "shared" else ("init", client)
        return self.ctx.new_model(seeds.torch_rng(self.ctx.training_seed, *stream), architecture)

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
        model = self.ctx.new_model(seeds.torch_rng(self.ctx.training_seed, "init"), self.ctx.model_of(client))
        if start is not None:
            model.load_state_dict(dict(start))
        last = self.ctx.training.model_copy(update={"select": "last"})
        job = self._train(client, model, last, epochs=epochs, first_epoch=first_epoch, total_epochs=total_epochs)
        (trained,) = train_together([job])
        self.ctx.record.flops += trained.flops
        return trained.state

    def retrain(
        self, client: Client, start: Mapping[str, Tensor], *, visit: str, epochs: int | None = None
    ) -> dict[str, Tensor]:
        """Local training once more, by the run's whole recipe but from ``start``; ``visit`` names its batches.

        The images held back for validation are those of the first training: none of them has been trained on.
        """
        model = models.build(*self.ctx.architecture_of(client))
        try:
            model.load_state_dict(dict(start))
        except RuntimeError:
            text = f"{client.label} has a {self.ctx.model_of(client)}, which the weights of the reply do not fit"
            raise MethodError("wrong_weights", text) from None
        count = self.ctx.training.epochs if epochs is None else epochs
        update = self.ctx.progress.start(f"training {client.label}, {visit}", count)
        job = self._train(
            client,
            model,
            self.ctx.training,
            epochs=count,
            visit=(visit,),
            store=self.ctx.store,
            checkpoint=self.ctx.stage_file(f"{visit}-{self.local_model_key(client)}"),
            on_epoch=lambda epoch, entry: update(epoch, _epoch_note(entry)),
        )
        (trained,) = train_together([job])
        self.ctx.record.flops += trained.flops
        return trained.state

    def _train(
        self, client: Client, model: torch.nn.Module, recipe: Training, **options: Any
    ) -> Generator[None, None, Trained]:
        return training(
            model,
            self.ctx.model_of(client),
            client.images,
            client.labels,
            client.patients,
            recipe,
            seed=self.ctx.training_seed,
            stream=("training", client.name),
            label=client.label,
            forward_flops=models.forward_flops(*self.ctx.architecture_of(client)),
            device=self.ctx.device,
            precision=self.ctx.precision,
            fast=self.ctx.fast,
            noise=lambda epoch: self._noise("training", client.name, epoch),
            **options,
        )

    def _noise(self, *names: str) -> Noise:
        """As ``Context.noise``, from the seed of training."""
        return replace(self.ctx, seed=self.ctx.training_seed, streams=()).noise(*names)

    def local_model_key(self, client: Client) -> str:
        """Content address: the same data, recipe, architecture and seed give the same network."""
        parts = {
            "client": client.name,
            "data": client.digest,
            "task": self.ctx.task_of(client).as_json(),
            "training": self.ctx.training.model_dump(),
            "seed": self.ctx.training_seed,
            "precision": f"{self.ctx.device}-{self.ctx.precision}",
        }
        return _content_key(parts)

    def _note_use(self, key: str) -> None:
        """The method at work is charged for it."""
        if key not in self.ctx.record.local_models:
            self.ctx.record.local_models.append(key)

    def features(self, source: Client | np.ndarray, spec: EncoderSpec) -> Tensor:
        """Tokens [n, 1 + L, dim] of a client's images (or of any uint8 images), shared by the content of each image."""
        client = None if isinstance(source, np.ndarray) else source
        images = source if isinstance(source, np.ndarray) else source.images
        label = "images" if client is None else client.label
        times = [time.perf_counter()]
        update = self.ctx.progress.start(f"encoding {label}", 1)

        def on_view(done: int, total: int) -> None:
            times.append(time.perf_counter())
            update(done // total, f"view {done} of {total}")

        tokens = token_sequences(images, spec, self.ctx.device, self.ctx.store, on_view)
        encoder = load_encoder(spec.name, self.ctx.device, spec.size)
        self.ctx.record.flops += encoder.flops * tokens.shape[0] * tokens.shape[1]
        if client is not None:  # like local training: every method that uses a view is charged in full
            parts = {"data": client.digest, "encoder": spec.name, "size": encoder.size, "digest": encoder.digest}
            for box, (start, end) in zip(
                boxes(images.shape[1], spec.window, spec.stride), pairwise(times), strict=True
            ):
                place = {**parts, "box": list(box), "device": self.ctx.device}
                key = f"features-{_content_key(place)}"
                self._note_use(key)
                self.ctx.event(event="encoded", key=key, client=client.name, seconds=end - start)
            self.ctx.stopwatch.shared_seconds += times[-1] - times[0]
        return tokens

    def shared(self, kind: str, client: Client, settings: Mapping[str, Any], make: Callable[[], bytes]) -> bytes:
        """Bytes that a client makes once and that methods share: the same data, settings and seed give the same.

        As with local training, every method that uses them is charged the full time.
        """
        parts = {
            "client": client.name,
            "data": client.digest,
            "task": self.ctx.task.as_json(),
            "settings": dict(settings),
            "validation": self.ctx.training.validation,
            "seed": self.ctx.seed,
            "precision": f"{self.ctx.device}-{self.ctx.precision}",
        }
        key = f"{kind}-{_content_key(parts)}"
        self._note_use(key)
        began, inner = time.perf_counter(), self.ctx.stopwatch.shared_seconds
        data = self.ctx.store.load(_model_file(key))
        if data is None:
            with self.ctx.stopwatch.aside():
                data = make()
            self.ctx.store.save(_model_file(key), data)
            seconds = time.perf_counter() - began - (self.ctx.stopwatch.shared_seconds - inner)
            self.ctx.event(event="trained", key=key, client=client.name, seconds=seconds)
        self.ctx.stopwatch.shared_seconds = inner + time.perf_counter() - began
        return data


def _content_key(parts: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(parts).encode()).hexdigest()[:32]


def _model_file(key: str) -> str:
    return f"client_models/{key}.safetensors"


def _epoch_note(entry: Mapping[str, Any]) -> str:
    accuracy = entry.get("val_accuracy")
    return f"loss {entry['train_loss']:.3f}" + ("" if accuracy is None else f", validation {accuracy:.1%}")
