"""Noise-adapted teachers F̃: FedBiCross Eq. 3, FedISCA Eq. 2, E-FedISCA Eq. 7.

There are two, and they differ a lot:

``batch``
    What the authors' released code does. Its adapted copy is never switched back to eval, so each BN layer normalises
    with the statistics of the batch at hand and the moving averages influence no output. There is nothing to compute
    in advance: call `Ensemble.batch_logits(x)`. Right at every noise level, and needs no stored trajectory.
``ema``
    The equation as written, `adapt` below, then `Ensemble.adapted_logits(x, statistics)`. The pass runs from the
    finished images back to the noise, so with β = 0.9 the result describes the noisiest batches x(1), x(2), … only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from fedbicross.engine.ensemble import Ensemble, Statistics


def adapt(
    ensemble: Ensemble,
    reversed_trajectory: Iterable[Tensor],
    momentum: float = 0.9,
    statistics: Statistics | None = None,
) -> Statistics:
    """Eq. 3 over x(T), x(T−1), …, x(1), the order in which `reversed_trajectory` must give them.

    Starts from the clients' stored statistics, or from `statistics` where an earlier pass is continued. (E-FedISCA
    passes mixtures whose noise level rises from 0 to 1: the same function, another iterable.)
    """
    if statistics is None:
        statistics = ensemble.initial_statistics()
    for batch in reversed_trajectory:
        statistics = ensemble.update_statistics(statistics, batch, momentum)
    return statistics


def window(momentum: float, tolerance: float = 1e-6) -> int:
    """How many of the last batches of the pass matter: the smallest n with βⁿ ≤ tolerance (132 for 0.9 and 1e-6).

    Everything earlier, the initial statistics included, has at most this weight together. So x(1), …, x(n) are all that
    the `ema` teacher needs, and n updates all that it costs.
    """
    if not 0 <= momentum < 1 or not 0 < tolerance < 1:
        raise ValueError(f"window needs 0 ≤ momentum < 1 and 0 < tolerance < 1, not {momentum} and {tolerance}")
    return max(1, math.ceil(math.log(tolerance) / math.log(momentum))) if momentum > 0 else 1
