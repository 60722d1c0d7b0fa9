"""Learning from synthetic token sequences under the guidance of the clients' classifiers: FALCON Eqs. 10-13.

Also how a client mixes several heads by what they say of its own validation images, which is ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbicross.engine.combine import combine_logits, soften
from fedbicross.steps.distill import soft_kd_loss


def ensemble_distribution(logits: Tensor, temperature: float, weights: Tensor | None = None) -> Tensor:
    """Eq. 10: p_T = Σ_n w_n softmax(z_n / T) from logits [N, B, C]; w_n = 1/N unless given.

    Weights [N, C], by teacher and class, are ours: Σ_n w_nc softmax(z_n / T)_c, scaled to sum to one.
    """
    if weights is not None and weights.ndim == 2:
        return combine_logits(logits, "class_weighted", temperature, weights)
    soft = soften(logits, temperature)
    return soft.mean(0) if weights is None else (weights.view(-1, 1, 1) * soft).sum(0)


def guided_loss(logits: Tensor, labels: Tensor, teacher: Tensor, alpha: float, temperature: float) -> Tensor:
    """Eqs. 11-13: (1 - α) CE + α T² KL(p_T ‖ p_S), mean over the batch."""
    distillation = soft_kd_loss(logits, teacher, temperature) if alpha > 0 else 0.0
    return (1 - alpha) * F.cross_entropy(logits, labels) + alpha * distillation


@torch.no_grad()
def teach(teachers: Sequence[nn.Module], tokens: Tensor, temperature: float, weights: Tensor | None) -> Tensor:
    """The teachers' joint answer [n, C] to token sequences (Eq. 10)."""
    parts = [torch.stack([t(part) for t in teachers]) for part in torch.split(tokens, 4096)]
    return torch.cat([ensemble_distribution(part, temperature, weights) for part in parts])


def best_mixture(answers: Tensor, labels: Tensor, step: float = 0.25) -> tuple[float, float, float]:
    """Shares of local, tuned and global head that are most often right, from their probabilities [3, n, C].

    Of equals the largest share of the global head, since only it knows the classes that the client lacks; then the
    lowest loss. By loss alone the local head, sure of its own few classes, would nearly always win.
    """
    count = round(1 / step)
    grid = [(a * step, b * step, 1 - (a + b) * step) for a in range(count + 1) for b in range(count + 1 - a)]

    def rank(shares: tuple[float, float, float]) -> tuple[int, float, float]:
        mixed = torch.einsum("h,hnc->nc", torch.tensor(shares, dtype=answers.dtype), answers)
        loss = -mixed[range(len(labels)), labels].clamp_min(1e-12).log().mean()
        return -int((mixed.argmax(1) == labels).sum()), -shares[2], float(loss)

    return min(grid, key=rank)
