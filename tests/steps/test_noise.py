from __future__ import annotations

import numpy as np
import pytest
import torch

from fedbicross.steps import noise
from fedbicross.steps.inversion import structure

KINDS = ["pink", "dead_leaves", "oriented"]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(6, 3, 28, 28), (4, 1, 28, 28), (2, 3, 33, 40)])
def test_noise_has_the_shape_the_range_and_some_contrast(kind, shape):
    x = noise.structured_noise(kind, shape, generator())
    assert x.shape == shape and x.dtype == torch.float32 and x.isfinite().all()
    assert x.min() >= -1 and x.max() <= 1
    assert (x.std((2, 3)) > 0.1).all() and 0.3 < x.std() < 0.8 and abs(x.mean()) < 0.35


@pytest.mark.parametrize("kind", KINDS)
def test_noise_is_a_function_of_the_generator_alone(kind):
    state = torch.random.get_rng_state()
    first = noise.structured_noise(kind, (3, 3, 28, 28), generator(1))
    assert torch.equal(first, noise.structured_noise(kind, (3, 3, 28, 28), generator(1)))
    assert not torch.equal(first, noise.structured_noise(kind, (3, 3, 28, 28), generator(2)))
    assert not torch.equal(first[0], first[1])
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("kind", KINDS)
def test_noise_has_structure(kind):
    assert structure(noise.structured_noise(kind, (32, 1, 28, 28), generator())) > 0.3


def spectrum_slope(images):
    """Slope of log amplitude against log radial frequency, by numpy."""
    size = images.shape[-1]
    amplitude = np.sqrt((np.abs(np.fft.fft2(images)) ** 2).mean((0, 1)))
    frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(size), np.fft.fftfreq(size), indexing="ij"))
    kept = (frequency > 0) & (frequency < 0.5)
    return np.polyfit(np.log(frequency[kept]), np.log(amplitude[kept]), 1)[0]


def test_pink_spectra_fall_with_exponents_from_a_half_to_one_and_a_half():
    fields = noise.pink_field((200, 4, 64, 64), generator())
    slopes = np.array([spectrum_slope(field[None].numpy()) for field in fields])
    assert slopes.min() > -1.7 and slopes.max() < -0.3
    assert slopes.mean() == pytest.approx(-1.0, abs=0.06)
    assert slopes.std() == pytest.approx(1 / np.sqrt(12), abs=0.06)


def test_pink_fields_are_standardised():
    field = noise.pink_field((5, 3, 28, 28), generator())
    torch.testing.assert_close(field.mean((2, 3)), torch.zeros(5, 3), rtol=0, atol=1e-5)
    torch.testing.assert_close(field.square().mean((2, 3)), torch.ones(5, 3), rtol=0, atol=1e-4)


def test_dead_leaves_are_patches_of_one_colour():
    x = noise.dead_leaves((4, 3, 64, 64), generator(), leaves=20)
    for image in x:
        assert len(torch.unique(image.flatten(1), dim=1).T) <= 21
    assert torch.equal(noise.dead_leaves((2, 1, 8, 8), generator(), leaves=0).std((2, 3)), torch.zeros(2, 1))


def test_the_wavelet_bank_holds_forty_different_filters_and_their_negatives():
    bank = noise.wavelet_bank(torch.device("cpu"))
    assert bank.shape == (40, 3, 3)
    torch.testing.assert_close(bank[20:], -bank[:20])
    torch.testing.assert_close(bank.flatten(1).norm(dim=1), torch.ones(40))
    assert torch.cdist(bank.flatten(1), bank.flatten(1)).add(torch.eye(40)).min() > 0.1


def test_wavelets_of_an_image_come_from_five_to_forty():
    chosen = noise.wavelet_choices(60, 200, 3, generator())
    assert chosen.shape == (3, 60, 200, 3, 3)
    used = [len(torch.unique(chosen[:, i].reshape(-1, 9), dim=0)) for i in range(60)]
    assert min(used) >= 5 and max(used) <= 40 and max(used) - min(used) > 20


def test_oriented_noise_needs_a_power_of_two():
    with pytest.raises(ValueError, match="power of two"):
        noise.oriented((1, 1, 8, 8), generator(), resolution=48)
    assert noise.oriented((2, 1, 28, 28), generator(), resolution=32).shape == (2, 1, 28, 28)


def test_mixup_is_equation_9():
    a, b = torch.full((2, 1, 2, 2), 3.0), torch.full((2, 1, 2, 2), -1.0)
    assert torch.equal(noise.mixup(a, b, 1.0), a)
    assert torch.equal(noise.mixup(a, b, 0.0), b)
    assert torch.equal(noise.mixup(a, b, 0.25), torch.zeros(2, 1, 2, 2))


def batch(value):
    return torch.full((2, 1, 2, 2), float(value))


def remembered(losses, size, threshold=50.0):
    memory = noise.Memory(size, threshold)
    for step, loss in enumerate(losses):
        memory.add(batch(step), torch.tensor(float(loss)))
    return [int(value) for value in memory.batches()[:, 0, 0, 0, 0]]


def expected_memory(losses, size, threshold=50.0):
    """The rule in plain Python: the latest qualified, then as many of the latest others as there is room for."""
    good = [step for step, loss in enumerate(losses) if loss < threshold][-size:]
    others = [step for step, loss in enumerate(losses) if loss >= threshold]
    room = size - len(good)
    return (others[-room:] if room else []) + good


@pytest.mark.parametrize(
    "losses",
    [
        [90, 80, 70, 60, 40, 30, 20],
        [90, 80, 70, 60, 55],
        [10, 20, 90, 30, 95, 40, 99, 5],
        [10, 90, 90, 90, 90, 90],
        [50, 49.99],
        [float("nan"), 90, float("inf"), 10],
    ],
)
@pytest.mark.parametrize("size", [1, 3, 5])
def test_memory_keeps_the_latest_below_the_threshold_and_fills_up_with_the_latest(losses, size):
    assert remembered(losses, size) == expected_memory([x if x == x else 1e9 for x in losses], size)


def test_for_a_falling_loss_the_threshold_does_not_matter():
    losses = [100 - step for step in range(40)]
    assert remembered(losses, 10, 62.0) == remembered(losses, 10, 95.0) == remembered(losses, 10, 0.0)


def test_memory_hands_out_every_stored_batch_and_no_empty_slot():
    memory = noise.Memory(size=10)
    with pytest.raises(ValueError, match="empty"):
        memory.batches()
    for step in range(1, 5):
        memory.add(batch(step), torch.tensor(1.0))
    assert len(memory) == 4 and memory.batches()[:, 0, 0, 0, 0].tolist() == [1, 2, 3, 4]


def test_memory_survives_a_checkpoint():
    losses = torch.rand(30, generator=generator()) * 100
    straight, stopped = noise.Memory(6), noise.Memory(6)
    for step in range(12):
        straight.add(batch(step), losses[step])
        stopped.add(batch(step), losses[step])
    saved = stopped.tensors()
    stopped.add(batch(99), torch.tensor(0.0))  # what was saved is a snapshot
    resumed = noise.Memory(size=6)
    resumed.load(saved)
    for step in range(12, 30):
        straight.add(batch(step), losses[step])
        resumed.add(batch(step), losses[step])
    assert torch.equal(straight.batches(), resumed.batches()) and len(resumed) == 6
    for name, tensor in straight.tensors().items():
        assert torch.equal(tensor, resumed.tensors()[name])
    empty = noise.Memory(3)
    empty.load(empty.tensors())
    assert len(empty) == 0
