"""Where the noise of a private release comes from.

In a simulation from named streams, so that a run can be repeated. Between real sites from the operating system: whoever
knows the seed of a federation, and every member does, could otherwise draw the same noise and take it off again.
"""

from __future__ import annotations

import os
from typing import Protocol

import numpy as np
from scipy.special import ndtri


class Noise(Protocol):
    """A source of random numbers."""

    def normal(self, *shape: int) -> np.ndarray:
        """Standard normal numbers, float64."""
        ...

    def uniform(self, *shape: int) -> np.ndarray:
        """Numbers in (0, 1), float64."""
        ...


class Stream:
    """A named stream: the same numbers every time."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def normal(self, *shape: int) -> np.ndarray:
        """Standard normal numbers, float64."""
        return self.rng.standard_normal(shape)

    def uniform(self, *shape: int) -> np.ndarray:
        """Numbers in (0, 1), float64."""
        return self.rng.uniform(np.finfo(float).tiny, 1.0, shape)


class Secret:
    """The operating system's source for keys: nobody can draw the same numbers."""

    def normal(self, *shape: int) -> np.ndarray:
        """Standard normal numbers, float64: half the sum of four.

        A single one by the quantile function takes only values on a coarse grid, from which the low bits of a noisy
        number could give away what was below the noise (Mironov 2012). Sums of several fill the gaps (Holohan and
        Braghin 2021).
        """
        total = np.zeros(shape)
        for _ in range(4):  # one after another, so that memory is that of one
            total += ndtri(self.uniform(*shape))
        return total / 2

    def uniform(self, *shape: int) -> np.ndarray:
        """Numbers in (0, 1), float64: the middles of 2⁵² equal steps."""
        count = int(np.prod(shape, dtype=np.int64))
        bits = np.frombuffer(os.urandom(8 * count), np.uint64) >> np.uint64(12)
        return ((bits + 0.5) / 2.0**52).reshape(shape)
