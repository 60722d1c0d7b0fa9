"""A lower bound on ε from a single training run with canaries (Steinke, Nasr, Jagielski, 2023).

A fair coin decides for each canary whether it is trained on. Afterwards somebody who sees the network guesses the coins
from scores, and may pass. If training were (ε, δ)-differentially private, correct guesses could hardly outnumber those
of a coin that shows the right side with probability e^ε / (1 + e^ε). Many correct guesses therefore refute a small ε.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.stats import binom

SHARES = (0.1, 0.25, 0.5, 1.0)  # of the canaries that are guessed: the surest ones; each has its part of the error
LARGEST = 50.0  # ε; no number of canaries that anybody trains with shows more


class Bound(NamedTuple):
    """The best lower bound on ε, and the guesses behind it."""

    epsilon: float
    guesses: int
    correct: int
    canaries: int
    confidence: float


def p_value(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """How likely so many correct guesses are, at most, under (ε, δ)-differential privacy.

    P[W ≥ v] ≤ P[B ≥ v] + 2 m δ max_i P[v - i ≤ B < v] / i, with B ~ Binomial(r, e^ε / (1 + e^ε)), i = 1..v.
    """
    rate = 1 / (1 + np.exp(-epsilon))
    tail = float(binom.sf(correct - 1, guesses, rate))
    if delta == 0 or correct == 0:
        return min(tail, 1.0)
    below = np.cumsum(binom.pmf(np.arange(correct - 1, -1, -1), guesses, rate))  # P[v - i <= B < v], i = 1..v
    return min(tail + 2 * canaries * delta * float((below / np.arange(1, correct + 1)).max()), 1.0)


def epsilon_bound(correct: int, guesses: int, canaries: int, delta: float, error: float) -> float:
    """The smallest ε that so many correct guesses do not refute, with a chance of being wrong of ``error``."""

    def too_likely(epsilon: float) -> float:
        return p_value(correct, guesses, canaries, epsilon, delta) - error

    if too_likely(0.0) >= 0:
        return 0.0
    if too_likely(LARGEST) < 0:
        return LARGEST
    return float(brentq(too_likely, 0.0, LARGEST, xtol=1e-9))


def count_correct(scores: np.ndarray, included: np.ndarray, guesses: int) -> int:
    """Right guesses if the highest half of ``guesses`` are called trained on, and the lowest half not."""
    order = np.argsort(scores, kind="stable")
    high = guesses // 2
    low = guesses - high
    return int(included[order[len(order) - high :]].sum() + (~included[order[:low]]).sum())


def best_bound(scores: np.ndarray, included: np.ndarray, delta: float, confidence: float = 0.95) -> Bound:
    """The best of several numbers of guesses; each has its share of the error, so that choosing costs nothing."""
    canaries, error = len(scores), (1 - confidence) / len(SHARES)
    found = []
    for share in SHARES:
        guesses = max(1, round(share * canaries))
        correct = count_correct(scores, included, guesses)
        epsilon = epsilon_bound(correct, guesses, canaries, delta, error)
        found.append(Bound(epsilon, guesses, correct, canaries, confidence))
    return max(found, key=lambda bound: bound.epsilon)
