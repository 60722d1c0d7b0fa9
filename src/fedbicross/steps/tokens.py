"""Token sequences: their views (FALCON 2.3) and how near a synthetic token may come to a real one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbicross.engine.tokens import Box, boxes, token_sequences

__all__ = ["Box", "boxes", "exact_copies", "nearest_cosine", "token_sequences"]


def exact_copies(synthetic: Tensor, real: Tensor) -> int:
    """How many synthetic tokens equal a real one bit for bit; both [..., dim]."""
    real_rows = {row.tobytes() for row in real.reshape(-1, real.shape[-1]).cpu().numpy()}
    return sum(row.tobytes() in real_rows for row in synthetic.reshape(-1, synthetic.shape[-1]).cpu().numpy())


def nearest_cosine(synthetic: Tensor, real: Tensor, chunk: int = 4096) -> Tensor:
    """For every synthetic sequence [n, T, dim] the largest cosine of any of its tokens with any real token, [n]."""
    count, length, dim = synthetic.shape
    targets = F.normalize(real.reshape(-1, dim), dim=1)
    rows = F.normalize(synthetic.reshape(-1, dim), dim=1)
    best = torch.full((len(rows),), -1.0, dtype=rows.dtype, device=rows.device)
    for start in range(0, len(rows), chunk):
        part = rows[start : start + chunk]
        for at in range(0, len(targets), chunk):
            inner = part @ targets[at : at + chunk].T
            best[start : start + chunk] = best[start : start + chunk].maximum(inner.amax(1))
    return best.view(count, length).amax(1) if count else best
