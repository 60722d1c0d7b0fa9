"""Cross-cluster weights w_k: FedBiCross Eqs. 6–8, and the fixed weights of its ablations.

Why no second-order derivative is needed: the inner step (Eq. 7), with momentum m and weight decay d, is

    b' = m b + Σ_j w_j g_j + d θ,    θ' = θ − η_G b',

where g_j = ∇L_KD of cluster j at θ. None of b, θ, g_j depends on w, so ∂θ'/∂w_j = −η_G g_j and exactly

    ∂L_val(θ')/∂w_j = −η_G ⟨∇L_val(θ'), g_j⟩.

It scales with η_G: pass lr=1 where η_w is meant relative to it. Nesterov momentum would change the factor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, assert_never

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


def weighted_gradient(weights: Tensor, source_gradients: Sequence[Tensor]) -> list[Tensor]:
    """Σ_j w_j g_j for each parameter (the gradient in Eq. 7); `source_gradients[p]` is [J, *shape of parameter p]."""
    return [torch.tensordot(weights.to(gradient.dtype), gradient, dims=1) for gradient in source_gradients]


def hypergradient(
    validation_gradient: Sequence[Tensor], source_gradients: Sequence[Tensor], lr: float | Tensor
) -> Tensor:
    """∂L_val(θ')/∂w [J] of Eq. 8 for one inner SGD step, exact with momentum and weight decay.

    `validation_gradient[p]` is ∇L_val at the updated θ', `source_gradients[p]` is [J, *shape], the g_j at the old θ.
    For all K students at once: ``torch.vmap(hypergradient, in_dims=(0, 0, None))``.
    """
    products = [
        _wide(source).flatten(1) @ _wide(validation).flatten()
        for validation, source in zip(validation_gradient, source_gradients, strict=True)
    ]
    return -lr * torch.stack(products).sum(0)


def project_to_simplex(v: Tensor) -> Tensor:
    """The nearest point (Euclidean) with non-negative entries and sum 1, for each row of the last axis.

    Sort-based: entries are lowered by one threshold and cut at 0; the threshold is the one of the largest support for
    which the smallest kept entry stays positive.
    """
    descending = v.sort(dim=-1, descending=True).values
    size = torch.arange(1, v.shape[-1] + 1, device=v.device, dtype=v.dtype)
    thresholds = (descending.cumsum(-1) - 1) / size
    support = (descending > thresholds).sum(-1, keepdim=True).clamp_min(1)
    return (v - thresholds.gather(-1, support - 1)).clamp_min(0)


def weight_step(
    weights: Tensor,
    gradient: Tensor,
    eta_w: float,
    kind: Literal["projected", "mirror"] = "projected",
) -> Tensor:
    """Eq. 8 for one row [J] or all rows [K,J], from the `hypergradient`.

    ``projected``: w − η_w ∇, then onto the simplex (as the paper says). ``mirror``: w · exp(−η_w ∇), renormalised; it
    never makes a weight exactly 0, and leaves a weight that is 0 at 0.
    """
    if kind == "projected":
        return project_to_simplex(weights - eta_w * gradient)
    if kind == "mirror":
        return torch.softmax(weights.log() - eta_w * gradient, dim=-1)
    assert_never(kind)


def cross_cluster_weights(
    kind: Literal["uniform", "intra", "similarity"],
    clusters: int,
    centroids: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Rows w_k [K,K] that are not learnt: the paper's ablations, and the start of the learnt ones (``uniform``).

    ``uniform``: 1/K. ``intra``: only the own cluster. ``similarity``: softmax over j of −d(k,j)/d̄, with d the Euclidean
    distance of the centroids [K,F] and d̄ its mean over pairs k ≠ j (the paper defines no similarity; this one has no
    scale to choose). Coinciding centroids give uniform rows.
    """
    if kind == "uniform":
        return torch.full((clusters, clusters), 1 / clusters, device=device)
    if kind == "intra":
        return torch.eye(clusters, device=device)
    if kind == "similarity":
        if centroids is None or len(centroids) != clusters:
            raise ValueError(f"similarity weights need one centroid for each of the {clusters} clusters")
        flat = _wide(centroids).flatten(1)
        # Not the matrix-product formula: its rounding turns coinciding centroids into small positive distances.
        distance = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")
        mean = distance.sum() / max(clusters * (clusters - 1), 1)
        return torch.softmax(-distance / mean.clamp_min(torch.finfo(flat.dtype).tiny), dim=-1).to(device)
    assert_never(kind)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
