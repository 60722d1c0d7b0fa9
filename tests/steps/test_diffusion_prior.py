from __future__ import annotations

import math

import pytest
import torch

from fedbicross import models
from fedbicross.engine.ensemble import Ensemble
from fedbicross.steps.diffusion_prior import (
    GaussianPrior,
    Guidance,
    as_client_sees,
    ddim_step,
    generation_flops,
    guided_images,
)


def client(classes: int = 3) -> Ensemble:
    model = models.build("resnet8", 3, classes, 12)
    models.initialise(model, torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.head.weight.mul_(20)  # untrained, it would hardly tell one image from another
    return Ensemble([model])


@pytest.mark.usefixtures("float64")
def test_ddim_keeps_the_noise_and_ends_at_the_guess() -> None:
    clean, noise = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    now = 0.3**0.5 * clean + 0.7**0.5 * noise
    assert torch.allclose(ddim_step(now, clean, 0.3, 0.8), 0.8**0.5 * clean + 0.2**0.5 * noise)
    assert torch.allclose(ddim_step(now, clean, 0.3, 1.0), clean)


@pytest.mark.usefixtures("float64")
def test_the_guess_of_the_gaussian_prior_is_the_posterior_mean() -> None:
    prior = GaussianPrior(10, 6)
    # The covariance of a field with this spectrum, written out: F* diag(P) F for one channel of 36 pixels.
    basis = torch.eye(36).view(36, 6, 6)
    spectrum = torch.fft.rfft2(basis, norm="ortho") * prior.power
    covariance = torch.fft.irfft2(spectrum, s=(6, 6), norm="ortho").view(36, 36).double()
    assert math.isclose(float(covariance.diagonal().mean()), 0.25, rel_tol=1e-5)  # standard deviation 0.5
    x = torch.randn(1, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    level = prior.level(4)
    inverse = torch.linalg.inv(level * covariance + (1 - level) * torch.eye(36, dtype=torch.float64))
    expected = level**0.5 * covariance @ inverse @ x[0, 1].double().view(36)
    assert torch.allclose(prior.clean(x, 4, [""])[0, 1].double().view(36), expected)


def test_unguided_samples_have_the_spectrum_of_the_prior() -> None:
    prior = GaussianPrior(240, 8)
    latents = prior.noise(800, torch.Generator().manual_seed(0))
    for step in range(prior.steps):
        latents = prior.advance(latents, prior.clean(latents, step, []), step)
    power = torch.fft.rfft2(latents, norm="ortho").abs().square().mean((0, 1))
    # Of 2,400 fields: a standard deviation of 3 %. The steps leave 2 % too little.
    assert torch.allclose(power, prior.power, rtol=0.15)


def test_guidance_makes_images_that_the_client_takes_for_the_class() -> None:
    network, labels = client(), torch.arange(12) % 3
    prior, shape = GaussianPrior(20, 12), (3, 12, 12)

    def loss(scale: float) -> float:
        guidance = Guidance(scale=scale, alpha_bn=0.0, bn_steps=0)
        images = guided_images(prior, network, labels, [""] * 12, shape, guidance, torch.Generator().manual_seed(0))
        assert images.shape == (12, 3, 12, 12)
        assert float(images.abs().max()) <= 1
        return float(torch.nn.functional.cross_entropy(network.logits(images)[0], labels))

    losses = [loss(scale) for scale in (0.0, 1.0, 5.0)]
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] < losses[0] - 0.1


def test_the_batch_norm_term_brings_statistics_closer() -> None:
    network, labels = client(), torch.arange(12) % 3
    prior = GaussianPrior(10, 12)

    def distance(alpha: float, bn_steps: int) -> float:
        guidance = Guidance(scale=1.0, alpha_bn=alpha, bn_steps=bn_steps)
        rng = torch.Generator().manual_seed(0)
        images = guided_images(prior, network, labels, [""] * 12, (3, 12, 12), guidance, rng)
        return float(network.logits_and_bn_loss(images)[1])

    assert distance(0.1, 10) < distance(0.0, 0)


@pytest.mark.usefixtures("float64")
def test_one_step_of_guidance_against_its_formula() -> None:
    network, labels = client(), torch.tensor([1, 2])
    prior = GaussianPrior(1, 12)
    start = prior.noise(2, torch.Generator().manual_seed(3)).requires_grad_(True)
    guess = prior.clean(start, 0, [])
    logits, bn = network.logits_and_bn_loss(torch.tanh(guess))
    loss = torch.nn.functional.cross_entropy(logits[0], labels, reduction="sum") + 2 * 0.1 * bn[0]
    loss.backward()
    expected = torch.tanh((prior.advance(start, guess, 0) - 0.7 * start.grad).detach())
    rng = torch.Generator().manual_seed(3)
    found = guided_images(prior, network, labels, ["", ""], (3, 12, 12), Guidance(0.7, 0.1, 0), rng)
    assert torch.allclose(found, expected)


def test_grey_tasks_and_other_sizes() -> None:
    images = torch.rand(2, 3, 16, 16)
    assert as_client_sees(images, 1, 8).shape == (2, 1, 8, 8)
    assert torch.equal(as_client_sees(images, 3, 16), images)


def test_flops_count_every_step_forward_and_back() -> None:
    prior = GaussianPrior(50, 28)
    assert generation_flops(prior, 1000, 10) == 2 * 60 * (prior.flops + 1000)
