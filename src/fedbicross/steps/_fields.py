"""Random fields and the untrained filters behind `fedbicross.steps.noise`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def uniform(shape: tuple[int, ...], low: float, high: float, generator: torch.Generator) -> Tensor:
    """U(low, high) on the generator's device."""
    return low + (high - low) * torch.rand(shape, generator=generator, device=generator.device)


def normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """N(0, 1) on the generator's device."""
    return torch.randn(shape, generator=generator, device=generator.device)


def standardise(image: Tensor) -> Tensor:
    """Zero mean and unit variance for each image and channel; a constant channel becomes 0."""
    centred = image - image.mean((-2, -1), keepdim=True)
    return centred / centred.square().mean((-2, -1), keepdim=True).sqrt().clamp_min(1e-6)


def to_image_range(image: Tensor, generator: torch.Generator) -> Tensor:
    """Standardised, then with a random contrast and brightness for each image, clipped to [-1, 1]."""
    contrast = uniform((len(image), 1, 1, 1), 0.3, 0.7, generator)
    brightness = uniform((len(image), 1, 1, 1), -0.3, 0.3, generator)
    return (contrast * standardise(image) + brightness).clamp(-1, 1)


def pink_field(shape: tuple[int, int, int, int], generator: torch.Generator) -> Tensor:
    """White noise filtered to the amplitude 1/fᵃ, a ~ U(0.5, 1.5) for each image, standardised; no constant part."""
    height, width = shape[2:]
    exponent = uniform((shape[0], 1, 1, 1), 0.5, 1.5, generator)
    spectrum = torch.fft.rfft2(normal(shape, generator))
    vertical = torch.fft.fftfreq(height, device=generator.device).view(-1, 1)
    horizontal = torch.fft.rfftfreq(width, device=generator.device).view(1, -1)
    frequency = torch.hypot(vertical, horizontal)
    gain = frequency.clamp_min(torch.finfo(torch.float32).tiny).log().mul(-exponent).exp()
    return standardise(torch.fft.irfft2(spectrum * torch.where(frequency > 0, gain, 0), s=(height, width)))


def laplace_envelope(batch: int, resolution: int, generator: torch.Generator) -> Tensor:
    """A smooth map [B,1,R,R] through a 4×4 grid of Laplace variates: noise strong in places, absent in others."""
    centred = uniform((batch, 1, 4, 4), -0.5, 0.5, generator)
    # Inverse distribution function of the Laplace distribution; the bound keeps the logarithm finite.
    laplace = -centred.sign() * torch.log1p(-2 * centred.abs().clamp_max(0.4999))
    return F.interpolate(laplace, size=(resolution, resolution), mode="bicubic", align_corners=False)


def wavelet_bank(device: torch.device) -> Tensor:
    """Forty 3×3 filters of unit norm: 8 oriented edges, 8 oriented lines, 4 round or crossed, and their negatives."""
    y, x = torch.meshgrid(torch.arange(-1.0, 2), torch.arange(-1.0, 2), indexing="ij")
    window = torch.exp(-(x.square() + y.square()) / 2)
    filters = []
    for step in range(8):
        # Edges have a sign, so they turn through the full circle with their negatives; lines repeat after a half turn.
        angle = math.pi * step / 8
        across = x * math.cos(angle) + y * math.sin(angle)
        line = window * (0.5 - across.square())
        filters += [window * across, line - line.mean()]
    delta = torch.zeros(3, 3)
    delta[1, 1] = 1
    plus = (x * y == 0).float()
    filters += [delta, delta - 1 / 9, plus, (y == 0).float() - (x == 0).float()]
    bank = torch.stack(filters)
    bank = bank / torch.linalg.vector_norm(bank, dim=(1, 2), keepdim=True)
    return torch.cat([bank, -bank]).to(device)


def wavelet_choices(batch: int, channels: int, levels: int, generator: torch.Generator) -> Tensor:
    """Filters [levels, B, channels, 3, 3], all those of one image from the same random 5 to 40 wavelets of the bank."""
    bank = wavelet_bank(generator.device)
    allowed = 5 + (uniform((batch, 1), 0, 1, generator) * (len(bank) - 4)).floor().clamp_max(len(bank) - 5)
    order = uniform((batch, len(bank)), 0, 1, generator).argsort(dim=1)
    pick = (uniform((batch, levels * channels), 0, 1, generator) * allowed).long().minimum(allowed.long() - 1)
    chosen = bank[order.gather(1, pick)]
    return chosen.view(batch, levels, channels, 3, 3).transpose(0, 1)


def oriented_layer(maps: Tensor, filters: Tensor, noise_map: Tensor, generator: torch.Generator) -> Tensor:
    """One level of the untrained style network on maps [B,C,H,W], each image with its own filters [B,C,3,3]."""
    batch, channels, height, width = maps.shape
    style = 1 + F.leaky_relu(normal((batch, channels, 1, 1), generator), 0.2)
    styled = (maps * style).reshape(1, batch * channels, height, width)
    padded = F.pad(styled, (1, 1, 1, 1), mode="reflect")  # zeros would draw a frame around every image
    filtered = F.conv2d(padded, filters.reshape(batch * channels, 1, 3, 3), groups=batch * channels)
    mixing = normal((batch, channels, channels), generator)
    mixing = mixing / torch.linalg.vector_norm(mixing, dim=2, keepdim=True)
    mixed = torch.einsum("boi,bihw->bohw", mixing, filtered.view_as(maps))
    # Keeps the levels equally loud, as the demodulation of a style network does for its weights.
    mixed = mixed / mixed.square().mean((1, 2, 3), keepdim=True).sqrt().clamp_min(1e-6)
    strength = uniform((batch, 1, 1, 1), 0, 0.3, generator)
    bias = uniform((batch, channels, 1, 1), -0.2, 0.2, generator)
    return F.relu(mixed + strength * F.adaptive_avg_pool2d(noise_map, (height, width)) + bias)
