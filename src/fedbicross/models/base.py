"""The one shape of every classifier: a trunk to features, a linear head to logits."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn


class Classifier(nn.Module):
    """``forward = head(features(x))``; methods that need penultimate features or swap heads rely on it."""

    def __init__(self, trunk: nn.Sequential, width: int, classes: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(width, classes)

    def features(self, x: Tensor) -> Tensor:
        """Images [B, channels, H, W] to features [B, D]."""
        out: Tensor = self.trunk(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, channels, H, W] to logits [B, classes]."""
        logits: Tensor = self.head(self.features(x))
        return logits


def sequence(**layers: nn.Module) -> nn.Sequential:
    """A Sequential with named layers, so that tensors in an upload read ``trunk.stage2…`` rather than ``trunk.4…``."""
    return nn.Sequential(OrderedDict(layers))


def convolution(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Conv2d:
    """A size-preserving (at stride 1) convolution without bias: the batch normalisation after it has one."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def global_pool() -> nn.Sequential:
    """[B, D, H, W] to [B, D] by the mean over whatever positions are left."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
