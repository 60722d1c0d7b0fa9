from __future__ import annotations

import math
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedbicross import models
from fedbicross.engine.private import (
    PrivateSteps,
    clipped_sums,
    counts_release,
    noisy,
    sample_rate,
    steps_of_epoch,
    training_release,
)
from fedbicross.engine.recipe import PrivateTraining, Training
from fedbicross.errors import ConfigError
from fedbicross.privacy.accountant import spent
from fedbicross.privacy.noise import Stream
from fedbicross.settings import parse
from small import refuses

pytestmark = pytest.mark.skipif(find_spec("opacus") is None, reason="needs the extra `dp`")  # slow to import


def network(name: str = "resnet8_gn", size: int = 8) -> nn.Module:
    model = models.build(name, 3, 3, size)
    models.initialise(model, torch.Generator().manual_seed(0))
    return model


def batch(count: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    scale = torch.logspace(-2, 1, count)[:, None, None, None]  # gradients of very different lengths
    return torch.randn(count, 3, size, size, generator=rng) * scale, torch.randint(3, (count,), generator=rng)


def one_by_one(model: nn.Module, x: torch.Tensor, y: torch.Tensor, longest: float) -> list[torch.Tensor]:
    """Slow and plain: a backward pass for every image."""
    sums = [torch.zeros_like(p) for p in model.parameters()]
    cut = 0
    for image, label in zip(x, y, strict=True):
        loss = F.cross_entropy(model(image[None]), label[None])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        cut += norm > longest
        for total, gradient in zip(sums, gradients, strict=True):
            total += gradient * min(1.0, longest / norm)
    assert 0 < cut < len(y), "the test shows nothing unless some are cut and some are not"
    return sums


@pytest.mark.parametrize("name", ["cnn", "resnet8_gn"])
def test_sums_of_cut_gradients(name: str, float64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = network(name).double(), batch(12)
    x = x.double()
    params = dict(model.named_parameters())
    longest = _between(model, x, y)
    expected = one_by_one(model, x, y, longest)
    for numbers in (1 << 26, 3 * sum(p.numel() for p in params.values())):  # all at once, and three by three
        monkeypatch.setattr("fedbicross.engine.private.NUMBERS_AT_ONCE", numbers)
        loss, found = clipped_sums(model, params, x, y, longest)
        assert float(loss) == pytest.approx(float(F.cross_entropy(model(x), y, reduction="sum").detach()), rel=1e-9)
        for ours, slow in zip(found, expected, strict=True):
            assert torch.allclose(ours, slow, rtol=1e-9, atol=1e-12)


def _between(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    norms = []
    for image, label in zip(x, y, strict=True):
        gradients = torch.autograd.grad(F.cross_entropy(model(image[None]), label[None]), list(model.parameters()))
        norms.append(math.sqrt(sum(float(g.square().sum()) for g in gradients)))
    return float(np.median(norms))


def test_one_image_moves_a_sum_by_no_more_than_the_limit() -> None:
    model, (x, y) = network(), batch(9)
    params = dict(model.named_parameters())
    with_it, without = (clipped_sums(model, params, x[:n], y[:n], 0.5)[1] for n in (9, 8))
    moved = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(with_it, without, strict=True)))
    assert moved <= 0.5 * (1 + 1e-4)


def test_no_images_give_zeros_and_the_noise_stays() -> None:
    model = network()
    params = dict(model.named_parameters())
    loss, sums = clipped_sums(model, params, torch.zeros(0, 3, 8, 8), torch.zeros(0, dtype=torch.int64), 1.0)
    assert float(loss) == 0 and all(float(total.abs().max()) == 0 for total in sums)
    made = noisy(sums, Stream(np.random.default_rng(0)), 2.0, 4.0)
    flat = torch.cat([part.flatten() for part in made])
    assert float(flat.std()) == pytest.approx(0.5, rel=0.05)


@pytest.mark.filterwarnings("ignore")
def test_a_step_is_that_of_opacus() -> None:
    """Its hooks cut the gradients and its optimiser adds them up; both without noise, then both with the same noise."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    (x, y), longest, expected_batch = batch(10), 1.5, 8
    model, theirs = network("cnn"), GradSampleModule(network("cnn"), loss_reduction="sum")
    sums = clipped_sums(model, dict(model.named_parameters()), x, y, longest)[1]
    for multiplier in (0.0, 1.3):
        optimiser = DPOptimizer(
            torch.optim.SGD(theirs.parameters(), lr=1.0),
            noise_multiplier=multiplier,
            max_grad_norm=longest,
            expected_batch_size=expected_batch,
            generator=torch.Generator().manual_seed(5),
        )
        optimiser.zero_grad()
        F.cross_entropy(theirs(x), y, reduction="sum").backward()
        optimiser.pre_step()
        same = Repeated(torch.Generator().manual_seed(5))
        ours = noisy(sums, same, multiplier * longest, expected_batch)
        for gradient, parameter in zip(ours, theirs.parameters(), strict=True):
            assert torch.allclose(gradient, parameter.grad, rtol=1e-3, atol=1e-5)


class Repeated:
    """The numbers that Opacus draws."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def normal(self, *shape: int) -> np.ndarray:
        return torch.normal(0.0, 1.0, shape, generator=self.generator).numpy()

    def uniform(self, *shape: int) -> np.ndarray:
        raise NotImplementedError


RECIPE = Training(recipe="modern", epochs=4, batch_size=8, dp=PrivateTraining(epsilon=2.0))


@pytest.mark.slow
def test_the_budget_is_kept_and_used() -> None:
    for images in (20, 57, 200):
        made = training_release(RECIPE, images)
        both = spent([made, counts_release(RECIPE.dp)], 1e-5)
        assert 1.99 < both <= 2.0
        assert made.steps == 4 * steps_of_epoch(made.sample_rate)


def test_training_with_noise_has_settings_of_its_own() -> None:
    own = Training(recipe="modern", dp=PrivateTraining(epsilon=2.0, epochs=4, batch_size=8, lr=0.3))
    assert (own.epochs, own.lr) == (100, 0.01), "what stays at home is trained as ever"
    plain = RECIPE.model_copy(update={"lr": 0.3})
    assert training_release(own, 57) == training_release(plain, 57)
    assert own.as_trained.model_dump(exclude={"dp"}) == plain.model_dump(exclude={"dp"})
    assert RECIPE.as_trained == RECIPE and Training().as_trained == Training()


def test_the_rate_tells_the_size_only_roughly() -> None:
    rates = {sample_rate(images, 8) for images in range(100, 140)}
    assert len(rates) <= 2
    for images in range(1, 300):
        rate = sample_rate(images, 8)
        assert min(1.0, 8 / images) <= rate <= min(1.0, 8 / images * 2**0.5 * (1 + 1e-12))


def test_batches_are_drawn_image_by_image() -> None:
    made = PrivateSteps(network(), RECIPE, 400, lambda name: Stream(np.random.default_rng(len(name))))
    drawn = [rows for epoch in range(40) for rows in made.draw(epoch)[1]]
    rate, steps = made.release.sample_rate, len(drawn)
    sizes = np.array([len(rows) for rows in drawn])
    # binomial: six standard deviations of the mean and a spread that no fixed size has
    assert abs(sizes.mean() - 400 * rate) < 6 * math.sqrt(400 * rate / steps)
    assert 0.5 < sizes.var() / (400 * rate * (1 - rate)) < 2
    again = PrivateSteps(network(), RECIPE, 400, lambda name: Stream(np.random.default_rng(len(name))))
    assert all(np.array_equal(a, b) for a, b in zip(made.draw(3)[1], again.draw(3)[1], strict=True))


@pytest.mark.parametrize(
    "values",
    [
        {"recipe": "paper"},  # chooses an epoch on images
        {"recipe": "modern", "loss": "balanced"},
    ],
)
def test_what_would_pass_by_the_noise_is_refused(values: dict[str, object]) -> None:
    with refuses(ConfigError, "bad_value", "dp needs"):
        parse(Training, {**values, "dp": {"epsilon": 1.0}})
