"""How far one upload is from the others. Every score compares a site with its peers; no labelled image is needed.

Medians are taken over the others only, so that a site is never its own measure, and stay where they are as long as more
than half of the others are honest.
"""

from __future__ import annotations

import torch
from torch import Tensor

QUIET = 1e-12  # spread of answers below which they say nothing


def medians_of_others(values: Tensor) -> Tensor:
    """The medians of all other rows, for each row of [N,L]; of an even number the mean of the two in the middle."""
    rows = torch.arange(len(values))
    others = torch.stack([values[rows != row] for row in rows.tolist()])
    return others.quantile(0.5, dim=1)


def larger_than_peers(sizes: Tensor) -> Tensor:
    """The largest v(i,l) over the median of v(j,l), j ≠ i, over l, from positive sizes [N,L]; in float64 [N]."""
    logs = sizes.double().clamp_min(1e-300).log()
    return (logs - medians_of_others(logs)).amax(1).exp()


def apart_from_peers(sizes: Tensor) -> Tensor:
    """The same, but so many times as large or as small, whichever is more."""
    logs = sizes.double().clamp_min(1e-300).log()
    return (logs - medians_of_others(logs)).abs().amax(1).exp()


def cosines(weights: Tensor, start: Tensor) -> Tensor:
    """Of the angle between each row of weights [N,D] and those from which all started [D]; in float64 [N]."""
    return torch.nn.functional.cosine_similarity(weights.double(), start.double()[None], dim=1)


def agreement(logits: Tensor, known: Tensor, least: int) -> Tensor:
    """How alike a network and its peers answer the same images, about classes that it shares with others [N].

    From logits [N,B,C] and who knows which class [N,C]. A logit is looked at about its mean over classes, then over
    images, so that neither a sure nor a biased network counts for more. For each class that i shares: the cosine
    between its answers [B] and the mean of those of its peers who know the class, each of length 1. Their mean over
    classes; NaN for a network that shares fewer than ``least``.
    """
    z = logits.double()
    z = z - z.mean(-1, keepdim=True)
    z = z - z.mean(1, keepdim=True)
    z = z / torch.linalg.vector_norm(z, dim=1, keepdim=True).clamp_min(QUIET)
    heard = z * known[:, None]
    peers = heard.sum(0) - heard  # [N,B,C]: of everybody else who knows the class
    alike = torch.nn.functional.cosine_similarity(z, peers, dim=1)  # [N,C]
    shared = known & (known.sum(0) > 1)
    mean = (alike * shared).sum(1) / shared.sum(1).clamp_min(1)
    return torch.where(shared.sum(1) >= least, mean, torch.nan)


def capped(totals: Tensor, most: float) -> Tensor:
    """Factors in (0,1] [N] with which nobody has more than ``most`` times the median total [N] of the others."""
    return (most / larger_than_peers(totals[:, None])).clamp_max(1.0)
