"""Named random streams.

Every random number comes from a stream derived from one seed and the names of its purpose, e.g.
``("training", "client-3", "epoch-7")``. Streams do not share state, so adding a step, a client or a
method never shifts the numbers of another, and no global random state is read or written.
"""

from __future__ import annotations

import hashlib

import numpy as np

from fedbicross.lazy_torch import torch


def stream_seed(seed: int, *names: str) -> int:
    """A 63-bit seed for the stream ``names`` under ``seed``."""
    # Lengths keep ("ab", "c") and ("a", "bc") apart.
    text = "".join(f"{len(part)}:{part}" for part in (str(seed), *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def numpy_rng(seed: int, *names: str) -> np.random.Generator:
    """The stream as a NumPy generator."""
    return np.random.default_rng(stream_seed(seed, *names))


def torch_rng(seed: int, *names: str, device: str = "cpu") -> torch.Generator:
    """The stream as a torch generator on ``device``."""
    generator = torch.Generator(device=device)
    generator.manual_seed(stream_seed(seed, *names))
    return generator
