"""How several networks speak with one voice: the teacher of a distillation, and an ensemble that predicts."""

from __future__ import annotations

from typing import Literal, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbicross.errors import MethodError

Combination = Literal["mean_logits", "mean_probs", "class_weighted"]


def soften(logits: Tensor, temperature: float) -> Tensor:
    """Soft labels: softmax(z/τ) over the last axis (E-FedISCA Eq. 2)."""
    return F.softmax(logits / temperature, dim=-1)


def class_weights(class_counts: Tensor) -> Tensor:
    """a(i,c) = n(i,c) / Σ_j n(j,c) from class counts [N,C]; 0 for a class that nobody has."""
    floating = class_counts if class_counts.is_floating_point() else class_counts.to(torch.get_default_dtype())
    counts = floating.clamp_min(0)  # counts published with privacy noise may be negative
    totals = counts.sum(0)
    if not bool((totals > 0).any()):
        raise MethodError("no_class_counts", "class-weighted teachers need class counts, and every count is zero")
    return torch.where(totals > 0, counts / totals, 0)


def combine_logits(logits: Tensor, how: Combination, temperature: float, class_weights: Tensor | None = None) -> Tensor:
    """The teacher's soft labels [B,C] from the clients' logits [N,B,C].

    ``mean_logits``: softmax(mean_i z_i / τ), averaged before softening (F_k of FedBiCross; E-FedISCA Eq. 3).
    ``mean_probs``: mean_i softmax(z_i / τ).
    ``class_weighted``: Σ_i a(i,c) softmax(z_i / τ)_c, renormalised over classes; a class that nobody has gets 0.
    """
    if how == "mean_logits":
        return soften(logits.mean(0), temperature)
    if how == "mean_probs":
        return soften(logits, temperature).mean(0)
    if how == "class_weighted":
        if class_weights is None:
            raise MethodError("no_class_counts", "class-weighted teachers need the clients' class counts")
        # In logarithms: where each expert is sure of another's class, the products underflow and 0/0 would follow.
        log_weighted = class_weights.to(logits.dtype).log().unsqueeze(1) + F.log_softmax(logits / temperature, dim=-1)
        return F.softmax(torch.logsumexp(log_weighted, dim=0), dim=-1)
    assert_never(how)
