"""A small fixed encoder for tests and the demo: untrained filters, and the statistics of what they see."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbicross.models.encoders.base import Encoder, state_digest

WIDTH = 32


class Tiny(nn.Module):
    """Two layers of fixed random filters; mean and spread of each map over the image, whitened and normalised.

    Whitening is by made-up textures: without it all images look alike for the large constant part that they share.
    """

    def __init__(self) -> None:
        super().__init__()
        # Whole numbers from a hash: the same bytes on every machine and with every version of every library.
        self.register_buffer("first", filters("first", WIDTH, 3, 5))
        self.register_buffer("second", filters("second", WIDTH, WIDTH, 3))
        seen = self.statistics(textures(400)).double()
        centred = seen - seen.mean(0)
        covariance = centred.T @ centred / len(seen)
        spread = covariance.diagonal().sqrt()
        correlation = covariance / spread.outer(spread) + 0.01 * torch.eye(len(spread), dtype=torch.float64)
        values, vectors = torch.linalg.eigh(correlation)
        # The symmetric root: unlike principal components it has no signs that another machine could flip.
        whitening = vectors @ (values.rsqrt().unsqueeze(1) * vectors.T) / spread.unsqueeze(0)
        self.register_buffer("shift", seen.mean(0).float(), persistent=False)
        self.register_buffer("whitening", whitening.T.contiguous().float(), persistent=False)

    def statistics(self, x: Tensor) -> Tensor:
        """Images [n, 3, H, W] to mean and spread of every map, [n, 128]."""
        low = F.relu(F.conv2d(F.pad(x, (2, 2, 2, 2), mode="reflect"), self.get_buffer("first")))
        pooled = F.avg_pool2d(low, 2)
        high = F.relu(F.conv2d(F.pad(pooled, (1, 1, 1, 1), mode="reflect"), self.get_buffer("second")))
        parts = []
        for maps in (low, high):
            flat = maps.flatten(2)
            parts += [flat.mean(2), (flat.var(2, correction=0) + 1e-6).sqrt()]
        return torch.cat(parts, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Images [n, 3, H, W] to features [n, 128]."""
        white = (self.statistics(x) - self.get_buffer("shift")) @ self.get_buffer("whitening")
        out: Tensor = F.layer_norm(white, [4 * WIDTH])
        return out


def textures(count: int) -> Tensor:
    """Coloured blocks of random size and contrast on a random ground, [count, 3, 28, 28] in [-1, 1]."""
    out = []
    for number in range(count):
        raw = hashlib.shake_256(f"fedbicross tiny encoder texture {number}".encode()).digest(4 + 3 * 14 * 14)
        values = torch.from_numpy(np.frombuffer(raw, np.uint8).astype(np.float32) / 127.5 - 1)
        blocks = (1, 2, 4, 7, 14)[number % 5]
        coarse = values[4 : 4 + 3 * blocks * blocks].view(1, 3, blocks, blocks)
        ground, contrast = values[:3].view(1, 3, 1, 1), (values[3] + 1) / 2
        fine = F.interpolate(coarse, (28, 28), mode="bilinear", align_corners=False)
        out.append((ground + contrast * fine).clamp(-1, 1))
    return torch.cat(out)


def filters(name: str, outputs: int, inputs: int, kernel: int) -> Tensor:
    """Random filters with unit norm, from the bytes of a hash of ``name``."""
    count = outputs * inputs * kernel * kernel
    raw = np.frombuffer(hashlib.shake_256(f"fedbicross tiny encoder {name}".encode()).digest(count), np.uint8)
    weights = torch.from_numpy(raw.astype(np.float64) - 127.5).view(outputs, inputs, kernel, kernel)
    unit: Tensor = weights / torch.linalg.vector_norm(weights, dim=(1, 2, 3), keepdim=True)
    return unit.float()


def tiny() -> Encoder:
    """The encoder ``tiny``: 128 features, input in [-1, 1]."""
    module = Tiny()
    return Encoder("tiny", module, 4 * WIDTH, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 28, state_digest(module))
