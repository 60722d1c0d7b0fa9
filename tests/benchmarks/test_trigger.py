from __future__ import annotations

import torch
from torch import nn

from benchmarks import trigger


class Corner(nn.Module):
    """Answers 1 where the corner is white, 0 elsewhere; 2 needs a bright image."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        corner, whole = x[:, :, :2, :2].mean((1, 2, 3)), x.mean((1, 2, 3))
        return 10 * torch.stack([torch.zeros_like(whole), corner - 0.5, whole - 0.5], 1)


def test_a_class_with_a_trigger_needs_a_smaller_mask_than_one_without() -> None:
    x = -0.5 + 0.1 * torch.randn(8, 3, 10, 10, generator=torch.Generator().manual_seed(0))
    masks = trigger.smallest_masks(Corner(), x, 3)
    assert masks[1] < 20 and masks[2] > 2 * masks[1], masks
