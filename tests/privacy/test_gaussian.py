from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate, stats

from fedbicross.privacy.gaussian import delta_of, epsilon_of, noise_for, together

CASES = [(0.5, 1e-5), (1.0, 1e-5), (1.0, 1e-2), (4.0, 1e-6), (8.0, 1e-5), (0.05, 1e-3)]


def slow_delta(noise: float, epsilon: float) -> float:
    """∫ max(p − e^ε q, 0) over the line, where p and q are what one image more or less makes of the answer."""
    p, q = stats.norm(1.0, noise), stats.norm(0.0, noise)
    # p = e^ε q at x = ½ + ε s²; above it p is larger
    start = 0.5 + epsilon * noise**2

    def gap(x: float) -> float:
        return p.pdf(x) - math.exp(epsilon) * q.pdf(x)

    found, _ = integrate.quad(gap, start, start + 40 * noise, epsabs=1e-16, epsrel=1e-10, limit=500)
    return found


@pytest.mark.parametrize(("epsilon", "delta"), CASES)
def test_delta_is_what_integration_finds(epsilon: float, delta: float) -> None:
    for noise in (0.4, 1.0, 3.0):
        slow = slow_delta(noise, epsilon)
        assert delta_of(noise, epsilon) == pytest.approx(slow, rel=1e-6, abs=1e-14)


@pytest.mark.parametrize(("epsilon", "delta"), CASES)
def test_the_noise_is_enough_and_hardly_more(epsilon: float, delta: float) -> None:
    noise = noise_for(epsilon, delta)
    assert slow_delta(noise, epsilon) <= delta * (1 + 1e-9)
    assert slow_delta(noise * 0.999, epsilon) > delta
    assert epsilon_of(noise, delta) == pytest.approx(epsilon, rel=1e-6)
    # the well-known formula needs more noise, and holds only up to ε = 1
    if epsilon <= 1:
        assert noise < math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def test_far_ends() -> None:
    assert delta_of(1e-3, 1.0) == pytest.approx(1.0)
    assert delta_of(1e-3, 1e5) == pytest.approx(1.0)  # e^ε would overflow
    assert delta_of(1e4, 5.0) == 0
    assert epsilon_of(1e9, 1e-5) == 0
    assert epsilon_of(1e-4, 1e-5) == math.inf
    assert noise_for(1e-3, 1e-9) > 1000


def test_together_is_one_mechanism_on_all_of_it() -> None:
    """Two answers beside each other are a vector: scale each to noise 1, and the image moves it by √(1/a² + 1/b²)."""
    a, b = 1.5, 4.0
    assert together([a, b]) == pytest.approx(1 / np.hypot(1 / a, 1 / b))
    assert together([a]) == pytest.approx(a)
    assert together([3.0] * 9) == pytest.approx(1.0)
