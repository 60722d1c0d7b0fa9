"""A frozen batch normalisation that can use the stored, the current batch's, or given statistics, and report them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LayerStatistics = dict[str, tuple[Tensor, Tensor]]
"""BN layer name → (mean, biased variance), each of shape [channels]."""

Mode = Literal["stored", "match", "batch", "measure", "given", "features"]
BNDistance = Literal["absolute", "relative"]
Way = Literal["plain", "kernels", "compiled"]
"""How a layer does it: the reference, with torch's kernels for batch-norm, or as arithmetic for a compiler."""

SMALLEST_SCALE = 1e-12  # of a channel; a gradient is divided by it, and a channel may have been trained to nothing


class Pass:
    """What the BN layers of one client do during a forward pass, and what they saw: ``with current.doing(mode)``.

    What they saw is dropped afterwards, because it keeps the activations of the pass in memory.
    """

    def __init__(self) -> None:
        self.doing("stored")

    def doing(self, mode: Mode, way: Way = "plain", given: LayerStatistics | None = None, batches: int = 1) -> Pass:
        """What to do in the pass to come; ``batches`` is how many, each with statistics of its own, it holds."""
        self.mode, self.way, self.batches = mode, way, batches
        self.given: LayerStatistics = given or {}
        self.seen: list[tuple[str, Tensor, Tensor]] = []
        self.terms: list[Tensor] = []  # of matching with kernels: each layer's distance from its stored statistics
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.doing("stored")


class Norm(nn.Module):
    """A frozen `nn.BatchNorm2d` whose statistics can be chosen for each forward pass."""

    running_mean: Tensor
    running_var: Tensor
    matching: Tensor
    units: Tensor

    def __init__(self, source: nn.BatchNorm2d, name: str, current: Pass, distance: BNDistance = "absolute") -> None:
        super().__init__()
        self.name, self.eps, self.current = name, source.eps, current
        self.weight, self.bias = source.weight, source.bias
        self.register_buffer("running_mean", source.running_mean)
        self.register_buffer("running_var", source.running_var)
        scale, _ = self.stored_scale_and_shift()
        scale = torch.where(scale.abs() < SMALLEST_SCALE, SMALLEST_SCALE, scale).detach()
        constants = torch.stack((scale, torch.ones_like(scale), -1 / scale, -2 / scale))
        self.register_buffer("matching", constants, persistent=False)
        self.register_buffer("units", distance_units(self.running_var, distance), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise as the current pass says."""
        current = self.current
        if current.way == "compiled":
            return self._fast(x)
        if current.way == "kernels" and current.mode == "match":
            stored = (self.running_mean, self.running_var)
            out, term = matched(x, *stored, self.weight, self.bias, self.matching, self.units, self.eps)
            current.terms.append(term)
            return out
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


def distance_units(variance: Tensor, distance: BNDistance) -> Tensor:
    """What a layer's two distances ‖μ(x)−μ‖₂ and ‖σ²(x)−σ²‖₂ are divided by [2].

    ``absolute``: 1 and 1, as in the papers. ``relative`` (ours): ‖σ‖₂ and ‖σ²‖₂. A layer whose inputs are s times as
    large, as another initialisation makes them, has a term s or s² times as large, and so have both units.
    """
    if distance == "absolute":
        return torch.ones(2, dtype=variance.dtype, device=variance.device)
    return torch.stack((variance.sum().sqrt(), variance.norm())).clamp_min(SMALLEST_SCALE)


def batch_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel [C] over batch and space, of x [B, C, ...]."""
    # Half-precision activations: the sums over batch and space need more bits than they have.
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    # Not torch.var_mean, which is five times slower on a CPU. The mean may be detached in the variance: the derivative
    # of the mean square about m is 0 at the mean, so that the gradient stays exact.
    rows = wide.movedim(1, -1).flatten(0, -2)
    mean = rows.mean(0)
    return mean, (rows - mean.detach()).square().mean(0)


class _Matched(torch.autograd.Function):
    """x [B,C,H,W] normalised by the stored statistics, and ‖μ(x)−μ‖₂ + ‖σ²(x)−σ²‖₂, the distance of its own from them.

    ``matching`` [4,C] holds what a gradient needs: the layer's scale (never 0), ones, −1/scale and −2/scale. ``units``
    [2] divide the two distances. Both ways back to x are one kernel that reads and writes x once; autograd would make
    the gradient of the normalised x and that of the statistics apart, and add them up. There is no second derivative.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean: Tensor,
        var: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        matching: Tensor,
        units: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """Normalised x and the distance."""
        x = x.contiguous(memory_format=torch.channels_last)  # what the kernels are made for; nothing to do as a rule
        seen_mean, seen_var = torch.batch_norm_update_stats(x, None, None, 0.0) if x.is_cuda else batch_statistics(x)
        away = torch.stack((seen_mean - mean, seen_var - var))
        norms = torch.linalg.vector_norm(away, dim=1, keepdim=True)
        ctx.save_for_backward(x, seen_mean, away / (norms.clamp_min(1e-30) * units[:, None]), matching)
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps), (norms[:, 0] / units).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_out: Tensor, by_term: Tensor) -> tuple[Tensor | None, ...]:
        """By x: scale * by_out + by_mean / n + by_var * 2 (x - mean) / n."""
        x, mean, direction, matching = ctx.saved_tensors
        scale, ones, count = matching[0], matching[1], x.numel() // x.shape[1]
        by_mean, by_var = (direction * by_term * matching[2:]).unbind()  # already divided by -scale, and by_var doubled
        if x.is_cuda:
            # The kernel is made for other statistics: weight * (by_out - a / n - (x - mean) * b / n).
            counts = torch.full((1,), count, dtype=torch.int32, device=x.device)
            by_out = by_out.contiguous(memory_format=torch.channels_last)
            by_x = torch.batch_norm_backward_elemt(by_out, x, mean, ones, scale, by_mean, by_var, counts)
        else:
            shape = (1, -1, 1, 1)
            a, b = by_mean.view(shape) / count, by_var.view(shape) / count
            by_x = (scale.view(shape) * (by_out - a - (x - mean.view(shape)) * b)).to(x.dtype)
        return by_x, None, None, None, None, None, None, None


# Typed, for callers: torch's own ``apply`` is not.
matched: Callable[..., tuple[Tensor, Tensor]] = _Matched.apply
