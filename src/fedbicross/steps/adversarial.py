"""What a generator is asked for, and how an ensemble is weighted: the losses of DAFL, DENSE and Co-Boosting.

DAFL (Chen et al., ICCV 2019), DENSE (Zhang et al., NeurIPS 2022), Co-Boosting (Dai et al., ICLR 2024). Teachers are
logits of the clients [N,B,C] or of the whole ensemble [B,C]; gradients flow to the images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

Form = Literal["released", "written"]
WeightStep = Literal["sign", "gradient", "none"]

SMALLEST = 1e-12  # of a mean probability before its logarithm: a class that the generator never makes


# --- DAFL ------------------------------------------------------------------------------------------------


def one_hot_loss(logits: Tensor) -> Tensor:
    """L_oh: the cross-entropy with the teacher's own first choice, so that it becomes sure of its images."""
    return F.cross_entropy(logits, logits.argmax(-1))


def information_entropy_loss(logits: Tensor, form: Form = "released") -> Tensor:
    """L_ie: minus the entropy of the mean prediction, so that every class is made as often as any other.

    ``written``: (1/C) Σ p ln p as in the paper; ``released``: Σ p log10 p as in the authors' code.
    """
    mean = logits.softmax(-1).mean(0).clamp_min(SMALLEST)
    total = (mean * mean.log()).sum()
    if form == "written":
        return total / logits.shape[-1]
    if form == "released":
        return total / math.log(10)
    assert_never(form)


def activation_loss(features: Sequence[Tensor], form: Form = "released") -> Tensor:
    """L_a: minus the size of the clients' features [B,D], each client's own term, then their mean.

    ``written``: the mean over images of the L1 norm; ``released``: also the mean over the D features. Features of
    different architectures have different lengths, so that they could not be averaged themselves.
    """
    if form == "written":
        return -torch.stack([feature.abs().sum(1).mean() for feature in features]).mean()
    if form == "released":
        return -torch.stack([feature.abs().mean() for feature in features]).mean()
    assert_never(form)


# --- DENSE and Co-Boosting -------------------------------------------------------------------------------


def adversarial_loss(
    teacher_logits: Tensor, student_logits: Tensor, temperature: float = 1.0, boundary: bool = False
) -> Tensor:
    """τ² · −KL(teacher ‖ student), mean over the batch: images from which the student still has to learn.

    ``boundary``: only images on which the two disagree count (DENSE's L_div: support of the decision boundary), while
    the mean stays one over the whole batch.
    """
    teacher_log = F.log_softmax(teacher_logits / temperature, dim=-1)
    student_log = F.log_softmax(student_logits / temperature, dim=-1)
    divergence = (teacher_log.exp() * (teacher_log - student_log)).sum(-1)
    if boundary:
        divergence = divergence * (teacher_logits.argmax(-1) != student_logits.argmax(-1))
    return -divergence.mean() * temperature**2


def hard_cross_entropy(logits: Tensor, labels: Tensor, exponent: float = 1.0) -> Tensor:
    """L_H of Co-Boosting: cross-entropy, each image weighted by how hard it is, (1 − p_y)^exponent (not followed)."""
    losses = F.cross_entropy(logits, labels, reduction="none")
    if exponent == 0:
        return losses.mean()
    hardness = (1 - (-losses.detach()).exp()).clamp(0, 1)
    return (hardness**exponent * losses).mean()


def weighted_logits(logits: Tensor, weights: Tensor) -> Tensor:
    """The ensemble A_w: Σ w_k z_k / Σ w_k from logits [N,B,C] and weights [N]."""
    combined: Tensor = torch.tensordot(weights, logits, dims=1)
    return combined / weights.sum()


def weight_gradient(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """∂ CE(A_w, y) / ∂w in closed form: mean over the batch of (p − e_y) · (z_k − A_w) / Σ w. No backward pass."""
    combined = weighted_logits(logits, weights)
    residual = combined.softmax(-1) - F.one_hot(labels, combined.shape[-1])
    return ((logits - combined) * residual).sum(-1).mean(-1) / weights.sum()


def updated_weights(weights: Tensor, gradient: Tensor, lr: float | Tensor, step: WeightStep = "sign") -> Tensor:
    """w ← clip(w − μ sign(g), 0, 1), or with g itself; weights that would all be 0 stay as they were."""
    if step == "none":
        return weights
    if step == "sign":
        moved = weights - lr * gradient.sign()
    elif step == "gradient":
        moved = weights - lr * gradient
    else:
        assert_never(step)
    moved = moved.clamp(0, 1)
    return torch.where(moved.sum() > 0, moved, weights)


def diversified(
    x: Tensor, logits_of: Callable[[Tensor], Tensor], direction: Tensor, epsilon: float, temperature: float
) -> Tensor:
    """x + ε sign(∇_x u · softmax(z(x)/τ)): output-diversified sampling (Tashiro et al. 2020) with u [B,C]."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_(True)
        projection = (direction * (logits_of(leaf) / temperature).softmax(-1)).sum()
        (gradient,) = torch.autograd.grad(projection, leaf)
    return x + epsilon * gradient.sign()


def variety(images: Tensor, labels: Tensor, classes: int) -> Tensor:
    """How much images of one class differ: the standard deviation over them of each pixel, averaged [C].

    0 is one and the same picture; NaN stands for a class with fewer than two images. Images are in [-1, 1].
    """
    member = F.one_hot(labels, classes).to(images.dtype).T  # [C,B]
    count = member.sum(1, keepdim=True)
    pixels = images.flatten(1)
    mean = member @ pixels / count
    square = (member @ pixels.square() / count - mean.square()).clamp_min(0)
    return torch.where(count[:, 0] > 1, square.sqrt().mean(1), torch.nan)
