"""What a student sees of a pool of images: turned, mirrored, and with a piece of another image (CutMix)."""

from __future__ import annotations

import torch
from torch import Tensor

from fedbicross.engine.train import turn_and_mirror

__all__ = ["cutmix", "draw_boxes", "turn_and_mirror"]


def draw_boxes(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Boxes [count, 4] as top, bottom, left, right (ends excluded), as Yun et al. (2019) draw them.

    The share of the image that a box covers is uniform in [0, 1] and its centre anywhere; what sticks out is cut off.
    """
    device = generator.device
    side = (size * torch.rand(count, generator=generator, device=device).sqrt()).round()
    centre = torch.randint(size, (count, 2), generator=generator, device=device)
    low = (centre - (side / 2).floor()[:, None]).clamp_min(0)
    high = (centre - (side / 2).floor()[:, None] + side[:, None]).clamp_max(size)
    return torch.stack([low[:, 0], high[:, 0], low[:, 1], high[:, 1]], 1).long()


def cutmix(images: Tensor, others: Tensor, boxes: Tensor) -> Tensor:
    """Each image [B,C,H,W] with its box [B,4] filled from the other image; an empty box leaves it alone."""
    height, width = images.shape[-2:]
    rows, columns = torch.arange(height, device=images.device), torch.arange(width, device=images.device)
    top, bottom, left, right = (boxes[:, i, None] for i in range(4))
    inside = ((rows >= top) & (rows < bottom))[:, :, None] & ((columns >= left) & (columns < right))[:, None, :]
    return torch.where(inside[:, None], others, images)
