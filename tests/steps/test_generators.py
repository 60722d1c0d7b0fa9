"""Generators against torch's own optimiser and layers; ranges, sizes, resets, augmentation."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbicross.steps import generators
from fedbicross.steps.generators import Changes, GeneratorSettings, ImageGenerator, changed, clipped, start_size

SMALL = GeneratorSettings(latent=6, width=8)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made(settings: GeneratorSettings = SMALL, shape=(3, 12, 12), batch=5, **options) -> ImageGenerator:
    generator = ImageGenerator(settings, shape, batch, **options)
    generator.reset(rng())
    generator.draw(rng(1))
    return generator


def by_hand(generator: ImageGenerator, z: Tensor, side: int) -> Tensor:
    """The network of DENSE and DAFL, layer after layer, for two doublings."""
    p, eps, width = generator.params, generator.settings.eps, generator.settings.width

    def norm(x: Tensor, name: str | None, eps: float) -> Tensor:
        mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), unbiased=False, keepdim=True)
        x = (x - mean) / (var + eps).sqrt()
        return x if name is None else x * p[f"{name}.weight"].view(1, -1, 1, 1) + p[f"{name}.bias"].view(1, -1, 1, 1)

    x = z @ p["start.weight"].T + p["start.bias"]
    x = norm(x.view(len(z), width, side, side), "start_norm", eps)
    for i in range(2):
        x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
        x = F.conv2d(x, p[f"convolutions.{i}.weight"], p[f"convolutions.{i}.bias"], padding=1)
        x = F.leaky_relu(norm(x, f"norms.{i}", eps), 0.2)
    x = F.conv2d(x, p["end.weight"], p["end.bias"], padding=1)[..., : 4 * side, : 4 * side]
    if generator.settings.output == "sigmoid":
        return 2 * torch.sigmoid(x) - 1
    return torch.tanh(norm(x, None, 1e-5)) if generator.settings.output == "tanh" else norm(torch.tanh(x), None, 1e-5)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("output", ["sigmoid", "tanh", "standardised"])
def test_the_network_is_the_published_one(output):
    generator = made(GeneratorSettings(latent=6, width=8, output=output, eps=0.8))
    torch.testing.assert_close(generator.images(), by_hand(generator, generator.latent, 3))


def test_images_lie_in_the_range_that_the_clients_know():
    for output in ("sigmoid", "tanh"):
        generator = made(GeneratorSettings(latent=6, width=8, output=output, init="uniform"), batch=32)
        with torch.no_grad():
            generator.params["end.weight"].mul_(100)
        images = generator.images()
        assert images.min() >= -1 and images.max() <= 1
        assert images.min() < -0.9 and images.max() > 0.9, "the whole of it"
    images = made(GeneratorSettings(latent=6, width=8, output="standardised"), batch=32).images()
    torch.testing.assert_close(images.mean((0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    assert (images.std((0, 2, 3)) > 0.5).all()


@pytest.mark.parametrize(("size", "expected"), [(8, (2, 2)), (9, (3, 2)), (28, (7, 2)), (64, (16, 2)), (224, (14, 4))])
def test_any_image_size(size, expected):
    assert start_size(size) == expected
    if size < 100:
        assert made(shape=(1, size, size), batch=2).images().shape == (2, 1, size, size)
    generator = ImageGenerator(GeneratorSettings(), (3, size, size), 2)
    assert sum(p.numel() for p in generator.params.values()) < 10_000_000


def test_papers_sizes():
    generator = ImageGenerator(GeneratorSettings(), (3, 32, 32), 2)
    assert generator.params["start.weight"].shape == (128 * 8 * 8, 256)
    assert [generator.params[f"convolutions.{i}.weight"].shape[0] for i in range(2)] == [128, 64]
    assert generator.params["end.weight"].shape == (3, 64, 3, 3)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("learn_latent", [False, True])
@pytest.mark.parametrize("clip", [None, 1e-3])
def test_steps_are_those_of_torch_adam(learn_latent, clip):
    settings = GeneratorSettings(latent=6, width=8, lr=0.01, clip=clip)
    generator = made(settings, learn_latent=learn_latent)
    twin = made(settings, learn_latent=learn_latent)
    leaves = [*twin.params.values(), *([twin.latent] if learn_latent else [])]
    adam = torch.optim.Adam(leaves, lr=0.01, betas=(0.5, 0.999))
    target = torch.linspace(-1, 1, 12)
    start = generator.latent.detach().clone()
    for _ in range(5):
        before = twin.images().detach()
        images, terms = generator.step(lambda x: [(x - target).square().mean(), x.mean()])
        torch.testing.assert_close(images, before)
        assert len(terms) == 2 and not terms[0].requires_grad
        loss = (twin.images() - target).square().mean()
        torch.testing.assert_close(terms[0], loss.detach())
        adam.zero_grad()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(leaves, clip)
        adam.step()
    for name, value in twin.params.items():
        torch.testing.assert_close(generator.params[name], value, msg=name)
    assert torch.equal(generator.latent, start) != learn_latent


def test_training_lowers_the_loss():
    generator = made(GeneratorSettings(latent=6, width=8, lr=0.02))
    losses = [float(generator.step(lambda x: [(x - 0.5).square().mean()])[1][0]) for _ in range(40)]
    assert losses[-1] < 0.2 * losses[0]


def test_reset_is_a_new_network_with_a_new_optimiser():
    generator = made()
    first = {name: p.detach().clone() for name, p in generator.params.items()}
    generator.step(lambda x: [x.mean()])
    assert not torch.equal(generator.params["end.weight"], first["end.weight"]) and float(generator.count) == 1
    generator.reset(rng())
    assert all(torch.equal(generator.params[name], value) for name, value in first.items())
    assert all((m == 0).all() for m in (*generator.first, *generator.second, generator.count))
    generator.reset(rng(7))
    assert not torch.equal(generator.params["end.weight"], first["end.weight"])
    names = [name for name, p in generator.params.items() if name.endswith("weight") and p.ndim > 1]
    spread = torch.cat([generator.params[name].flatten() for name in names]).std()
    assert 0.018 < spread < 0.022
    assert abs(float(generator.params["start_norm.weight"].detach().mean()) - 1) < 0.05
    assert all((p == 0).all() for name, p in generator.params.items() if name.endswith("bias"))


def test_uniform_first_weights_are_torchs():
    generator = made(GeneratorSettings(latent=600, width=8, init="uniform"))
    layer = nn.Linear(600, 8)
    bound = 1 / math.sqrt(600)
    weight = generator.params["start.weight"].detach()
    assert weight.abs().max() <= bound and weight.abs().max() > 0.95 * bound
    assert abs(float(weight.std()) - float(layer.weight.detach().std())) < 0.05 * bound
    assert (generator.params["norms.0.weight"] == 1).all()


def test_a_seed_is_enough_and_the_global_stream_is_untouched():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, two = made(), made()
    assert torch.equal(one.images(), two.images())
    assert torch.equal(torch.rand(3), expected)
    one.draw(rng(2))
    assert not torch.equal(one.images(), two.images())


def test_given_latents_are_used_and_not_kept():
    generator = made()
    z = torch.randn(4, 6, generator=rng(3))
    assert generator.images(z).shape[0] == 4
    kept = generator.latent.clone()
    generator.step(lambda x: [x.mean()], z)
    assert torch.equal(generator.latent, kept)


@pytest.mark.parametrize("learn_latent", [False, True])
def test_going_on_from_a_checkpoint_gives_the_same_bytes(learn_latent):
    def train(generator: ImageGenerator, count: int) -> None:
        for _ in range(count):
            generator.step(lambda x: [(x - 0.3).square().mean()])

    whole = made(learn_latent=learn_latent)
    train(whole, 4)
    half = made(learn_latent=learn_latent)
    train(half, 2)
    saved = half.tensors()
    train(half, 1)  # what was saved must not move along
    again = ImageGenerator(SMALL, (3, 12, 12), 5, learn_latent=learn_latent)
    again.load(saved)
    train(again, 2)
    assert torch.equal(again.images(), whole.images())
    assert all(torch.equal(value, whole.tensors()[name]) for name, value in again.tensors().items())


def test_clipping_is_that_of_torch():
    gradients = [torch.randn(4, 3, generator=rng()), torch.randn(7, generator=rng(1))]
    for largest in (0.5, 100.0):
        leaves = [torch.zeros_like(g, requires_grad=True) for g in gradients]
        for leaf, g in zip(leaves, gradients, strict=True):
            leaf.grad = g.clone()
        torch.nn.utils.clip_grad_norm_(leaves, largest)
        for found, leaf in zip(clipped(gradients, largest), leaves, strict=True):
            torch.testing.assert_close(found, leaf.grad)


@pytest.mark.parametrize("kind", ["none", "flip", "crop_flip"])
def test_augmentation_is_what_it_says_image_by_image(kind):
    x = torch.randn(6, 2, 5, 7, generator=rng())
    changes = Changes(kind, 3, 6, rng(1))
    for number in range(3):
        flips, offsets = changes.of(number)
        found = changed(x, kind, flips, offsets)
        for i in range(6):
            expected = x[i]
            if kind != "none" and flips[i]:
                expected = expected.flip(-1)
            if kind == "crop_flip":
                margin = torch.full((2, 13, 15), -1.0)
                margin[:, 4:9, 4:11] = expected
                top, left = offsets[i].tolist()
                expected = margin[:, top : top + 5, left : left + 7]
            assert torch.equal(found[i], expected)
    assert changes.flips.any() and not changes.flips.all()
    assert changes.offsets.min() >= 0 and changes.offsets.max() <= 8


def test_augmentation_lets_gradients_through():
    x = torch.zeros(4, 1, 6, 6, requires_grad=True)
    flips, offsets = torch.tensor([True, False, True, False]), torch.full((4, 2), 4)
    changed(x, "crop_flip", flips, offsets).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x)), "offset 4 is no shift"


def test_operations_are_counted():
    settings = GeneratorSettings(latent=6, width=8)
    multiplications = 6 * 8 * 9 + 6 * 6 * 9 * 8 * 8 + 12 * 12 * 9 * 8 * 4 + 12 * 12 * 9 * 4 * 3
    assert generators.forward_flops(settings, 3, 12) == 2 * multiplications
