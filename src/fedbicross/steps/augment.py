"""What a student sees of a pool: images turned, mirrored, zoomed, and with a piece of another one (CutMix)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SCALES = (0.75, 1.1)  # side of the window that is seen, as a share of the image
SHIFT = 0.15  # of the window's centre at most, as a share of half the image


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


def draw_views(count: int, generator: torch.Generator) -> Tensor:
    """Windows [count, 3] for `zoomed`: scale, and shift to the right and down, each uniform in its range."""
    drawn = torch.rand(count, 3, generator=generator, device=generator.device)
    low = drawn.new_tensor([SCALES[0], -SHIFT, -SHIFT])
    high = drawn.new_tensor([SCALES[1], SHIFT, SHIFT])
    return low + (high - low) * drawn


def zoomed(images: Tensor, views: Tensor) -> Tensor:
    """Each image [B,C,H,W] seen through its window [B,3], bilinear; beyond its edges it is mirrored.

    A pixel at (x, y) from the centre, in halves of the image, is taken from (scale x + right, scale y + down).
    """
    scale, zero = views[:, 0], torch.zeros_like(views[:, 0])
    rows = [torch.stack([scale, zero, views[:, 1]], 1), torch.stack([zero, scale, views[:, 2]], 1)]
    grid = F.affine_grid(torch.stack(rows, 1).to(images.dtype), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
