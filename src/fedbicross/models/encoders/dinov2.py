"""DINOv2 through ``transformers``, from a folder on this machine; no network, no pickle, no code from the folder."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn
from transformers import Dinov2Config, Dinov2Model
from transformers.utils import logging

from fedbicross.errors import DataError
from fedbicross.models.encoders.base import Encoder

# ImageNet's statistics, once: normalising twice, or cropping the centre, gives features of another image.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
WEIGHTS = "model.safetensors"


class ClassToken(nn.Module):
    """The class token of the last layer, after the final normalisation."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Images [n, 3, H, W] to features [n, dim]."""
        token: Tensor = self.network(pixel_values=x).last_hidden_state[:, 0]
        return token


def dinov2(name: str, folder: Path, dim: int) -> Encoder:
    """The encoder in ``folder`` (config.json and model.safetensors as published); ``dim`` is what its name promises."""
    logging.disable_progress_bar()
    try:
        data = (folder / WEIGHTS).read_bytes()  # once, so that what is hashed is what is used
        state = load(data)
        config = Dinov2Config.from_pretrained(folder, local_files_only=True)
        with torch.random.fork_rng(devices=[]):  # loading fills weights with random numbers first
            loaded: Any = Dinov2Model.from_pretrained(
                None, config=config, state_dict=state, dtype=torch.float32, output_loading_info=True
            )
        network, report = loaded
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise DataError("encoder_weights", f"encoder {name!r}: {folder.name} cannot be read ({reason})") from None
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])[0]
        raise DataError("encoder_weights", f"encoder {name!r}: {WEIGHTS} lacks weights, e.g. {missing}")
    if config.hidden_size != dim:
        raise DataError("encoder_weights", f"encoder {name!r} has {dim} features, this folder {config.hidden_size}")
    digest = hashlib.sha256(data).hexdigest()
    patch = config.patch_size
    return Encoder(
        name, ClassToken(network), dim, MEAN, STD, 224, digest, patch if isinstance(patch, int) else max(patch)
    )
