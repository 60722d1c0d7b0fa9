"""The Gaussian mechanism, calibrated exactly (Balle and Wang, ICML 2018).

Noise N(0, σ²) on a quantity that one image changes by at most Δ in L2 norm. Everything depends on s = σ/Δ, the noise
multiplier. Several such quantities released together are one of the multiplier 1/√(Σ 1/s²).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from scipy.optimize import brentq
from scipy.special import log_ndtr

LARGEST_EPSILON = 1e6
_SAFE = 1 + 1e-9  # solvers stop beside the root: rather a little more noise than too little


def delta_of(noise: float, epsilon: float) -> float:
    """δ(ε) = Φ(1/2s − εs) − e^ε Φ(−1/2s − εs), the smallest there is (their Theorem 8, with Δ = 1)."""
    high = float(log_ndtr(0.5 / noise - epsilon * noise))
    low = epsilon + float(log_ndtr(-0.5 / noise - epsilon * noise))
    return math.exp(high) * abs(math.expm1(min(low - high, 0.0)))  # in logarithms: e^ε alone would overflow


def epsilon_of(noise: float, delta: float) -> float:
    """The smallest ε for which a noise multiplier gives (ε, δ); 0 where δ alone is enough, ∞ where none is."""
    if delta_of(noise, 0.0) <= delta:
        return 0.0
    if delta_of(noise, LARGEST_EPSILON) > delta:
        return math.inf
    most = 1.0
    while delta_of(noise, most) > delta:
        most *= 2
    return float(brentq(lambda epsilon: delta_of(noise, epsilon) - delta, 0.0, most, xtol=1e-13)) * _SAFE


def noise_for(epsilon: float, delta: float) -> float:
    """The smallest noise multiplier that gives (ε, δ)."""
    low, high = 1.0, 1.0
    while delta_of(low, epsilon) <= delta:
        low /= 2
    while delta_of(high, epsilon) > delta:
        high *= 2
    return float(brentq(lambda noise: delta_of(noise, epsilon) - delta, low, high, xtol=1e-13)) * _SAFE


def together(noises: Iterable[float]) -> float:
    """The multiplier of one mechanism that gives away as much as all of these, each chosen in view of the others."""
    return 1 / math.sqrt(math.fsum(1 / noise**2 for noise in noises))
