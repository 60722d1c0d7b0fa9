"""How near a synthetic token comes to a real one, against loops."""

from __future__ import annotations

import torch

from fedbicross.steps.tokens import exact_copies, nearest_cosine


def test_nearest_cosine_against_loops() -> None:
    rng = torch.Generator().manual_seed(0)
    synthetic, real = torch.randn(5, 2, 3, generator=rng), torch.randn(7, 2, 3, generator=rng)
    found = nearest_cosine(synthetic, real, chunk=4)
    for row, value in zip(synthetic, found, strict=True):
        pairs = [torch.cosine_similarity(a, b, dim=0) for a in row for b in real.flatten(0, 1)]
        torch.testing.assert_close(value, torch.stack(pairs).max())
    assert nearest_cosine(synthetic[:0], real).shape == (0,)


def test_copies_are_counted_bit_for_bit() -> None:
    real = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0))
    synthetic = torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(1))
    assert exact_copies(synthetic, real) == 0
    synthetic[1, 2] = real[3, 0]
    synthetic[4, 0] = real[0, 0]
    assert exact_copies(synthetic, real) == 2
    synthetic[4, 0, 0] = torch.nextafter(synthetic[4, 0, 0], torch.tensor(9.0))
    assert exact_copies(synthetic, real) == 1
