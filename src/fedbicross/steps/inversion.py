"""Image synthesis from client models alone (DeepInversion): FedBiCross Eqs. 1–2, FedISCA Eq. 1, E-FedISCA Eqs. 5–6.

The papers write a plain gradient step and name Adam in the details; Adam it is. As in FedISCA, each step looks at the
batch circularly shifted by a few pixels, and all three terms of the loss are those of the shifted batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbicross import models
from fedbicross.engine.fast import recorded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fedbicross.engine.ensemble import Ensemble


@dataclass(frozen=True)
class InversionSettings:
    """The numbers of the synthesis, with FedBiCross's values."""

    steps: int = 500  # T
    batch: int = 256  # B
    lr: float = 5e-2  # η_s
    alpha_tv: float = 2.5e-5
    alpha_bn: float = 10.0
    jitter: int = 2  # pixels, either way; not in the papers, from FedISCA's code
    bn_reduction: Literal["mean", "sum"] = "mean"  # over clients: E-FedISCA Eq. 6 divides by N, FedISCA's code does not
    ce: Literal["mean_logits", "mean_ce"] = "mean_logits"  # E-FedISCA's text has the mean of the clients' CEs


class InversionLoss(NamedTuple):
    """L_DI and its terms before weighting, as 0-dim tensors."""

    total: Tensor
    cross_entropy: Tensor
    total_variation: Tensor
    batch_norm: Tensor


def total_variation(x: Tensor) -> Tensor:
    """R_TV: the sum of four un-squared norms, each over the whole batch: both axes and both diagonals."""
    differences = (
        x[..., :, 1:] - x[..., :, :-1],
        x[..., 1:, :] - x[..., :-1, :],
        x[..., 1:, 1:] - x[..., :-1, :-1],
        x[..., 1:, :-1] - x[..., :-1, 1:],
    )
    return torch.stack([torch.linalg.vector_norm(difference) for difference in differences]).sum()


def ensemble_cross_entropy(logits: Tensor, labels: Tensor, how: Literal["mean_logits", "mean_ce"]) -> Tensor:
    """L_CE of logits [N,B,C]: of the clients' mean logits, or the mean of the clients' own losses."""
    if how == "mean_logits":
        return F.cross_entropy(logits.mean(0), labels)
    if how == "mean_ce":
        return F.cross_entropy(logits.flatten(0, 1), labels.repeat(logits.shape[0]))
    assert_never(how)


def reduce_bn_loss(losses: Tensor, has_batchnorm: list[bool], how: Literal["mean", "sum"]) -> Tensor:
    """R_BN from the clients' terms [N]; the mean is over the clients that have BN."""
    if how == "sum":
        return losses.sum()
    if how == "mean":
        return losses.sum() / max(sum(has_batchnorm), 1)
    assert_never(how)


def inversion_loss(ensemble: Ensemble, x: Tensor, labels: Tensor, settings: InversionSettings) -> InversionLoss:
    """L_DI, Eq. 2: CE + α_TV R_TV + α_BN R_BN, for a batch as the clients see it (already shifted)."""
    logits, bn_losses = ensemble.logits_and_bn_loss(x)
    cross_entropy = ensemble_cross_entropy(logits, labels, settings.ce)
    variation = total_variation(x)
    batch_norm = reduce_bn_loss(bn_losses, ensemble.has_batchnorm, settings.bn_reduction)
    total = cross_entropy + settings.alpha_tv * variation + settings.alpha_bn * batch_norm
    return InversionLoss(total, cross_entropy, variation, batch_norm)


def inversion_gradient(
    ensemble: Ensemble, x: Tensor, labels: Tensor, settings: InversionSettings
) -> tuple[InversionLoss, Tensor]:
    """L_DI and its gradient by x, detached, with the activations of `ensemble.at_once` clients in memory at a time.

    The loss is a sum over clients but for the cross-entropy of their mean logits. Its derivative by the logits of a
    client is that by the mean over N, the same for all: one pass without gradients finds the mean, a second, a group of
    clients at a time, carries the derivative on to the pixels. The mean of cross-entropies needs the second only.
    """
    groups = ensemble.groups()
    if len(groups) == 1:
        leaf = x.detach().requires_grad_(True)
        loss = inversion_loss(ensemble, leaf, labels, settings)
        (gradient,) = torch.autograd.grad(loss.total, leaf)
        return InversionLoss(*(term.detach() for term in loss)), gradient
    cross_entropy, by_logits = x.new_zeros(()), None
    if settings.ce == "mean_logits":
        cross_entropy, by_mean = _cross_entropy_of_the_mean(groups, x, labels)
        by_logits = by_mean / len(ensemble)
    bn_terms, gradient = [], torch.zeros_like(x)
    for group in groups:
        leaf = x.detach().requires_grad_(True)
        logits, bn_losses = group.logits_and_bn_loss(leaf)
        if by_logits is None:
            share = ensemble_cross_entropy(logits, labels, "mean_ce") * (len(group) / len(ensemble))
            cross_entropy = cross_entropy + share.detach()
        else:
            share = (logits * by_logits).sum()
        matching = reduce_bn_loss(bn_losses, ensemble.has_batchnorm, settings.bn_reduction)
        bn_terms.append(matching.detach())
        gradient = gradient + torch.autograd.grad(share + settings.alpha_bn * matching, leaf)[0]
    leaf = x.detach().requires_grad_(True)
    variation = total_variation(leaf)
    gradient = gradient + settings.alpha_tv * torch.autograd.grad(variation, leaf)[0]
    variation, batch_norm = variation.detach(), torch.stack(bn_terms).sum()
    total = cross_entropy + settings.alpha_tv * variation + settings.alpha_bn * batch_norm
    return InversionLoss(total, cross_entropy, variation, batch_norm), gradient


def _cross_entropy_of_the_mean(groups: list[Ensemble], x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """L_CE of the mean logits of all groups, and its derivative by that mean."""
    with torch.no_grad():
        mean = torch.cat([group.logits(x) for group in groups]).mean(0)
    mean = mean.requires_grad_(True)
    loss = F.cross_entropy(mean, labels)
    return loss.detach(), torch.autograd.grad(loss, mean)[0]


KEPT = 4  # numbers that autograd keeps for each one that a BN layer is given: 2.9 to 3.9, by architecture
MEMORY_CPU = 12 << 30  # bytes; fixed, so that every machine groups its clients in the same way


def clients_that_fit(architectures: Sequence[str], shape: tuple[int, int, int], batch: int, device: str) -> int:
    """How many of these clients an inversion may have in memory: half of a GPU's, or 12 GiB; always at least one.

    ``shape`` is (channels, classes, image size). The largest architecture counts.
    """
    values = max(models.normalised_values(name, *shape) for name in architectures)
    memory = MEMORY_CPU
    if device == "cuda":
        memory = torch.cuda.get_device_properties(torch.device(device)).total_memory // 2
    return max(1, memory // max(4 * KEPT * batch * values, 1))


def circular_shift(x: Tensor, offset: Tensor) -> Tensor:
    """`torch.roll` over height and width by `offset` [2], a tensor on the device of x, so that no step waits for it."""
    rows = (torch.arange(x.shape[-2], device=x.device) - offset[0]) % x.shape[-2]
    columns = (torch.arange(x.shape[-1], device=x.device) - offset[1]) % x.shape[-1]
    return x.index_select(-2, rows).index_select(-1, columns)


def balanced_labels(batch: int, classes: int, device: torch.device | str | None = None) -> Tensor:
    """0..C−1 repeated: every class as often as any other, and any run of C neighbours holds each class once."""
    return torch.arange(batch, device=device) % classes


def adam_step(
    x: Tensor, gradient: Tensor, first: Tensor, second: Tensor, count: Tensor, lr: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Adam with the usual constants (0.9, 0.999, 1e-8); `count` is the 0-dim device tensor 1 at the first step."""
    first = 0.9 * first + 0.1 * gradient
    second = 0.999 * second + 0.001 * gradient.square()
    # Bias corrections as 0-dim float64: they change no dtype of x, and the powers lose no digits.
    first_scale, second_scale = 1 - 0.9 ** count.double(), 1 - 0.999 ** count.double()
    x = x - (lr / first_scale) * first / ((second / second_scale).sqrt() + 1e-8)
    return x, first, second


class Inversion:
    """One batch on its way from N(0,1) noise to images: x, Adam's moments, the step, and all shifts drawn up-front.

    Each `step` makes new tensors, so `images` may be kept (as a trajectory) without copying. `tensors` holds the whole
    state: a run stopped between two steps and continued from it makes the same bytes.
    """

    def __init__(self, ensemble: Ensemble, settings: InversionSettings, state: Mapping[str, Tensor]) -> None:
        self.ensemble, self.settings = ensemble, settings
        self.load(state)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `tensors` gave."""
        self.images, self.labels, self._offsets = state["images"], state["labels"], state["offsets"]
        self._first, self._second, self._count = state["first"], state["second"], state["count"]
        self.t = int(self._count)  # the same number on the host, so that asking for it waits for no device

    @classmethod
    def start(
        cls,
        ensemble: Ensemble,
        labels: Tensor,
        image_shape: tuple[int, int, int],
        settings: InversionSettings,
        generator: torch.Generator,
        dtype: torch.dtype | None = None,
    ) -> Inversion:
        """Draw x(0) ~ N(0,1) of shape [B, *image_shape] and the shifts of all T steps, on the generator's device."""
        if len(labels) != settings.batch:
            raise ValueError(f"{len(labels)} labels for a batch of {settings.batch}")
        device = generator.device
        images = torch.randn((settings.batch, *image_shape), generator=generator, device=device, dtype=dtype)
        reach = (-settings.jitter, settings.jitter + 1)
        state = {
            "images": images,
            "labels": labels.to(device),
            "offsets": torch.randint(*reach, (settings.steps, 2), generator=generator, device=device),
            "first": torch.zeros_like(images),
            "second": torch.zeros_like(images),
            "count": torch.zeros((), dtype=torch.int64, device=device),
        }
        return cls(ensemble, settings, state)

    def tensors(self) -> dict[str, Tensor]:
        """The whole state as a flat dict."""
        return {
            "images": self.images,
            "labels": self.labels,
            "offsets": self._offsets,
            "first": self._first,
            "second": self._second,
            "count": self._count,
        }

    def step(self) -> InversionLoss:
        """x(t−1) → x(t) (Eq. 1); returns the detached loss at x(t−1), the one whose gradient was followed."""
        if self.t >= self.settings.steps:
            raise ValueError(f"all {self.settings.steps} steps are done")
        offset = self._offsets.index_select(0, self._count.view(1))[0]
        # One recording serves all trajectories of this ensemble and these settings.
        kept, key = self.ensemble.captured, f"inversion {self.settings}"
        advance = recorded(kept, key, self._advance, [], self.ensemble.fast)
        out = advance(self.images, self._first, self._second, self._count, offset, self.labels)
        self.images, self._first, self._second, self._count = out[:4]
        self.t += 1
        return InversionLoss(*out[4:])

    def _advance(
        self, images: Tensor, first: Tensor, second: Tensor, count: Tensor, offset: Tensor, labels: Tensor
    ) -> list[Tensor]:
        """The step as a function of tensors: new images, moments and count, then the terms of the loss."""
        with torch.enable_grad():
            loss, gradient = inversion_gradient(
                self.ensemble, circular_shift(images.detach(), offset), labels, self.settings
            )
        count = count + 1
        moved = adam_step(images, circular_shift(gradient, -offset), first, second, count, self.settings.lr)
        return [*moved, count, *loss]


def structure(x: Tensor) -> Tensor:
    """Lag-1 spatial autocorrelation, averaged over the batch: about 0 for white noise, towards 1 for smooth images.

    A 0-dim tensor. Near 0 after synthesis means that the batch never became images. The converse does not hold: the TV
    term alone smooths noise, so look at the other terms of the loss too. A constant image counts as 0; a negative value
    means that neighbours alternate (checkerboards).
    """
    centred = x - x.mean((-2, -1), keepdim=True)
    power = centred.square().mean((-2, -1)).clamp_min(torch.finfo(x.dtype).tiny)
    across = (centred[..., :, 1:] * centred[..., :, :-1]).mean((-2, -1))
    down = (centred[..., 1:, :] * centred[..., :-1, :]).mean((-2, -1))
    return ((across + down) / (2 * power)).mean()
