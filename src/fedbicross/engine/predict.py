"""Probabilities of one network, or of several combined."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fedbicross import models
from fedbicross.bundle.format import canonical_json, tensor_digest
from fedbicross.engine.combine import combine_logits, refer, temper
from fedbicross.engine.device import autocast, normalise, to_device
from fedbicross.engine.tokens import token_sequences
from fedbicross.errors import MethodError
from fedbicross.models import heads
from fedbicross.models.encoders import EncoderSpec, load_encoder

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from fedbicross.context import Store, Task
    from fedbicross.messages import Predictor

BATCH = 500
MOST_KEPT = 1 << 26  # bytes of logits: 2,000 networks that were asked about 1,000 images of 8 classes


def load_model(architecture: str, state: dict[str, Tensor], channels: int, classes: int, image_size: int) -> nn.Module:
    """A network in evaluation mode with the given weights."""
    model = models.build(architecture, channels, classes, image_size)
    model.load_state_dict(state)
    return model.eval()


@torch.no_grad()
def member_logits(networks: Sequence[nn.Module], images: Tensor, precision: str) -> Tensor:
    """Logits [N,B,C] in float32 of every network on uint8 images [B,C,H,W]."""
    inputs = normalise(images)
    with autocast(images.device.type, precision):
        return torch.stack([network(inputs) for network in networks]).float()


def probabilities(
    predictor: Predictor,
    images: np.ndarray,
    device: str = "cpu",
    precision: str = "fp32",
    batch: int = BATCH,
    store: Store | None = None,
) -> np.ndarray:
    """Class probabilities [n,C] float32 for uint8 images [n,H,W,C]."""
    return _joined(predictor, batch_logits(predictor, images, device, precision, batch, store), len(images))


def _joined(predictor: Predictor, batches: Iterable[Tensor], count: int) -> np.ndarray:
    """Class probabilities [count,C] from the logits of a predictor's networks; a constant answer asks for none."""
    if predictor.constant is not None:
        row = predictor.constant.float().cpu().numpy()
        return row[None].repeat(count, 0)
    parts = [torch.zeros(0, len(predictor.task.classes)), *(combined(predictor, logits) for logits in batches)]
    out: np.ndarray = torch.cat(parts).numpy()
    return out


class Answers:
    """What predictors say about one set of images, for which each network is asked once, whoever uses it.

    The methods of a run share networks: every ensemble and every gate holds those that clients trained alone. A network
    is known by its content. The logits asked for last are kept, up to ``most`` bytes; the numbers are the same bits as
    those of ``probabilities``.
    """

    def __init__(self, images: np.ndarray, device: str = "cpu", most: int = MOST_KEPT) -> None:
        self.images, self.device, self.most = images, device, most
        self._kept: dict[str, list[Tensor]] = {}  # logits [B,C] of each batch, on the device; the latest network last
        self._bytes = 0

    def probabilities(self, predictor: Predictor, store: Store | None = None) -> np.ndarray:
        """Class probabilities [n,C] float32; a store keeps the features of a frozen encoder."""
        if predictor.encoder is not None:  # there the store keeps what is expensive
            return probabilities(predictor, self.images, self.device, store=store)
        return _joined(predictor, self._batches(predictor), len(self.images))

    def _batches(self, predictor: Predictor) -> Iterator[Tensor]:
        pairs = zip(predictor.architectures, predictor.states, strict=True)
        for logits in zip(*[self._logits(predictor.task, *pair) for pair in pairs], strict=True):
            yield torch.stack(logits)

    def _logits(self, task: Task, architecture: str, state: dict[str, Tensor]) -> list[Tensor]:
        key = canonical_json([task.as_json(), architecture, {name: tensor_digest(t) for name, t in state.items()}])
        found = self._kept.pop(key, None)
        if found is None:
            network = _network(task, architecture, state).to(self.device)
            parts = (self.images[start : start + BATCH] for start in range(0, len(self.images), BATCH))
            found = [member_logits([network], to_device(part, self.device), "fp32")[0] for part in parts]
            self._bytes += _size(found)
        self._kept[key] = found
        while self._bytes > self.most and len(self._kept) > 1:
            self._bytes -= _size(self._kept.pop(next(iter(self._kept))))
        return found


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _network(task: Task, architecture: str, state: dict[str, Tensor]) -> nn.Module:
    return load_model(architecture, state, task.channels, len(task.classes), task.image_size)


def batch_logits(
    predictor: Predictor,
    images: np.ndarray,
    device: str = "cpu",
    precision: str = "fp32",
    batch: int = BATCH,
    store: Store | None = None,
) -> Iterator[Tensor]:
    """Logits [N,B,C] of a predictor's networks, batch by batch on the device."""
    if predictor.encoder is not None:
        yield from _from_features(predictor, images, device, batch, store)
        return
    pairs = zip(predictor.architectures, predictor.states, strict=True)
    networks = [_network(predictor.task, *pair).to(device) for pair in pairs]
    for start in range(0, len(images), batch):
        yield member_logits(networks, to_device(images[start : start + batch], device), precision)


def combined(predictor: Predictor, logits: Tensor) -> Tensor:
    """Probabilities [B,C] on the CPU from the logits [N,B,C] of a predictor's networks."""
    tables = (predictor.class_weights, predictor.log_prior)
    weights, prior = (None if table is None else table.to(logits.device) for table in tables)
    answer = combine_logits(logits, predictor.combine, 1.0, weights, prior)
    if predictor.referral is not None:
        answer = refer(answer, logits[-1], predictor.referral.to(logits.device))
    return temper(answer, predictor.temperature).cpu()


def _from_features(
    predictor: Predictor, images: np.ndarray, device: str, batch: int, store: Store | None
) -> Iterator[Tensor]:
    """The same for heads on the features of a frozen encoder, which must be the one that they were trained with."""
    assert predictor.encoder is not None
    tokens = token_sequences(images, need_encoder(predictor.encoder, device), device, store)
    pairs = zip(predictor.architectures, predictor.states, strict=True)
    networks = [heads.load(name, state, len(predictor.task.classes)).to(device) for name, state in pairs]
    for start in range(0, len(tokens), batch):
        with torch.no_grad():
            chunk = tokens[start : start + batch].to(device)
            logits = torch.stack([network(chunk) for network in networks]).float()
        yield logits


def describe_encoder(spec: EncoderSpec, device: str) -> dict[str, Any]:
    """What goes into manifests, so that nobody mixes the features of two encoders."""
    return {**spec.as_json(), "digest": load_encoder(spec.name, device, spec.size).digest}


def need_encoder(description: Mapping[str, Any], device: str) -> EncoderSpec:
    """The encoder that a manifest names; another set of weights under the same name is refused."""
    spec = EncoderSpec.from_json(description)
    if describe_encoder(spec, device)["digest"] != description.get("digest"):
        raise MethodError("encoder_digest", f"encoder {spec.name!r} here has other weights than the one that was used")
    return spec
