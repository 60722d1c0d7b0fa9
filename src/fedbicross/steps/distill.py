"""Knowledge distillation: FedBiCross Eqs. 5 and 9, FedISCA Eq. 3, E-FedISCA Eqs. 2–4 and 8.

The papers write KL without τ²; the released code multiplies by it, and without it the gradient at τ = 20 is 400 times
smaller. Here every distillation loss carries τ².
"""

from __future__ import annotations

from typing import Literal, NamedTuple, assert_never

import torch.nn.functional as F
from torch import Tensor

from fedbicross.engine.combine import soften


def soft_kd_loss(student_logits: Tensor, teacher_soft: Tensor, temperature: float) -> Tensor:
    """τ² · KL(teacher ‖ student), mean over the batch, from soft labels already softened with the same τ."""
    student_log = F.log_softmax(student_logits / temperature, dim=-1)
    return F.kl_div(student_log, teacher_soft, reduction="batchmean") * temperature**2


def kd_loss(student_logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """τ² · KL(teacher ‖ student) from logits, mean over the batch (E-FedISCA Eq. 4)."""
    return soft_kd_loss(student_logits, soften(teacher_logits, temperature), temperature)


def mixed_kd_loss(
    student_logits: Tensor, original_soft: Tensor, adapted_soft: Tensor, lam: float | Tensor, temperature: float
) -> Tensor:
    """Eq. 5: λ KL(F̃ ‖ G) + (1−λ) KL(F ‖ G), from soft labels of the noise-adapted and the original teacher."""
    adapted = soft_kd_loss(student_logits, adapted_soft, temperature)
    original = soft_kd_loss(student_logits, original_soft, temperature)
    return lam * adapted + (1 - lam) * original


def noise_level(t: int, steps: int, convention: Literal["paper", "released"] = "paper") -> float:
    """λ(t) of the batch after t of T steps: 1 − t/T as written (0 at t = T), or FedISCA's code, 1 − (t−1)/T."""
    if convention == "paper":
        return 1 - t / steps
    if convention == "released":
        return 1 - (t - 1) / steps
    assert_never(convention)


class PersonalLoss(NamedTuple):
    """L_pers and its terms before weighting, as 0-dim tensors."""

    total: Tensor
    cross_entropy: Tensor
    from_cluster: Tensor
    from_client: Tensor


def personal_loss(
    logits: Tensor,
    labels: Tensor,
    cluster_logits: Tensor,
    client_logits: Tensor,
    *,
    temperature: float,
    gamma: float = 0.5,
    delta: float = 0.3,
) -> PersonalLoss:
    """Eq. 9: CE + γ KL(G_k ‖ f_pers) + δ KL(f_i ‖ f_pers).

    The paper gives this stage no temperature of its own; at 20 with τ² the two KLs act as a regression of the logits
    and can outweigh CE, which is why it must be said here and why the terms are returned.
    """
    cross_entropy = F.cross_entropy(logits, labels)
    from_cluster = kd_loss(logits, cluster_logits, temperature)
    from_client = kd_loss(logits, client_logits, temperature)
    total = cross_entropy + gamma * from_cluster + delta * from_client
    return PersonalLoss(total, cross_entropy, from_cluster, from_client)
