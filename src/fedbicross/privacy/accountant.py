"""What several releases of the same images give away together."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import brentq

from fedbicross.errors import ConfigError
from fedbicross.privacy.gaussian import epsilon_of, together
from fedbicross.privacy.statement import Release

ORDERS = [1 + x / 10 for x in range(1, 100)] + [float(x) for x in range(11, 64)] + [128.0, 256.0, 512.0]
_LARGEST_NOISE = 1e5


def spent(releases: Sequence[Release], delta: float) -> float:
    """ε of all releases together at this δ; 0 for none.

    Gaussian mechanisms compose exactly. Once DP-SGD is among them, all are added up as Rényi divergences.
    """
    if not releases:
        return 0.0
    if all(_plain(release) for release in releases):
        return epsilon_of(together(release.noise_multiplier / math.sqrt(release.steps) for release in releases), delta)
    divergence = np.sum([_renyi(release) for release in releases], axis=0)
    orders = np.array(ORDERS)
    # Balle et al. 2020, Theorem 21.
    found = divergence + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return max(float(np.min(found)), 0.0)


def noise_for_training(
    epsilon: float, delta: float, sample_rate: float, steps: int, beside: Sequence[Release] = ()
) -> float:
    """The noise multiplier of DP-SGD with which it and what is released beside it are (ε, δ)-private together."""

    def over(noise: float) -> float:
        training = Release(
            what="training",
            mechanism="sampled_gaussian",
            noise_multiplier=noise,
            sample_rate=sample_rate,
            steps=steps,
        )
        return spent([training, *beside], delta) - epsilon

    if over(_LARGEST_NOISE) > 0:
        raise ConfigError("no_noise", f"no noise gives epsilon {epsilon:g}: what leaves beside the network is too much")
    high = 1.0
    while over(high) > 0:
        high *= 2
    low = high / 2
    while over(low) <= 0:
        low /= 2
    return float(brentq(over, low, high, xtol=1e-6)) + 2e-6  # on the safe side of the root


def require_opacus() -> None:
    """DP-SGD is accounted for by Opacus, which is the extra `dp`."""
    if importlib.util.find_spec("opacus") is None:
        raise ConfigError("no_opacus", "DP-SGD needs Opacus; install it with: pip install 'fedbicross[dp]'")


def _plain(release: Release) -> bool:
    return release.mechanism == "gaussian" or release.sample_rate == 1


def _renyi(release: Release) -> np.ndarray:
    """The Rényi divergences of a release at ``ORDERS``."""
    if _plain(release):
        return np.array(ORDERS) * release.steps / (2 * release.noise_multiplier**2)
    require_opacus()
    from opacus.accountants.analysis.rdp import compute_rdp  # of an extra; it imports torch and more

    found: np.ndarray = compute_rdp(
        q=release.sample_rate, noise_multiplier=release.noise_multiplier, steps=release.steps, orders=ORDERS
    )
    return found
