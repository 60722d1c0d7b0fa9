"""The one shape of every encoder: uint8 images in, vectors out, nothing trainable.

How an image becomes an input, the same for all: grey channels are repeated three times; the whole image is resized to a
square with antialiasing (never cropped, since borders hold findings too); then (x / 255 - mean) / std by channel.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedbicross.bundle.format import tensor_digest
from fedbicross.errors import ConfigError, MethodError

if TYPE_CHECKING:
    import numpy as np

BATCH = {"cpu": 16}  # images per pass; on a CPU few, so that activations stay in its cache
BATCH_GPU = 128


class Encoder:
    """A frozen network with its own input statistics."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        dim: int,
        mean: Sequence[float],
        std: Sequence[float],
        size: int,
        digest: str,
        multiple: int = 1,
    ) -> None:
        if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
            raise ConfigError("encoder_statistics", f"encoder {name!r}: mean and std need three values, std above 0")
        if size < 1 or size % multiple:
            raise ConfigError("encoder_size", f"encoder {name!r}: input of {size} px is not a multiple of {multiple}")
        self.name, self.dim, self.size, self.digest, self.multiple = name, dim, size, digest, multiple
        self.mean, self.std = tuple(mean), tuple(std)
        self.module: nn.Module = module.eval().requires_grad_(False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.device = "cpu"
        self._flops: int | None = None

    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        dim: int,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        size: int = 224,
        name: str = "python:module",
    ) -> Encoder:
        """Any network from [n, 3, size, size] to [n, dim]; a copy of it is frozen, the original stays as it is."""
        frozen = copy.deepcopy(module)
        return cls(name, frozen, dim, mean, std, size, state_digest(frozen))

    def to(self, device: str, size: int | None = None) -> Encoder:
        """The encoder on a device and at an input size of one's choice."""
        size = size or self.size
        if (device, size) == (self.device, self.size):
            return self
        module = self.module if device == self.device else copy.deepcopy(self.module).to(device)
        moved = Encoder(self.name, module, self.dim, self.mean, self.std, size, self.digest, self.multiple)
        moved.device = device
        return moved

    def preprocess(self, images: np.ndarray) -> Tensor:
        """Images uint8 [n, H, W, C] as the network's input, float32 [n, 3, size, size] on its device."""
        pixels = torch.from_numpy(images)
        if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[3] not in (1, 3):
            shape = f"{images.dtype} {images.shape}"
            raise MethodError("encoder_input", f"an encoder takes uint8 images [n, H, W, 1 or 3], got {shape}")
        # Apple's GPU has no antialiased resizing; there the CPU does it.
        place = "cpu" if self.device == "mps" else self.device
        x = pixels.to(place).permute(0, 3, 1, 2).float()
        if x.shape[1] == 1:
            x = x.expand(-1, 3, -1, -1)
        if x.shape[2:] != (self.size, self.size):
            x = F.interpolate(x, (self.size, self.size), mode="bicubic", align_corners=False, antialias=True)
            x = x.clamp(0, 255)  # bicubic overshoots at edges
        mean, std = (torch.tensor(v, device=place).view(1, 3, 1, 1) for v in (self.mean, self.std))
        return ((x / 255 - mean) / std).to(self.device)

    @torch.inference_mode()
    def __call__(self, images: np.ndarray) -> Tensor:
        """Images uint8 [n, H, W, C] as features [n, dim], float32 on the CPU.

        The last batch is filled up, so that a feature does not depend on how many images are asked for at once.
        """
        parts, batch = [torch.zeros(0, self.dim)], BATCH.get(self.device, BATCH_GPU)
        for start in range(0, len(images), batch):
            inputs = self.preprocess(images[start : start + batch])
            count = len(inputs)
            inputs = torch.cat([inputs, inputs[-1:].expand(batch - count, -1, -1, -1)])
            out = self.module(inputs.contiguous(memory_format=torch.channels_last))
            if not isinstance(out, Tensor) or out.shape != (batch, self.dim):
                found = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
                raise MethodError("encoder_output", f"encoder {self.name!r}: expected [n, {self.dim}], got {found}")
            parts.append(out[:count].float().cpu())
        features = torch.cat(parts)
        if not bool(torch.isfinite(features).all()):
            raise MethodError("encoder_output", f"encoder {self.name!r} gave values that are not finite")
        return features.clone()

    @property
    def flops(self) -> int:
        """Operations of one forward pass of one image."""
        if self._flops is None:
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                self.module(torch.zeros(1, 3, self.size, self.size, device=self.device))
            self._flops = int(counter.get_total_flops())
        return self._flops


def state_digest(module: nn.Module) -> str:
    """SHA-256 over all parameters and buffers by name."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(f"{name}:{tensor_digest(value)};".encode())
    return digest.hexdigest()
