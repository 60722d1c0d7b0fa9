"""DP-SGD (Abadi et al. 2016): every image's gradient cut to a longest norm, the sum behind Gaussian noise.

Opacus hooks into modules that own their weights; networks here are functions of theirs, so that the gradients of single
images come from `torch.func`. Noise multipliers and ε are Opacus's (`privacy.accountant`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F

from fedbicross.engine.recipe import PrivateTraining, Training
from fedbicross.privacy.accountant import noise_for_training
from fedbicross.privacy.gaussian import noise_for
from fedbicross.privacy.noise import Noise
from fedbicross.privacy.statement import Release

NUMBERS_AT_ONCE = 1 << 26  # of single gradients in memory


def sample_rate(images: int, batch: int) -> float:
    """Chance of each image to be in a step: batch/images, rounded up to a power of √2.

    It stands in the manifest, where the exact rate would tell the exact number of images.
    """
    return min(1.0, math.pow(2.0, math.ceil(2 * math.log2(batch / images)) / 2))


def steps_of_epoch(rate: float) -> int:
    """Steps after which every image has been drawn once on average."""
    return math.ceil(1 / rate)


def counts_release(settings: PrivateTraining) -> Release:
    """The noise for numbers of images that leave beside the network."""
    noise = noise_for(settings.epsilon, settings.delta) / math.sqrt(settings.counts_share)
    return Release(what="numbers of images", mechanism="gaussian", noise_multiplier=noise)


def training_release(recipe: Training, images: int) -> Release:
    """What the training of a network on so many images releases, with as much noise as it takes.

    Whether counts leave too depends on the method; one network serves all methods, so that they are always allowed for.
    """
    assert recipe.dp is not None
    recipe = recipe.as_trained
    rate = sample_rate(images, recipe.batch_size)
    steps = recipe.epochs * steps_of_epoch(rate)
    return Release(
        what="the network",
        mechanism="sampled_gaussian",
        noise_multiplier=_noise(recipe.dp, rate, steps),
        sample_rate=rate,
        steps=steps,
    )


@lru_cache(maxsize=256)
def _noise(settings: PrivateTraining, rate: float, steps: int) -> float:
    return noise_for_training(settings.epsilon, settings.delta, rate, steps, [counts_release(settings)])


def clipped_sums(
    model: nn.Module,
    params: dict[str, Tensor],
    inputs: Tensor,
    labels: Tensor,
    longest: float,
) -> tuple[Tensor, list[Tensor]]:
    """The sum of the losses of single images, and for each parameter that of their gradients, cut to ``longest``.

    The length of a gradient is that of all parameters together. No images at all give zeros.
    """
    one = grad_and_value(lambda given, x, y: F.cross_entropy(functional_call(model, given, (x[None],)), y[None]))
    each = vmap(one, in_dims=(None, 0, 0))
    plain = {name: value.detach() for name, value in params.items()}
    sums = [torch.zeros_like(value) for value in plain.values()]
    summed = torch.zeros((), device=inputs.device)
    at_once = max(1, NUMBERS_AT_ONCE // sum(value.numel() for value in plain.values()))
    for x, y in zip(torch.split(inputs, at_once), torch.split(labels, at_once), strict=True) if len(labels) else ():
        found, losses = each(plain, x, y)
        gradients = [found[name] for name in plain]
        factors = _factors(gradients, longest)
        for total, gradient in zip(sums, gradients, strict=True):
            total += torch.einsum("n,n...->...", factors, gradient)
        summed += losses.sum()
    return summed, sums


def _factors(gradients: Sequence[Tensor], longest: float) -> Tensor:
    """By what each image's gradient is multiplied, [n], at most 1."""
    norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
    factors: Tensor = longest / norms.clamp_min(longest)
    return factors.to(gradients[0].dtype)


def noisy(sums: Sequence[Tensor], noise: Noise, scale: float, expected: float) -> list[Tensor]:
    """The gradient of a step: (Σ + N(0, scale²)) over the number of images that it should have."""
    return [
        (total + scale * torch.from_numpy(np.asarray(noise.normal(*total.shape))).to(total)) / expected
        for total in sums
    ]


class PrivateSteps:
    """The steps of one client's private training."""

    def __init__(self, model: nn.Module, recipe: Training, images: int, noise: Callable[[str], Noise]) -> None:
        assert recipe.dp is not None
        self.model, self.images, self.noise = model, images, noise
        self.batch = float(recipe.batch_size)
        self.longest = recipe.dp.max_grad_norm
        self.release = training_release(recipe, images)

    def draw(self, epoch: int) -> tuple[Noise, list[np.ndarray]]:
        """The noise of an epoch, and the rows of each of its steps: every image by itself is in or not."""
        source, rate = self.noise(f"private-epoch-{epoch}"), self.release.sample_rate
        drawn = [np.flatnonzero(source.uniform(self.images) < rate) for _ in range(steps_of_epoch(rate))]
        return source, drawn

    def gradient(
        self, params: dict[str, Tensor], inputs: Tensor, labels: Tensor, source: Noise
    ) -> tuple[Tensor, list[Tensor]]:
        """The sum of the losses of a step, and the noisy gradient to go by."""
        summed, sums = clipped_sums(self.model, params, inputs, labels, self.longest)
        scale = self.release.noise_multiplier * self.longest
        return summed, noisy(sums, source, scale, self.batch)
