"""CutMix as a loop over pixels, and its boxes from the same random numbers by plain arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

from fedbicross.steps.augment import cutmix, draw_boxes

from .tiny import noise


def boxes(count: int, size: int, seed: int = 0) -> torch.Tensor:
    return draw_boxes(count, size, torch.Generator().manual_seed(seed))


def test_cutmix_equals_a_loop_over_pixels() -> None:
    images, others, drawn = noise(6, 2, 9, 9, seed=1), noise(6, 2, 9, 9, seed=2), boxes(6, 9)
    expected = images.clone()
    for i, (top, bottom, left, right) in enumerate(drawn.tolist()):
        for row in range(top, bottom):
            for column in range(left, right):
                expected[i, :, row, column] = others[i, :, row, column]
    assert torch.equal(cutmix(images, others, drawn), expected)
    assert not torch.equal(expected, images), "some box is not empty"


def test_an_empty_box_takes_nothing_and_a_full_one_everything() -> None:
    images, others = noise(2, 3, 5, 5, seed=1), noise(2, 3, 5, 5, seed=2)
    found = cutmix(images, others, torch.tensor([[0, 0, 0, 0], [0, 5, 0, 5]]))
    assert torch.equal(found[0], images[0]) and torch.equal(found[1], others[1])


@pytest.mark.parametrize("size", [1, 8, 28])
def test_boxes_equal_plain_arithmetic_on_the_same_draws(size: int) -> None:
    generator = torch.Generator().manual_seed(3)
    shares = torch.rand(50, generator=generator).tolist()
    centres = torch.randint(size, (50, 2), generator=generator).tolist()
    expected = []
    for share, (row, column) in zip(shares, centres, strict=True):
        side = round(size * float(torch.tensor(share).sqrt()))
        first, left = row - side // 2, column - side // 2
        expected.append([max(first, 0), min(first + side, size), max(left, 0), min(left + side, size)])
    assert boxes(50, size, seed=3).tolist() == expected


def test_boxes_lie_in_the_image_and_cover_what_the_paper_says() -> None:
    drawn = boxes(20_000, 64)
    top, bottom, left, right = drawn.unbind(1)
    assert (top >= 0).all() and (left >= 0).all() and (bottom <= 64).all() and (right <= 64).all()
    assert (bottom >= top).all() and (right >= left).all()
    area = ((bottom - top) * (right - left)).double() / 64**2
    # A side s = sqrt(u) with its centre anywhere keeps s(1 - s/4) of the axis on average, so E[area] is that squared:
    expected = 1 / 2 - 1 / 2 * 2 / 5 + 1 / 16 * 1 / 3
    assert float(area.mean()) == pytest.approx(expected, abs=5 * float(area.std()) / math.sqrt(len(area)) + 0.01)


def test_the_same_stream_gives_the_same_boxes() -> None:
    assert torch.equal(boxes(10, 28, seed=5), boxes(10, 28, seed=5))
    assert not torch.equal(boxes(10, 28, seed=5), boxes(10, 28, seed=6))
