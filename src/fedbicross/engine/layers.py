"""Convolutions in a form for which a GPU has a fast kernel; the numbers are the same.

Two kinds of layers of small residual networks meet slow kernels (measured on an H200, bf16): a first layer of one to
three input channels, and a 1×1 convolution that skips pixels. The first is given channels of zeros, the second an image
without the pixels that it would skip.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS = 8  # bf16 matrix units read eight numbers at a time


class FastConv2d(nn.Conv2d):
    """A convolution whose input is fitted to the kernel first."""

    def forward(self, x: Tensor) -> Tensor:
        """The same as `nn.Conv2d`."""
        x, weight, stride = fitted(x, self.weight, self.stride, self.padding)
        return F.conv2d(x, weight, self.bias, stride, self.padding)


def use_fast_convolutions(model: nn.Module) -> nn.Module:
    """The same network, changed in place: convolutions that would meet a slow kernel are fitted to a fast one."""
    for module in model.modules():
        if type(module) is not nn.Conv2d or not can_be_fitted(module) or module.padding_mode != "zeros":
            continue
        if _few_channels(module.weight) or _skips_pixels(module.weight, module.stride, module.padding):
            module.__class__ = FastConv2d  # its weights, names and hooks stay as they are
    return model


def fitted(
    x: Tensor, weight: Tensor, stride: tuple[int, ...], padding: str | tuple[int, ...]
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Input, weight and stride of the same convolution without skipped pixels and with at least eight channels."""
    if _skips_pixels(weight, stride, padding):
        # The mean of one pixel is that pixel; unlike a slice's, this gradient keeps the layout that the kernels want.
        x, stride = F.avg_pool2d(x, 1, stride), (1, 1)
    return padded(x).contiguous(memory_format=torch.channels_last), padded(weight), stride


def padded(values: Tensor) -> Tensor:
    """Images or weights [., channels, ., .] with channels of zeros, so that there are at least eight."""
    return F.pad(values, (0, 0, 0, 0, 0, CHANNELS - values.shape[1])) if _few_channels(values) else values


def can_be_fitted(conv: nn.Conv2d) -> bool:
    """Whether `fitted` is right for this convolution."""
    return conv.groups == 1 and conv.dilation == (1, 1)


def _few_channels(values: Tensor) -> bool:
    return values.shape[1] < CHANNELS


def _skips_pixels(weight: Tensor, stride: tuple[int, ...], padding: str | tuple[int, ...]) -> bool:
    return weight.shape[2:] == (1, 1) and max(stride) > 1 and padding == (0, 0)
