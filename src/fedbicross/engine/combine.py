"""How the answers of several networks are combined: as teacher of a distillation, and as ensemble that predicts."""

from __future__ import annotations

from typing import Literal, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbicross.bundle.limits import NOT_REFERRED as NOT_REFERRED
from fedbicross.errors import MethodError

Combination = Literal["mean_logits", "mean_probs", "class_weighted", "consensus"]
Weighting = Literal["counts", "contrast", "root"]

NEVER = -1e4  # log-probability of an impossible class; finite, so that a file can hold it


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


def contrast_counts(class_counts: Tensor) -> Tensor:
    """min(n(i,c), Σ_d≠c n(i,d)) from counts [N,C]: images of a class that a client could tell from something else.

    A hospital with 1,000 images of one class and 3 of others knows that class no better than from 3: whatever it is
    shown, it says that class. A class that nobody could tell from anything keeps its plain counts.
    """
    counts = class_counts.clamp_min(0)
    others = counts.sum(1, keepdim=True) - counts
    contrast = torch.minimum(counts, others)
    return torch.where(contrast.sum(0) > 0, contrast, counts)


def weighting_counts(class_counts: Tensor, by: Weighting) -> Tensor:
    """What a(i,c) is proportional to, from counts [N,C].

    ``counts``: images of the class. ``contrast``: those that a client could tell from others. ``root``: the square root
    of the latter, since what a network learns from n images grows like that; one large client then has less of a say.
    """
    if by == "counts":
        return class_counts
    contrast = contrast_counts(class_counts)
    return contrast.sqrt() if by == "root" else contrast


def log_prior(class_counts: Tensor, flatness: float = 0.0) -> Tensor:
    """log π(c) of a client's counts [C], mixed with the uniform prior: π = (1-e) n(c)/n + e/C, in float64.

    With e = 0 a class that the client lacks can never be the answer.
    """
    counts = class_counts.double().clamp_min(0)
    prior = (1 - flatness) * counts / counts.sum().clamp_min(1) + flatness / len(counts)
    return torch.where(prior > 0, prior.clamp_min(1e-300).log(), NEVER)


def combine_logits(
    logits: Tensor,
    how: Combination,
    temperature: float,
    class_weights: Tensor | None = None,
    log_prior: Tensor | None = None,
) -> Tensor:
    """The teacher's soft labels [B,C] from the clients' logits [N,B,C].

    ``mean_logits``: softmax(mean_i z_i / τ), averaged before softening (F_k of FedBiCross; E-FedISCA Eq. 3).
    ``mean_probs``: mean_i softmax(z_i / τ).
    ``class_weighted``: Σ_i a(i,c) softmax(z_i / τ)_c, renormalised over classes; a class that nobody has gets 0.
    ``consensus``: softmax(T/τ) of T(c) = Σ_i a(i,c) log softmax(z_i)_c + b(c): each class is judged by those who know
    it, and one of them that is sure it is something else has a veto. ``log_prior`` is b, none: 0. A class that nobody
    has gets 0.
    """
    if how == "mean_logits":
        return soften(logits.mean(0), temperature)
    if how == "mean_probs":
        return soften(logits, temperature).mean(0)
    if how != "class_weighted" and how != "consensus":
        assert_never(how)
    if class_weights is None:
        raise MethodError("no_class_counts", f"{how} teachers need the clients' class counts")
    if how == "consensus":
        weights = class_weights.to(logits.dtype)
        total = torch.einsum("nc,nbc->bc", weights, F.log_softmax(logits, dim=-1))
        total = total if log_prior is None else total + log_prior.to(logits.dtype)
        return soften(total.masked_fill(~(weights > 0).any(0), NEVER), temperature)
    # In logarithms: where each expert is sure of another's class, the products underflow and 0/0 would follow.
    log_weighted = class_weights.to(logits.dtype).log().unsqueeze(1) + F.log_softmax(logits / temperature, dim=-1)
    return F.softmax(torch.logsumexp(log_weighted, dim=0), dim=-1)


def referral_odds(log_probabilities: Tensor, seldom: Tensor) -> Tensor:
    """How much surer a model is of each class than of the likeliest one that is not seldom, in logs [B,C]."""
    never = torch.finfo(log_probabilities.dtype).min
    return log_probabilities - log_probabilities.masked_fill(seldom, never).amax(-1, keepdim=True)


def temper(probabilities: Tensor, temperature: float) -> Tensor:
    """p^(1/T), renormalised over the last axis: above 1 less sure, below 1 surer; the order of classes stays."""
    if temperature == 1:
        return probabilities
    powers = probabilities.pow(1 / temperature)
    return powers / powers.sum(-1, keepdim=True)


def refer(probabilities: Tensor, shared_logits: Tensor, referral: Tensor) -> Tensor:
    """The shared model's probabilities [B,C] for images that it is sure enough to be of a seldom class; else as given.

    ``referral`` [C] holds for each seldom class the odds that it must pass, `NOT_REFERRED` for the others
    (`steps.gate.referral`). Of the seldom classes the likeliest decides.
    """
    shared, seldom = F.log_softmax(shared_logits, dim=-1), referral < NOT_REFERRED
    likeliest = shared.masked_fill(~seldom, torch.finfo(shared.dtype).min).argmax(-1, keepdim=True)
    passed = referral_odds(shared, seldom).gather(-1, likeliest) > referral.to(shared.dtype)[likeliest]
    return torch.where(passed, shared.exp(), probabilities)
