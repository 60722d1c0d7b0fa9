from __future__ import annotations

import torch
from benchmarks.one_class import anything_else, recoloured, shuffled


def test_pieces_change_places_and_nothing_else() -> None:
    images = torch.arange(2 * 3 * 8 * 8, dtype=torch.float32).reshape(2, 3, 8, 8)
    moved = shuffled(images, torch.Generator().manual_seed(0))
    assert not torch.equal(moved, images)
    for before, after in zip(images, moved, strict=True):
        pieces = [
            {tuple(image[:, i : i + 2, j : j + 2].flatten().tolist()) for i in range(0, 8, 2) for j in range(0, 8, 2)}
            for image in (before, after)
        ]
        assert pieces[0] == pieces[1] and len(pieces[0]) == 16


def test_anything_else_is_as_many_images_of_the_same_range() -> None:
    images = torch.rand(6, 3, 28, 28, generator=torch.Generator().manual_seed(1)) * 2 - 1
    for way in ("shuffled pieces and noise", "other colours"):
        made = anything_else(way, images, torch.Generator().manual_seed(2))
        assert made.shape == images.shape and made.abs().max() <= 1 and not torch.equal(made, images)
    assert not torch.equal(recoloured(images, torch.Generator().manual_seed(3)), images)
