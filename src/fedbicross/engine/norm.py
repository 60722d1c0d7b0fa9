"""A frozen batch normalisation that can use the stored, the current batch's, or given statistics, and report them."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LayerStatistics = dict[str, tuple[Tensor, Tensor]]
"""BN layer name → (mean, biased variance), each of shape [channels]."""

Mode = Literal["stored", "match", "batch", "measure", "given", "features"]


class Pass:
    """What the BN layers of one client do during the current forward pass, and what they saw."""

    def __init__(self) -> None:
        self.mode: Mode = "stored"
        self.fast = False
        self.batches = 1  # how many batches one after another the input holds, each with statistics of its own
        self.seen: list[tuple[str, Tensor, Tensor]] = []
        self.given: LayerStatistics = {}


class Norm(nn.Module):
    """A frozen `nn.BatchNorm2d` whose statistics can be chosen for each forward pass."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, source: nn.BatchNorm2d, name: str, current: Pass) -> None:
        super().__init__()
        self.name, self.eps, self.current = name, source.eps, current
        self.weight, self.bias = source.weight, source.bias
        self.register_buffer("running_mean", source.running_mean)
        self.register_buffer("running_var", source.running_var)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise as the current pass says."""
        current = self.current
        if current.fast:
            return self._fast(x)
        if current.mode == "batch":
            return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        mean, var = self.running_mean, self.running_var
        if current.mode in ("match", "measure"):
            seen_mean, seen_var = batch_statistics(x)
            current.seen.append((self.name, seen_mean, seen_var))
            if current.mode == "measure":
                mean, var = seen_mean, seen_var
        elif current.mode == "given":
            mean, var = current.given[self.name]
        return F.batch_norm(x, mean, var, self.weight, self.bias, False, 0.0, self.eps)

    def _fast(self, x: Tensor) -> Tensor:
        """The same in float32 arithmetic that a compiler can fuse, with statistics in one pass over x.

        The variance is the mean square about the stored mean, less the square of the mean's distance from it: one pass
        suffices, and no digits are lost, because the stored mean is close to the batch's.
        """
        current, wide = self.current, x if x.dtype == torch.float64 else x.float()
        mean, var = self.running_mean, self.running_var
        if current.mode == "stored":
            return self._normalised(wide, mean, var).to(x.dtype)
        if current.mode == "match":
            away = wide - mean.view(1, -1, 1, 1)
            distance = away.mean((0, 2, 3))
            current.seen.append((self.name, distance + mean, away.square().mean((0, 2, 3)) - distance.square()))
            return self._normalised(wide, mean, var).to(x.dtype)
        own = wide.reshape(current.batches, -1, *wide.shape[1:])  # [batches, B, C, H, W]
        away = own - mean.view(-1, 1, 1)
        distance = away.mean((1, 3, 4))
        seen = away.square().mean((1, 3, 4)) - distance.square()
        return self._normalised(own, distance + mean, seen.clamp_min(0)).flatten(0, 1).to(x.dtype)

    def stored_scale_and_shift(self) -> tuple[Tensor, Tensor]:
        """Scale and shift of each channel [C] by the stored statistics."""
        return self._scale_and_shift(self.running_mean, self.running_var)

    def _normalised(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        """x [..., B, C, H, W] by statistics [..., C]."""
        scale, shift = self._scale_and_shift(mean, var)
        return x * scale.unsqueeze(-2)[..., None, None] + shift.unsqueeze(-2)[..., None, None]

    def _scale_and_shift(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.rsqrt(var + self.eps)
        scale = scale if self.weight is None else scale * self.weight
        return scale, -mean * scale if self.bias is None else self.bias - mean * scale


def batch_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel [C] over batch and space, of x [B, C, ...]."""
    # Half-precision activations: the sums over batch and space need more bits than they have.
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    # Not torch.var_mean, which is five times slower on a CPU. The mean may be detached in the variance: the derivative
    # of the mean square about m is 0 at the mean, so that the gradient stays exact.
    rows = wide.movedim(1, -1).flatten(0, -2)
    mean = rows.mean(0)
    return mean, (rows - mean.detach()).square().mean(0)
