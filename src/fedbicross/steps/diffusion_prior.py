"""A diffusion model that knows what images look like, steered by one client's network (FedLMG, ICML 2025).

`DiffusionPrior` is all that a prior must offer. `GaussianPrior` is a stand-in without weights for tests and dry runs;
`steps.latent_diffusion` wraps Stable Diffusion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbicross.errors import MethodError
from fedbicross.models import priors

if TYPE_CHECKING:
    from fedbicross.engine.ensemble import Ensemble


class DiffusionPrior(Protocol):
    """A denoiser in ``steps`` steps from noise (step 0) to an image (step ``steps``); everything differentiable."""

    steps: int

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Latents of step 0."""
        ...

    def clean(self, latents: Tensor, step: int, texts: Sequence[str]) -> Tensor:
        """The noise-free latents that the model guesses from those of a step; ``texts`` describe the images."""
        ...

    def advance(self, latents: Tensor, clean: Tensor, step: int) -> Tensor:
        """Latents of the next step, given the guess."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Noise-free latents as images [n,3,H,W] in [-1,1]."""
        ...

    @property
    def flops(self) -> int:
        """Operations of one guess and one decoding of one image."""
        ...


def load_prior(name: str, steps: int, image_size: int, cfg: float, device: str) -> DiffusionPrior:
    """The prior by name; ``cfg`` is the weight of the text (classifier-free guidance), which the stand-in ignores."""
    priors.check(name)
    if name == "gaussian":
        return GaussianPrior(steps, image_size, device)
    from fedbicross.steps.latent_diffusion import LatentDiffusion

    return LatentDiffusion(priors.folder(name), steps, cfg, device)


def ddim_step(latents: Tensor, clean: Tensor, now: float | Tensor, following: float | Tensor) -> Tensor:
    """Deterministic DDIM (Song et al. 2021, Eq. 12, σ = 0) from ᾱ = ``now`` to ᾱ = ``following``."""
    noise = (latents - now**0.5 * clean) / (1 - now) ** 0.5
    return following**0.5 * clean + (1 - following) ** 0.5 * noise


class GaussianPrior:
    """The exact diffusion of a Gaussian random field with a falling spectrum: smooth blobs of grey and colour.

    For a Gaussian the best guess E[x₀|x_t] is a Wiener filter, so that this prior needs no training and no weights.
    """

    def __init__(self, steps: int, image_size: int, device: str = "cpu", deviation: float = 0.5) -> None:
        self.steps, self.size, self.device = steps, image_size, device
        vertical = torch.fft.fftfreq(image_size, device=device).view(-1, 1)
        horizontal = torch.fft.rfftfreq(image_size, device=device).view(1, -1)
        power = 1 / (vertical.square() + horizontal.square() + (1.5 / image_size) ** 2) ** 1.5
        whole = 1 / (
            vertical.square() + torch.fft.fftfreq(image_size, device=device).square() + (1.5 / image_size) ** 2
        )
        self.power = power * deviation**2 / (whole**1.5).mean()  # with orthonormal FFTs, the mean is a pixel's variance

    def level(self, step: int) -> float:
        """ᾱ of a step: from nearly 0 (noise) to 1 (image), by the cosine schedule."""
        return math.cos((1 - step / self.steps) * math.pi / 2 * 0.98) ** 2

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """White noise."""
        return torch.randn(count, 3, self.size, self.size, generator=generator, device=generator.device).to(self.device)

    def clean(self, latents: Tensor, step: int, texts: Sequence[str]) -> Tensor:
        """The Wiener filter √ᾱ P / (ᾱ P + 1 − ᾱ); texts are ignored."""
        del texts
        level = self.level(step)
        gain = level**0.5 * self.power / (level * self.power + 1 - level)
        spectrum = torch.fft.rfft2(latents, norm="ortho") * gain
        guess: Tensor = torch.fft.irfft2(spectrum, s=(self.size, self.size), norm="ortho")
        return guess

    def advance(self, latents: Tensor, clean: Tensor, step: int) -> Tensor:
        """DDIM."""
        return ddim_step(latents, clean, self.level(step), self.level(step + 1))

    def decode(self, latents: Tensor) -> Tensor:
        """Latents are images already; tanh keeps them in range."""
        return torch.tanh(latents)

    @property
    def flops(self) -> int:
        """Two FFTs of three channels, about 5 N log₂ N each."""
        pixels = self.size**2
        return round(2 * 3 * 5 * pixels * math.log2(pixels))


@dataclass(frozen=True)
class Guidance:
    """How strongly a client's network steers; the values of FedLMG's code."""

    scale: float = 1.0
    alpha_bn: float = 0.1
    bn_steps: int = 10  # before the denoising, by the batch-norm term alone


def as_client_sees(images: Tensor, channels: int, size: int) -> Tensor:
    """Decoded images [n,3,H,W] at the task's size and number of channels."""
    if images.shape[-1] != size:
        images = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False, antialias=True)
    return images if channels == 3 else images.mean(1, keepdim=True)


def guided_images(
    prior: DiffusionPrior,
    client: Ensemble,
    labels: Tensor,
    texts: Sequence[str],
    shape: tuple[int, int, int],
    guidance: Guidance,
    generator: torch.Generator,
) -> Tensor:
    """Images [n,C,S,S] in [-1,1] that the prior finds plausible and that ``client`` (one network) takes for ``labels``.

    At each step the guess is decoded and shown to the client; the gradient of CE + α_BN·BN moves the latents. Losses
    are summed over images, so that one image's step does not depend on how many are made at once.
    """
    channels, size, _ = shape
    latents = prior.noise(len(labels), generator)

    def gradient(step: int, only_bn: bool) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = latents.detach().requires_grad_(True)
            clean = prior.clean(leaf, step, texts)
            logits, bn = client.logits_and_bn_loss(as_client_sees(prior.decode(clean), channels, size))
            loss = guidance.alpha_bn * bn.mean()
            if not only_bn:
                loss = loss + F.cross_entropy(logits[0], labels)
            (found,) = torch.autograd.grad(loss * len(labels), leaf)
        return found, clean.detach()

    for _ in range(guidance.bn_steps):
        latents = latents - guidance.scale * gradient(0, only_bn=True)[0]
    for step in range(prior.steps):
        found, clean = gradient(step, only_bn=False)
        latents = prior.advance(latents, clean, step) - guidance.scale * found
    with torch.no_grad():
        images = as_client_sees(prior.decode(latents), channels, size)
    if not bool(torch.isfinite(images).all()):
        raise MethodError("diverged", "the guided images are no longer finite; lower `guidance`")
    return images.clamp(-1, 1)


def generation_flops(prior: DiffusionPrior, client_flops: int, bn_steps: int) -> int:
    """Operations for one image: each step one guess, one decoding and one client pass, forward and backward to latents.

    The backward pass to the input costs as much as the forward one, since no weight needs a gradient.
    """
    return 2 * (prior.steps + bn_steps) * (prior.flops + client_flops)
