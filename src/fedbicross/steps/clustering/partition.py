"""A partition of the clients, and what every way of making one has in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedbicross.errors import MethodError

if TYPE_CHECKING:
    from collections.abc import Sequence

Matrix = npt.NDArray[np.float64]

_SAME = 1e-7  # relative to the largest distance: below what float32 predictions can tell apart


@dataclass(frozen=True)
class Clustering:
    """`labels[i]` is the cluster of client i; clusters are numbered by their smallest member. None is empty."""

    labels: tuple[int, ...]
    warnings: tuple[str, ...] = ()

    @property
    def k(self) -> int:
        """How many clusters there are."""
        return max(self.labels) + 1

    def members(self) -> list[list[int]]:
        """The clients of each cluster, C_1, …, C_K."""
        return [[i for i, label in enumerate(self.labels) if label == k] for k in range(self.k)]


def canonical_labels(labels: Sequence[int]) -> tuple[int, ...]:
    """The same partition with clusters renamed in order of first appearance, so that names carry no chance."""
    names: dict[int, int] = {}
    return tuple(names.setdefault(int(label), len(names)) for label in labels)


def feasible_k(k: int, distances: Matrix) -> tuple[int, tuple[str, ...]]:
    """K lowered to the number of clients, then of distinguishable clients, with a warning for each.

    Clients at distance 0 (identical models) can never be told apart, so no partition separates them for a reason.
    """
    if k < 1:
        raise MethodError("bad_k", f"the number of clusters K must be at least 1, not {k}")
    clients, warnings = len(distances), []
    if k > clients:
        warnings.append(f"K={k} lowered to {clients}: there are only {clients} clients")
        k = clients
    distinct = distinct_points(distances)
    if k > distinct:
        warnings.append(f"K={k} lowered to {distinct}: only {distinct} of {clients} clients can be told apart")
        k = distinct
    return k, tuple(warnings)


def distinct_points(distances: Matrix) -> int:
    """How many points remain when each point at (numerically) zero distance from an earlier one is dropped."""
    same = distances <= _SAME * distances.max()
    return sum(not same[i, :i].any() for i in range(len(distances)))


def euclidean_distances(features: Matrix) -> Matrix:
    """Pairwise distances by differences, row by row: exactly 0 for equal rows."""
    return np.stack([np.sqrt(np.square(features - row).sum(1)) for row in features])
