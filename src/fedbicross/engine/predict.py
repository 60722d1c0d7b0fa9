"""Probabilities of one network, or of several combined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fedbicross import models
from fedbicross.engine.combine import combine_logits, refer, temper
from fedbicross.engine.device import autocast, normalise, to_device
from fedbicross.engine.tokens import token_sequences
from fedbicross.errors import MethodError
from fedbicross.models import heads
from fedbicross.models.encoders import EncoderSpec, load_encoder

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from fedbicross.context import Store
    from fedbicross.messages import Predictor


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
    batch: int = 500,
    store: Store | None = None,
) -> np.ndarray:
    """Class probabilities [n,C] float32 for uint8 images [n,H,W,C]."""
    if predictor.constant is not None:
        row = predictor.constant.float().cpu().numpy()
        return row[None].repeat(len(images), 0)
    parts = [torch.zeros(0, len(predictor.task.classes))]
    parts += [
        combined(predictor, logits) for logits in batch_logits(predictor, images, device, precision, batch, store)
    ]
    out: np.ndarray = torch.cat(parts).numpy()
    return out


def batch_logits(
    predictor: Predictor,
    images: np.ndarray,
    device: str = "cpu",
    precision: str = "fp32",
    batch: int = 500,
    store: Store | None = None,
) -> Iterator[Tensor]:
    """Logits [N,B,C] of a predictor's networks, batch by batch on the device."""
    task = predictor.task
    if predictor.encoder is not None:
        yield from _from_features(predictor, images, device, batch, store)
        return
    networks = [
        load_model(architecture, state, task.channels, len(task.classes), task.image_size).to(device)
        for architecture, state in zip(predictor.architectures, predictor.states, strict=True)
    ]
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
