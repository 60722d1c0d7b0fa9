"""Small networks with BatchNorm2d and made-up running statistics, for the tests of the steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedbicross.engine.ensemble import Ensemble


class Tiny(nn.Module):
    def __init__(self, channels: int = 3, classes: int = 4, width: int = 5) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width)
        self.block = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        return self.head((x + self.block(x)).mean((2, 3)))


def no_bn(channels: int = 3, classes: int = 4) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, 3, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, classes)
    )


def randomised(model: nn.Module, seed: int) -> nn.Module:
    """Weights and running statistics from a seed, in float64."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not tensor.is_floating_point():
                continue
            value = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 0.5
            tensor.copy_(value.abs() + 0.5 if name.endswith("running_var") else value)
    return model


def tiny_ensemble(clients: int = 3, **sizes: int) -> Ensemble:
    return Ensemble([randomised(Tiny(width=5 + i % 2, **sizes), seed=i) for i in range(clients)])


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
