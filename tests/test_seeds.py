from __future__ import annotations

import torch

from fedbicross.seeds import numpy_rng, stream_seed, torch_rng


def test_streams_are_repeatable_and_apart() -> None:
    assert stream_seed(0, "a") == stream_seed(0, "a")
    seeds = {
        stream_seed(s, *names) for s in (0, 1) for names in [(), ("a",), ("a", "b"), ("ab",), ("b", "a"), ("a", "")]
    }
    assert len(seeds) == 12


def test_generators_follow_the_stream() -> None:
    assert numpy_rng(3, "x").integers(1 << 30) == numpy_rng(3, "x").integers(1 << 30)
    a, b = (torch.rand(4, generator=torch_rng(3, "x")) for _ in range(2))
    assert torch.equal(a, b)
    assert not torch.equal(a, torch.rand(4, generator=torch_rng(3, "y")))
