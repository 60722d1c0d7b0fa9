from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedbicross.evaluate import reconstruction as rec


def images(n: int, pixels: int = 16, channels: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, channels, pixels, pixels, generator=torch.Generator().manual_seed(seed))


def slow_ssim(a: np.ndarray, b: np.ndarray, size: int) -> float:
    """Window by window, as the paper of 2004 writes it."""
    line = np.exp(-np.square(np.arange(size) - size // 2) / (2 * 1.5**2))
    window = np.outer(line, line) / np.outer(line, line).sum()
    found = []
    for channel in range(a.shape[0]):
        for top in range(a.shape[1] - size + 1):
            for left in range(a.shape[2] - size + 1):
                p = a[channel, top : top + size, left : left + size]
                q = b[channel, top : top + size, left : left + size]
                mp, mq = (window * p).sum(), (window * q).sum()
                vp, vq = (window * (p - mp) ** 2).sum(), (window * (q - mq) ** 2).sum()
                cov = (window * (p - mp) * (q - mq)).sum()
                found.append((2 * mp * mq + 1e-4) * (2 * cov + 9e-4) / ((mp**2 + mq**2 + 1e-4) * (vp + vq + 9e-4)))
    return float(np.mean(found))


@pytest.mark.parametrize(("pixels", "size"), [(14, 11), (8, 7)])
def test_ssim_against_loops(pixels: int, size: int) -> None:
    a = images(2, pixels).double()
    b = (0.7 * a + 0.3 * images(2, pixels, seed=1)).double()
    found = rec.ssim(a, b)
    for i in range(2):
        assert math.isclose(float(found[i]), slow_ssim(a[i].numpy(), b[i].numpy(), size), rel_tol=1e-9)
    assert torch.allclose(rec.ssim(a, a), torch.ones(2, dtype=torch.float64))


@pytest.mark.usefixtures("float64")
def test_psnr_against_the_formula() -> None:
    a = images(3)
    b = (a + 0.1 * images(3, seed=1)).clamp(0, 1)
    for i in range(3):
        error = float(((a[i] - b[i]) ** 2).mean())
        assert math.isclose(float(rec.psnr(a, b)[i]), 10 * math.log10(1 / error))
    assert rec.psnr(a, a).tolist() == [100, 100, 100]


@pytest.mark.usefixtures("float64")
def test_best_match_is_the_maximum_over_all_pairs() -> None:
    a, candidates = images(3), images(5, seed=1)
    found = rec.best_match(a, candidates)
    for i in range(3):
        structure = [float(rec.ssim(a[i : i + 1], c[None])) for c in candidates]
        assert math.isclose(float(found.ssim[i]), max(structure))
        assert int(found.which[i]) == structure.index(max(structure))
        assert math.isclose(float(found.psnr[i]), max(float(rec.psnr(a[i], c)) for c in candidates))


def pictures(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Discs of random place and shade, and tokens that say where and how bright."""
    rng = torch.Generator().manual_seed(seed)
    secret = torch.rand(n, 3, generator=rng)
    y, x = torch.meshgrid(torch.linspace(0, 1, 16), torch.linspace(0, 1, 16), indexing="ij")
    distance = (x - secret[:, 0, None, None]).square() + (y - secret[:, 1, None, None]).square()
    image = (torch.exp(-20 * distance) * secret[:, 2, None, None])[:, None]
    mixing = torch.randn(3, 12, generator=torch.Generator().manual_seed(99))
    return (secret @ mixing).view(n, 2, 6), image


@pytest.mark.slow
def test_attack_separates_tokens_that_tell_from_tokens_that_do_not() -> None:
    own_tokens, own_images = pictures(300, 0)
    tokens, targets = pictures(40, 1)
    unrelated, _ = pictures(60, 2)
    attacker = rec.train_attacker(own_tokens, own_images, rec.AttackSettings(epochs=30))
    assert min(attacker.losses) < attacker.losses[0]
    found = rec.attack(attacker, own_tokens, own_images, tokens, targets, unrelated)
    # Real tokens give the image away; the same reconstructions on the wrong image, and the mean image, do not.
    assert found.real.psnr > found.shuffled.psnr + 3
    assert found.real.psnr > found.mean_image.psnr + 3
    # The best of many is high though the candidates are of other people: the control says so.
    assert found.synthetic.psnr > found.shuffled.psnr
    assert abs(found.synthetic.psnr - found.others.psnr) < 2
    assert found.candidates == 60
    assert found.pictures.shape == (8, 4, 1, 16, 16)
    assert found.as_json()["real"] == {"psnr": found.real.psnr, "ssim": found.real.ssim}
    # A client that sends real tokens as "synthetic" is caught: above the control.
    copied = rec.attack(attacker, own_tokens, own_images, tokens, targets, tokens)
    assert copied.synthetic.psnr > copied.others.psnr + 1


def test_the_attack_is_repeatable_and_leaves_the_global_state_alone() -> None:
    own_tokens, own_images = pictures(30, 0)
    before = torch.random.get_rng_state()
    runs = [rec.train_attacker(own_tokens, own_images, rec.AttackSettings(epochs=2)) for _ in range(2)]
    assert torch.equal(torch.random.get_rng_state(), before)
    weights = [attacker.decoder.expand[0].weight for attacker in runs]
    assert torch.equal(*weights)


def test_too_little_to_attack() -> None:
    tokens, targets = pictures(4, 0)
    with pytest.raises(ValueError, match="five pairs"):
        rec.train_attacker(tokens, targets, rec.AttackSettings(epochs=1))
    tokens, targets = pictures(8, 0)
    attacker = rec.train_attacker(tokens, targets, rec.AttackSettings(epochs=1))
    with pytest.raises(ValueError, match="one image"):
        rec.attack(attacker, tokens, targets, tokens[:1], targets[:1], tokens)


def test_images_are_shrunk_by_area_and_scaled() -> None:
    given = torch.arange(16, dtype=torch.uint8).view(1, 1, 4, 4)
    assert torch.allclose(rec.to_unit_range(given, 2)[0, 0, 0, 0], torch.tensor((0 + 1 + 4 + 5) / 4 / 255))
    assert rec.to_unit_range(given, 9).shape == (1, 1, 4, 4)


def test_nearest_is_the_smallest_difference_of_pixels() -> None:
    rng = torch.Generator().manual_seed(0)
    ours, candidates = torch.rand(3, 2, 4, 4, generator=rng), torch.rand(5, 2, 4, 4, generator=rng)
    candidates[2] = ours[1]
    found = rec.nearest(ours, candidates)
    for index, image in enumerate(ours.double()):
        apart = [float((image - other).square().mean().sqrt()) for other in candidates.double()]
        assert float(found.distance[index]) == pytest.approx(min(apart))
        assert int(found.which[index]) == apart.index(min(apart))
    assert found.distance[1] == 0
