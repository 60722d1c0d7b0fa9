"""Structured noise, its mixture with synthesised images, and the memory of such images: E-FedISCA III-C, Eq. 9.

The paper mixes in a download of images made by randomly initialised, never trained networks. Such images can be made on
the spot: three generators here, on the device of the given `torch.Generator`, float32, values in [-1, 1] (the range of
the images). ``pink`` and ``oriented`` images are brought to zero mean and unit variance for each channel, then given a
contrast from U(0.3, 0.7) and a brightness from U(-0.3, 0.3) for each image, and clipped. ``oriented`` is of the kind
the paper uses (oriented filters in an untrained style network), made at 32 or 64 px and then resized.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

NoiseKind = Literal["pink", "dead_leaves", "oriented"]


def structured_noise(kind: NoiseKind, shape: tuple[int, int, int, int], generator: torch.Generator) -> Tensor:
    """A batch of the given kind and shape [B, channels, height, width]."""
    if kind == "pink":
        return pink(shape, generator)
    if kind == "dead_leaves":
        return dead_leaves(shape, generator)
    if kind == "oriented":
        return oriented(shape, generator)
    assert_never(kind)


def pink(shape: tuple[int, int, int, int], generator: torch.Generator) -> Tensor:
    """Gaussian fields whose spectral amplitude falls as 1/fᵃ, a ~ U(0.5, 1.5) for each image; channels independent."""
    return to_image_range(pink_field(shape, generator), generator)


def dead_leaves(shape: tuple[int, int, int, int], generator: torch.Generator, leaves: int = 128) -> Tensor:
    """Discs of uniformly random colour and place that cover one another; radii r ~ r⁻³ from 6 % to half the width."""
    batch, channels, height, width = shape
    device = generator.device
    side = min(height, width)
    smallest, largest = 0.06 * side, 0.5 * side
    # Inverse of the distribution function of r⁻³ on [smallest, largest].
    share = uniform((leaves, batch, 1, 1, 1), 0, 1, generator)
    radius = (smallest**-2 - share * (smallest**-2 - largest**-2)).rsqrt()
    row = uniform((leaves, batch, 1, 1, 1), 0, height, generator)
    column = uniform((leaves, batch, 1, 1, 1), 0, width, generator)
    colour = uniform((leaves, batch, channels, 1, 1), -1, 1, generator)
    image = uniform((batch, channels, 1, 1), -1, 1, generator).expand(shape)
    y = (torch.arange(height, device=device) + 0.5).view(1, 1, -1, 1)
    x = (torch.arange(width, device=device) + 0.5).view(1, 1, 1, -1)
    for leaf in range(leaves):  # one after the other: a batch of 224 px times all leaves would not fit in memory
        inside = (y - row[leaf]).square() + (x - column[leaf]).square() <= radius[leaf].square()
        image = torch.where(inside, colour[leaf], image)
    return image


def oriented(
    shape: tuple[int, int, int, int], generator: torch.Generator, resolution: int = 64, width: int = 16
) -> Tensor:
    """Images of a randomly initialised style network with oriented 3×3 filters, a new network for each image.

    From a random 4×4 map, twice as large at each level: scale the channels by a random style, filter each with
    one wavelet of a random choice from the bank, mix them by random weights of unit norm, add a pink-noise map and a
    bias, rectify; each level adds to the image through random colour weights.
    """
    if resolution < 4 or resolution & (resolution - 1):
        raise ValueError(f"resolution must be a power of two from 4 on, not {resolution}")
    batch, channels = shape[:2]
    sizes = [2**power for power in range(2, resolution.bit_length())]
    noise_map = pink_field((batch, 1, resolution, resolution), generator)
    noise_map = noise_map * laplace_envelope(batch, resolution, generator)
    filters = wavelet_choices(batch, width, len(sizes), generator)
    maps = normal((batch, width, 4, 4), generator)
    image = torch.zeros((batch, channels, 4, 4), device=generator.device)
    for size, level_filters in zip(sizes, filters, strict=True):
        maps = F.interpolate(maps, size=(size, size), mode="bilinear", align_corners=False)
        image = F.interpolate(image, size=(size, size), mode="bilinear", align_corners=False)
        maps = oriented_layer(maps, level_filters, noise_map, generator)
        head = normal((batch, channels, width), generator) / math.sqrt(width)
        image = image + torch.einsum("boi,bihw->bohw", head, maps)
    image = F.interpolate(image, size=shape[2:], mode="bilinear", align_corners=False, antialias=True)
    return to_image_range(image, generator)


def mixup(noise: Tensor, images: Tensor, lam: float | Tensor) -> Tensor:
    """Eq. 9: λ x̂' + (1−λ) x̂, one noise level for the batch; all noise at λ = 1."""
    return lam * noise + (1 - lam) * images


class Memory:
    """Up to n synthesised batches: the latest with a loss below L_th and, if those are fewer, the latest others.

    Section 4.3 of E-FedISCA: n samples with a loss below L_th = 50 are stored, and where n cannot be collected so, the
    latest ones. Which n stay if more qualify is not said. Here the latest: then, as the paper adds, the threshold
    hardly matters (while the loss falls, the memory ends as the last n batches either way). L_th is meant for a loss
    whose terms are averaged over clients. The decision is made on the device: adding waits for nothing.
    """

    def __init__(self, size: int = 500, threshold: float = 50.0) -> None:
        self.size, self.threshold = size, threshold
        self._added = 0
        self._batches: Tensor | None = None
        self._rank = torch.empty(0)

    def __len__(self) -> int:
        return min(self._added, self.size)

    def add(self, batch: Tensor, loss: Tensor) -> None:
        """Offer one batch with the (0-dim) loss at which it was made."""
        if self._batches is None:
            self._batches = batch.new_zeros((self.size, *batch.shape))
            # Empty slots rank below every batch, and among themselves so that slot 0 is filled first.
            self._rank = torch.arange(-self.size, 0, device=batch.device)
        # One total order, qualified before unqualified and later before earlier: keeping its best n is exact.
        rank = (loss.detach() < self.threshold).long() * (1 << 40) + self._added
        slot = self._rank.argmin().view(1)
        keep = rank > self._rank[slot]
        self._batches.index_copy_(
            0, slot, torch.where(keep, batch.detach(), self._batches.index_select(0, slot)[0])[None]
        )
        self._rank.index_copy_(0, slot, torch.where(keep, rank, self._rank[slot]))
        self._added += 1

    def batches(self) -> Tensor:
        """All stored batches [n, B, C, H, W], the qualified last, each group in order of time."""
        if self._batches is None:
            raise ValueError("the memory is empty")
        return self._batches[self._rank.argsort()[self.size - len(self) :]]

    def qualified(self) -> int:
        """How many of the stored batches had a loss below the threshold."""
        return int((self._rank >= 1 << 40).sum())

    def tensors(self) -> dict[str, Tensor]:
        """The whole state as a flat dict; a snapshot."""
        if self._batches is None:
            return {}
        return {
            "batches": self._batches.clone(),
            "rank": self._rank.clone(),
            "added": torch.tensor(self._added),
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from what `tensors` gave."""
        if tensors:
            self._batches, self._rank = tensors["batches"].clone(), tensors["rank"].clone()
            self._added = int(tensors["added"])


# --- random fields, and the filters of the untrained network ------------------------------------------------------


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
