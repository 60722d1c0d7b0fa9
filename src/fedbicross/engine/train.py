"""Local training of one network on one site's images, resumable at every epoch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fedbicross.bundle import pack, unpack
from fedbicross.engine.device import autocast, normalise, to_device
from fedbicross.seeds import numpy_rng

if TYPE_CHECKING:
    from torch import Tensor

    from fedbicross.context import Store
    from fedbicross.engine.recipe import Training

SECONDS_BETWEEN_CHECKPOINTS = 20.0


@dataclass(frozen=True)
class Trained:
    """A trained network and how it came about."""

    architecture: str
    state: dict[str, Tensor]
    history: list[dict[str, Any]] = field(default_factory=list)
    best_epoch: int = 0
    train_images: int = 0
    val_images: int = 0
    flops: int = 0

    def pack(self) -> bytes:
        """The file in which a run keeps this network."""
        info = {
            "architecture": self.architecture,
            "history": self.history,
            "best_epoch": self.best_epoch,
            "train_images": self.train_images,
            "val_images": self.val_images,
            "flops": self.flops,
        }
        return pack("client_model", self.state, info)

    @classmethod
    def unpack(cls, data: bytes) -> Trained:
        """Read back what ``pack`` made."""
        state, info = unpack(data, "client_model")
        return cls(state=state, **info)


def split_validation(
    labels: np.ndarray, patients: np.ndarray | None, share: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Indices for training and local validation; whole patients where they are known.

    Too few images for even one validation image (fewer than 1/share) means none: the last epoch is then used.
    """
    count = len(labels)
    wanted = int(count * share)
    if patients is None:
        order = rng.permutation(count)
        return np.sort(order[wanted:]), np.sort(order[:wanted])
    chosen = np.zeros(count, dtype=bool)
    people = np.unique(patients)
    for person in people[rng.permutation(len(people))][: len(people) - 1]:  # one patient always stays for training
        theirs = patients == person
        if chosen.sum() + theirs.sum() <= wanted:
            chosen |= theirs
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def epoch_batches(count: int, batch_size: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Shuffled index batches. A last batch of one image joins its neighbour; a lone image is doubled.

    Batch normalisation has no variance to use on a single value, so no step ever sees one image only.
    """
    order = rng.permutation(count)
    if count == 1:
        return [np.zeros(2, dtype=np.int64)]
    batches = [order[start : start + batch_size] for start in range(0, count, batch_size)]
    if len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [np.concatenate(batches[-2:])]
    return batches


def turn_and_mirror(images: Tensor, rng: np.random.Generator) -> Tensor:
    """Each image of the batch by one of the eight symmetries of the square."""
    kinds = rng.integers(0, 8, len(images))
    out = images.clone()
    for kind in range(1, 8):
        rows = torch.from_numpy(np.flatnonzero(kinds == kind)).to(images.device)
        part = torch.rot90(images[rows], kind % 4, dims=(2, 3))
        out[rows] = part.flip(3) if kind >= 4 else part
    return out


def train(
    model: nn.Module,
    architecture: str,
    images: np.ndarray,
    labels: np.ndarray,
    patients: np.ndarray | None,
    recipe: Training,
    *,
    seed: int,
    stream: tuple[str, ...],
    forward_flops: int = 0,
    device: str = "cpu",
    precision: str = "fp32",
    epochs: int | None = None,
    first_epoch: int = 0,
    total_epochs: int | None = None,
    store: Store | None = None,
    checkpoint: str = "",
    on_epoch: Callable[[int, dict[str, Any]], None] | None = None,
) -> Trained:
    """Train ``model`` in place by ``recipe`` and return the chosen epoch's weights.

    Epoch e draws its batches from the stream ``(*stream, "epoch-e")``, so that a killed run continues to the
    same bytes without saving any random state. ``first_epoch`` and ``total_epochs`` place a short visit (one
    round of FedAvg) inside a longer schedule.
    """
    last = epochs if epochs is not None else recipe.epochs
    total = total_epochs or last
    train_rows, val_rows = split_validation(
        labels, patients, recipe.validation, numpy_rng(seed, *stream, "validation-split")
    )
    x, y = to_device(images[train_rows], device), torch.from_numpy(labels[train_rows]).to(device)
    x_val, y_val = to_device(images[val_rows], device), torch.from_numpy(labels[val_rows]).to(device)

    model = model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimiser = torch.optim.SGD(
        model.parameters(), lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay
    )
    history: list[dict[str, Any]] = []
    best_epoch, best_score = 0, (-1.0, 0.0)
    best_state = _snapshot(model)
    start = 0
    saved = store.load(checkpoint) if store and checkpoint else None
    if saved is not None:
        start, history, best_epoch, best_score, best_state = _resume(saved, model, optimiser)
    last_save = time.monotonic()

    for epoch in range(start, last):
        rng = numpy_rng(seed, *stream, f"epoch-{first_epoch + epoch}")
        rate = recipe.rate(first_epoch + epoch, total)
        for group in optimiser.param_groups:
            group["lr"] = rate
        loss = _one_epoch(model, optimiser, x, y, recipe, rng, device, precision)
        entry: dict[str, Any] = {"epoch": first_epoch + epoch + 1, "lr": rate, "train_loss": loss, "val_accuracy": None}
        if len(val_rows):
            accuracy, val_loss = _validate(model, x_val, y_val, device, precision)
            entry |= {"val_accuracy": accuracy, "val_loss": val_loss}
        history.append(entry)
        if recipe.select == "best" and len(val_rows):
            # Accuracy decides; among equals the lower loss, so that an easy client does not keep its first epoch.
            if (entry["val_accuracy"], -entry["val_loss"]) > best_score:
                best_score = (entry["val_accuracy"], -entry["val_loss"])
                best_epoch, best_state = entry["epoch"], _snapshot(model)
        else:
            best_epoch = entry["epoch"]
        if on_epoch:
            on_epoch(epoch + 1, entry)
        if store and checkpoint and epoch + 1 < last and time.monotonic() - last_save > SECONDS_BETWEEN_CHECKPOINTS:
            store.save(
                checkpoint, _checkpoint(epoch + 1, history, best_epoch, best_score, best_state, model, optimiser)
            )
            last_save = time.monotonic()

    if recipe.select == "last" or not len(val_rows):
        best_state = _snapshot(model)
    if store and checkpoint:
        store.drop(checkpoint)
    flops = forward_flops * last * (3 * len(train_rows) + len(val_rows))  # backward costs twice the forward
    return Trained(architecture, best_state, history, best_epoch, len(train_rows), len(val_rows), flops)


def _one_epoch(
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    x: Tensor,
    y: Tensor,
    recipe: Training,
    rng: np.random.Generator,
    device: str,
    precision: str,
) -> float:
    model.train()
    total = torch.zeros((), device=device)
    for rows in epoch_batches(len(y), recipe.batch_size, rng):
        index = torch.from_numpy(rows).to(device)
        inputs = normalise(x[index])
        if recipe.augment:
            inputs = turn_and_mirror(inputs, rng)
        with autocast(device, precision):
            logits = model(inputs.contiguous(memory_format=torch.channels_last))
        loss = F.cross_entropy(logits.float(), y[index])
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        total += loss.detach() * len(rows)
    return float(total) / max(len(y), 1)


@torch.no_grad()
def _validate(model: nn.Module, x: Tensor, y: Tensor, device: str, precision: str) -> tuple[float, float]:
    model.eval()
    parts = []
    for start in range(0, len(y), 500):
        with autocast(device, precision):
            inputs = normalise(x[start : start + 500]).contiguous(memory_format=torch.channels_last)
            parts.append(model(inputs).float())
    logits = torch.cat(parts)
    accuracy = (logits.argmax(1) == y).float().mean()
    return float(accuracy), float(F.cross_entropy(logits, y))


def _snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone().contiguous() for name, value in model.state_dict().items()}


def _checkpoint(
    epoch: int,
    history: list[dict[str, Any]],
    best_epoch: int,
    best_score: tuple[float, float],
    best_state: dict[str, Tensor],
    model: nn.Module,
    optimiser: torch.optim.SGD,
) -> bytes:
    tensors = {f"best.{name}": value for name, value in best_state.items()}
    tensors |= {f"now.{name}": value for name, value in _snapshot(model).items()}
    for index, parameter in enumerate(model.parameters()):
        momentum = optimiser.state[parameter].get("momentum_buffer")
        if momentum is not None:
            tensors[f"momentum.{index}"] = momentum
    info = {"epoch": epoch, "history": history, "best_epoch": best_epoch, "best_score": list(best_score)}
    return pack("training_checkpoint", tensors, info)


def _resume(
    saved: bytes, model: nn.Module, optimiser: torch.optim.SGD
) -> tuple[int, list[dict[str, Any]], int, tuple[float, float], dict[str, Tensor]]:
    tensors, info = unpack(saved, "training_checkpoint")
    state = model.state_dict()
    model.load_state_dict({name: tensors[f"now.{name}"] for name in state})
    best = {name: tensors[f"best.{name}"] for name in state}
    for index, parameter in enumerate(model.parameters()):
        momentum = tensors.get(f"momentum.{index}")
        if momentum is not None:
            # The optimiser keeps the parameter's memory layout; so must what it resumes from, to the bit.
            optimiser.state[parameter]["momentum_buffer"] = torch.empty_like(parameter).copy_(momentum)
    accuracy, loss = info["best_score"]
    return info["epoch"], info["history"], info["best_epoch"], (accuracy, loss), best
