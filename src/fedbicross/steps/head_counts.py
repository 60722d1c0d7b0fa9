"""Class counts that a client keeps to itself, read off the last layer of its network."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_TURN = 1e-4  # sine of the angle; rounding in float32 turns a row by a thousandth of it


def counts_from_head(head: Tensor, first: Tensor) -> Tensor:
    """Numbers [C] about proportional to a client's class counts, from the last layer's rows [C,d] after and before.

    Balanced softmax leaves the classes that a client lacks out of the loss, so that weight decay alone acts on their
    rows: these become shorter and do not turn, which counts as exactly 0. Any image of a class turns its row, and n of
    them move it about as far as the root of n (measured, `benchmarks/no_counts.py`): what is returned is the square of
    how far a row moved across its first direction.
    """
    now, before, norm = head.double(), first.double(), torch.linalg.vector_norm
    along = before / norm(before, dim=1, keepdim=True).clamp_min(1e-300)
    moved = norm(now - (now * along).sum(1, keepdim=True) * along, dim=1)
    return torch.where(moved > SMALLEST_TURN * norm(now, dim=1), moved.square(), 0.0)
