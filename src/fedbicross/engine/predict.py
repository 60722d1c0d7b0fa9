"""Probabilities of one network, or of several combined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fedbicross import models
from fedbicross.engine.combine import combine_logits
from fedbicross.engine.device import autocast, normalise, to_device

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from fedbicross.federation import Predictor


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
    predictor: Predictor, images: np.ndarray, device: str = "cpu", precision: str = "fp32", batch: int = 500
) -> np.ndarray:
    """Class probabilities [n,C] float32 for uint8 images [n,H,W,C]."""
    task = predictor.task
    if predictor.constant is not None:
        row = predictor.constant.float().cpu().numpy()
        return row[None].repeat(len(images), 0)
    networks = [
        load_model(architecture, state, task.channels, len(task.classes), task.image_size).to(device)
        for architecture, state in zip(predictor.architectures, predictor.states, strict=True)
    ]
    weights = None if predictor.class_weights is None else predictor.class_weights.to(device)
    parts = []
    for start in range(0, len(images), batch):
        chunk = to_device(images[start : start + batch], device)
        parts.append(combine_logits(member_logits(networks, chunk, precision), predictor.combine, 1.0, weights).cpu())
    if not parts:
        parts = [torch.zeros(0, len(task.classes))]
    out: np.ndarray = torch.cat(parts).numpy()
    return out
