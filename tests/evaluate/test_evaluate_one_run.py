"""The bound of the one-run audit: against slow sums, and by simulating the game that it is about."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbicross.evaluate import one_run


def slow_p_value(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    q = math.exp(epsilon) / (1 + math.exp(epsilon))
    mass = [math.comb(guesses, k) * q**k * (1 - q) ** (guesses - k) for k in range(guesses + 1)]
    tail = sum(mass[correct:])
    best = max((sum(mass[correct - i : correct]) / i for i in range(1, correct + 1)), default=0.0)
    return min(1.0, tail + 2 * canaries * delta * best)


@settings(max_examples=60)
@given(st.integers(1, 40), st.data(), st.floats(0, 5), st.sampled_from([0.0, 1e-5, 1e-2]))
def test_p_value_against_a_slow_sum(guesses: int, data: st.DataObject, epsilon: float, delta: float) -> None:
    correct, canaries = data.draw(st.integers(0, guesses)), guesses + data.draw(st.integers(0, 40))
    found = one_run.p_value(correct, guesses, canaries, epsilon, delta)
    assert found == pytest.approx(slow_p_value(correct, guesses, canaries, epsilon, delta), rel=1e-9, abs=1e-12)


def test_bound_is_where_the_guesses_stop_being_surprising() -> None:
    found = one_run.epsilon_bound(100, 100, 100, 0.0, 0.05)  # all right: q^100 = 0.05
    q = 0.05**0.01
    assert found == pytest.approx(math.log(q / (1 - q)), rel=1e-6)
    assert one_run.epsilon_bound(55, 100, 100, 0.0, 0.05) == 0
    assert one_run.epsilon_bound(100, 100, 100, 1e-5, 0.05) < found


def test_more_right_guesses_never_prove_less() -> None:
    found = [one_run.epsilon_bound(correct, 60, 100, 1e-5, 0.05) for correct in range(61)]
    assert found == sorted(found)
    assert found[-1] > 2 > found[40]


def test_surest_guesses_are_counted_from_both_ends() -> None:
    scores = np.array([5.0, 4.0, 3.0, 2.0, 1.0, 0.0])
    included = np.array([True, True, False, True, False, False])
    assert one_run.count_correct(scores, included, 2) == 2
    assert one_run.count_correct(scores, included, 4) == 4
    assert one_run.count_correct(scores, included, 6) == 4


@pytest.mark.parametrize("epsilon", [0.0, 1.0, 3.0])
def test_bound_stays_below_the_truth_as_often_as_it_says(epsilon: float) -> None:
    """Randomised response with this ε is guessed by looking at it: the strongest attack there is."""
    rng = np.random.default_rng(0)
    keep = math.exp(epsilon) / (1 + math.exp(epsilon))
    over, found = 0, []
    for _ in range(200):
        included = rng.random(200) < 0.5
        told = np.where(rng.random(200) < keep, included, ~included)
        bound = one_run.best_bound(told + rng.random(200) / 10, included, 0.0)
        over += bound.epsilon > epsilon
        found.append(bound.epsilon)
    assert over <= 200 * 0.05 + 9  # three standard deviations
    assert epsilon == 0 or np.mean(found) > epsilon / 2


def test_bound_says_what_it_is_made_of() -> None:
    rng = np.random.default_rng(1)
    included = rng.random(100) < 0.5
    bound = one_run.best_bound(included + 0.01 * rng.random(100), included, 1e-5)
    assert bound.canaries == 100
    assert bound.correct <= bound.guesses <= 100
    assert bound.confidence == 0.95
    assert bound.epsilon > 2
