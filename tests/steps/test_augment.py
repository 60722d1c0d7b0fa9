"""CutMix and zoom as loops over pixels, boxes and windows from the same random numbers by plain arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

from fedbicross.steps.augment import SCALES, SHIFT, cutmix, draw_boxes, draw_views, zoomed

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


def mirrored(position: float, size: int) -> float:
    """A place beyond the edges (at -1/2 and size - 1/2) as its mirror image inside, then kept to the outer pixels."""
    while not -0.5 <= position <= size - 0.5:
        position = -1 - position if position < -0.5 else 2 * size - 1 - position
    return min(max(position, 0), size - 1)


def slow_zoom(image: torch.Tensor, scale: float, right: float, down: float) -> torch.Tensor:
    """Bilinear, pixel by pixel."""
    channels, height, width = image.shape
    out = torch.zeros_like(image)
    for row in range(height):
        for column in range(width):
            x, y = (2 * column + 1) / width - 1, (2 * row + 1) / height - 1
            left = mirrored(((scale * x + right + 1) * width - 1) / 2, width)
            top = mirrored(((scale * y + down + 1) * height - 1) / 2, height)
            i, j = min(int(top), height - 2), min(int(left), width - 2)
            a, b = top - i, left - j
            for channel in range(channels):
                here = image[channel]
                upper = (1 - b) * here[i, j] + b * here[i, j + 1]
                lower = (1 - b) * here[i + 1, j] + b * here[i + 1, j + 1]
                out[channel, row, column] = (1 - a) * upper + a * lower
    return out


def test_zoom_equals_a_loop_over_pixels() -> None:
    images = noise(4, 2, 9, 9, seed=1).double()
    views = torch.tensor([[0.75, 0.15, -0.15], [1.1, -0.1, 0.12], [1.0, 0.0, 0.0], [1.1, 0.15, 0.15]]).double()
    expected = torch.stack([slow_zoom(image, *view) for image, view in zip(images, views.tolist(), strict=True)])
    torch.testing.assert_close(zoomed(images, views), expected)
    torch.testing.assert_close(zoomed(images, views)[2], images[2])


def test_windows_fill_their_ranges() -> None:
    scale, right, down = draw_views(5000, torch.Generator().manual_seed(0)).unbind(1)
    assert SCALES[0] <= scale.min() < SCALES[0] + 0.01 and SCALES[1] - 0.01 < scale.max() <= SCALES[1]
    for shift in (right, down):
        assert shift.abs().max() <= SHIFT and shift.min() < -SHIFT + 0.01 and shift.max() > SHIFT - 0.01
