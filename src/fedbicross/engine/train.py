"""Local training of one network on one site's images, resumable at every epoch; several side by side on a GPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fedbicross.bundle import pack, unpack
from fedbicross.engine.device import normalise, to_device
from fedbicross.engine.fast import STREAMS, at_once, recorded, scalar
from fedbicross.engine.private import PrivateSteps
from fedbicross.engine.student import Student
from fedbicross.errors import MethodError
from fedbicross.seeds import numpy_rng

if TYPE_CHECKING:
    from torch import Tensor

    from fedbicross.context import Store
    from fedbicross.engine.recipe import Training
    from fedbicross.privacy.noise import Noise

SECONDS_BETWEEN_CHECKPOINTS = 20.0
WORTH_RECORDING = 100  # steps


@dataclass(frozen=True)
class Trained:
    """A trained network and the history of its training."""

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


def turn_and_mirror(images: Tensor, kinds: Tensor) -> Tensor:
    """Each image of the batch by one of the eight symmetries of the square: ``kinds`` in 0..7, 0 leaves it alone."""
    side = images.shape[-1]
    places = torch.arange(side * side, device=images.device).view(side, side)
    turned = [torch.rot90(places, turns) for turns in range(4)]
    all_eight = torch.stack([*turned, *(grid.flip(1) for grid in turned)]).flatten(1)
    source = all_eight[kinds].unsqueeze(1).expand(-1, images.shape[1], -1)  # of each pixel, the same in all channels
    return images.flatten(2).gather(2, source).view(images.shape)


def balancing_shift(labels: Tensor, classes: int) -> Tensor:
    """log n(c)/n of the labels, -inf for a class without any: what balanced softmax adds to the logits [C].

    Cross-entropy on z + log π teaches z the classes as if all were equally frequent (Ren et al., 2020); a class that
    the client lacks is neither learnt nor pushed down.
    """
    counts = torch.bincount(labels, minlength=classes).to(torch.get_default_dtype())
    return (counts / counts.sum()).log()


def train_together(jobs: Sequence[Generator[None, None, Trained]], device: str = "cpu") -> list[Trained]:
    """Several ``training``s at once: a small network alone leaves most of a GPU idle. On a CPU one after another."""
    results: dict[int, Trained] = {}
    if not at_once(device, len(jobs)):
        for number, job in enumerate(jobs):
            while number not in results:
                _advance(job, number, results)
        return [results[number] for number in range(len(jobs))]
    streams = [torch.cuda.Stream() for _ in range(min(STREAMS, len(jobs)))]  # type: ignore[no-untyped-call]
    waiting, running = list(enumerate(jobs)), list[tuple[int, Generator[None, None, Trained], int]]()
    while waiting or running:
        while waiting and len(running) < len(streams):
            free = next(i for i in range(len(streams)) if i not in [stream for _, _, stream in running])
            running.append((*waiting.pop(0), free))
        for number, job, stream in running:
            with torch.cuda.stream(streams[stream]):
                _advance(job, number, results)
        running = [entry for entry in running if entry[0] not in results]
    return [results[number] for number in range(len(jobs))]


def _advance(job: Generator[None, None, Trained], number: int, results: dict[int, Trained]) -> None:
    try:
        next(job)
    except StopIteration as end:
        results[number] = end.value


def training(
    model: nn.Module,
    architecture: str,
    images: np.ndarray,
    labels: np.ndarray,
    patients: np.ndarray | None,
    recipe: Training,
    *,
    seed: int,
    stream: tuple[str, ...],
    label: str = "the network",
    visit: tuple[str, ...] = (),
    forward_flops: int = 0,
    device: str = "cpu",
    precision: str = "fp32",
    fast: bool = False,
    epochs: int | None = None,
    first_epoch: int = 0,
    total_epochs: int | None = None,
    store: Store | None = None,
    checkpoint: str = "",
    on_epoch: Callable[[int, dict[str, Any]], None] | None = None,
    noise: Callable[[str], Noise] | None = None,
) -> Generator[None, None, Trained]:
    """One training by ``recipe``, handing over whenever a GPU has an epoch's work and nothing needs to be read back.

    Epoch e draws its batches from the stream ``(*stream, "epoch-e")``, so that a killed run continues to the
    same bytes without saving any random state. ``first_epoch`` and ``total_epochs`` place a short visit (one
    round of FedAvg) inside a longer schedule. ``visit`` gives a training that is made again (a later shot) batches of
    its own, with the same validation images. ``label`` names the client where a loss that is not finite ends it all.
    ``noise`` is where a private training draws its batches and noise from, by the name of an epoch.
    """
    recipe = recipe.as_trained
    last = epochs if epochs is not None else recipe.epochs
    total = total_epochs or last
    train_rows, val_rows = split_validation(
        labels, patients, recipe.validation, numpy_rng(seed, *stream, "validation-split")
    )
    x, y = to_device(images[train_rows], device), torch.from_numpy(labels[train_rows]).to(device)
    x_val, y_val = to_device(images[val_rows], device), torch.from_numpy(labels[val_rows]).to(device)

    steps = last * len(train_rows) // recipe.batch_size
    # Its own steps only: nothing here knows how many other sites train the same architecture.
    quick = fast and steps >= WORTH_RECORDING and recipe.dp is None
    network = Student(model, device, precision, quick, passes=steps)
    # Of all images, so that no validation image is of a class that counts as absent.
    shift = balancing_shift(torch.from_numpy(labels), len(network.params["head.bias"])) if recipe.balanced else None
    work = _Work(network, x, y, recipe, None if shift is None else shift.to(device))
    private = None
    if recipe.dp is not None:
        if visit or first_epoch or last != recipe.epochs or noise is None:
            raise MethodError("not_private", "training.dp accounts for one whole training of a network, not for more")
        private = PrivateSteps(model, recipe, len(y), noise)
    history: list[dict[str, Any]] = []
    best_epoch, best_score = 0, (-1.0, 0.0)
    best_state = network.copies()
    start = 0
    saved = store.load(checkpoint) if store and checkpoint else None
    if saved is not None:
        start, history, best_epoch, best_score, best_state = _resume(saved, network)
    last_save = time.monotonic()

    for epoch in range(start, last):
        rng = numpy_rng(seed, *stream, *visit, f"epoch-{first_epoch + epoch}")
        rate = recipe.rate(first_epoch + epoch, total)
        summed = work.epoch(rng, rate) if private is None else work.private_epoch(private, first_epoch + epoch, rate)
        seen = work.validate(x_val, y_val) if len(val_rows) else []
        yield
        loss = float(summed) / max(len(y), 1)
        entry: dict[str, Any] = {"epoch": first_epoch + epoch + 1, "lr": rate, "train_loss": loss, "val_accuracy": None}
        if seen:
            entry |= {"val_accuracy": float(seen[0]), "val_loss": float(seen[1])}
        if not (math.isfinite(loss) and math.isfinite(entry.get("val_loss", 0.0))):
            raise diverged(label, f"the loss is not finite in epoch {entry['epoch']}")
        history.append(entry)
        if recipe.select == "best" and len(val_rows):
            # Accuracy decides; among equals the lower loss, so that an easy client does not keep its first epoch.
            if (entry["val_accuracy"], -entry["val_loss"]) > best_score:
                best_score = (entry["val_accuracy"], -entry["val_loss"])
                best_epoch, best_state = entry["epoch"], network.copies()
        else:
            best_epoch = entry["epoch"]
        if on_epoch:
            on_epoch(epoch + 1, entry)
        if store and checkpoint and epoch + 1 < last and time.monotonic() - last_save > SECONDS_BETWEEN_CHECKPOINTS:
            store.save(checkpoint, _checkpoint(epoch + 1, history, best_epoch, best_score, best_state, network))
            last_save = time.monotonic()

    if recipe.select == "last" or not len(val_rows):
        best_state = network.copies()
    if not all(bool(torch.isfinite(value).all()) for value in best_state.values()):
        raise diverged(label, f"weights are not finite after epoch {best_epoch}")  # a step follows the last loss
    if store and checkpoint:
        store.drop(checkpoint)
    flops = forward_flops * last * (3 * len(train_rows) + len(val_rows))  # backward costs twice the forward
    best = {name: value.cpu().contiguous() for name, value in best_state.items()}
    return Trained(architecture, best, history, best_epoch, len(train_rows), len(val_rows), flops)


def diverged(label: str, what: str) -> MethodError:
    """The error for a loss that is no longer finite."""
    hint = 'lower training.lr, use another training.schedule, or precision = "fp32"'
    return MethodError("diverged", f"training of {label}: {what}; {hint}")


class _Work:
    """Steps and validation of one network on one site's images; on the fast path as recorded graphs."""

    def __init__(self, network: Student, x: Tensor, y: Tensor, recipe: Training, shift: Tensor | None = None) -> None:
        self.network, self.x, self.y, self.recipe = network, x, y, recipe
        self.shift = shift  # of the logits, [C]
        self.kept: dict[str, Any] = {}  # recorded steps, by batch size: the last batch of an epoch is smaller

    def epoch(self, rng: np.random.Generator, rate: float) -> Tensor:
        """One pass over the images; the sum of their losses, still on the device."""
        device = self.network.device
        summed, lr = torch.zeros((), device=device), scalar(rate, device)
        batches = epoch_batches(len(self.y), self.recipe.batch_size, rng)
        kinds = [rng.integers(0, 8, len(b)) if self.recipe.augment else np.zeros(len(b), np.int64) for b in batches]
        # One copy for the whole epoch: a copy makes the host wait, and with it the other trainings.
        drawn = torch.from_numpy(np.stack([np.concatenate(batches), np.concatenate(kinds)])).to(device)
        for part in torch.split(drawn, [len(batch) for batch in batches], dim=1):
            step = recorded(self.kept, f"{part.shape[1]} images", self._step, self.network.in_place, self.network.fast)
            summed += step(part[0], part[1], lr)[0]
        return summed

    def _step(self, rows: Tensor, kinds: Tensor, lr: Tensor) -> list[Tensor]:
        inputs, labels = normalise(self.x[rows]), self.y[rows]
        if self.recipe.augment:
            inputs = turn_and_mirror(inputs, kinds)
        full = len(rows) == self.recipe.batch_size  # other sizes are too rare to be compiled
        loss, gradients = self.network.gradient(
            inputs, lambda logits: F.cross_entropy(self._shifted(logits), labels), use_compiled=full
        )
        self.network.update(gradients, lr, self.recipe.momentum, self.recipe.weight_decay)
        return [loss * len(rows)]

    def private_epoch(self, private: PrivateSteps, epoch: int, rate: float) -> Tensor:
        """As many steps as show every image once on average; the sum of their losses."""
        summed = torch.zeros((), device=self.network.device)
        source, drawn = private.draw(epoch)
        for rows in drawn:
            inputs, labels = normalise(self.x[rows]), self.y[rows]
            if self.recipe.augment:
                kinds = torch.from_numpy(np.floor(8 * source.uniform(len(rows))).astype(np.int64))
                inputs = turn_and_mirror(inputs, kinds.to(inputs.device))
            loss, gradients = private.gradient(self.network.params, inputs, labels, source)
            self.network.update(gradients, rate, self.recipe.momentum, self.recipe.weight_decay)
            summed += loss
        return summed

    def _shifted(self, logits: Tensor) -> Tensor:
        return logits if self.shift is None else logits + self.shift

    def validate(self, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        """Accuracy and loss on images of the client's own class mix."""
        return recorded(self.kept, "validation", self._validate, [], self.network.fast)(x, y)

    @torch.no_grad()
    def _validate(self, x: Tensor, y: Tensor) -> list[Tensor]:
        parts = [normalise(x[start : start + 500]) for start in range(0, len(y), 500)]
        logits = self._shifted(torch.cat([self.network.eval_logits(part) for part in parts]))
        return [(logits.argmax(1) == y).float().mean(), F.cross_entropy(logits, y)]


def _checkpoint(
    epoch: int,
    history: list[dict[str, Any]],
    best_epoch: int,
    best_score: tuple[float, float],
    best_state: dict[str, Tensor],
    network: Student,
) -> bytes:
    tensors = {f"best.{name}": value for name, value in best_state.items()}
    tensors |= {f"now.{name}": value for name, value in network.tensors().items()}
    info = {"epoch": epoch, "history": history, "best_epoch": best_epoch, "best_score": list(best_score)}
    return pack("training_checkpoint", tensors, info)


def _resume(
    saved: bytes, network: Student
) -> tuple[int, list[dict[str, Any]], int, tuple[float, float], dict[str, Tensor]]:
    tensors, info = unpack(saved, "training_checkpoint")
    network.load({name.removeprefix("now."): value for name, value in tensors.items() if name.startswith("now.")})
    best = {name.removeprefix("best."): value for name, value in tensors.items() if name.startswith("best.")}
    accuracy, loss = info["best_score"]
    return info["epoch"], info["history"], info["best_epoch"], (accuracy, loss), best
