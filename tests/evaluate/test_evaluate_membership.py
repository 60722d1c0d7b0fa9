"""Every equation against a slow version that a reader can check with a pencil."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from fedbicross.evaluate import membership

SCORES = st.lists(st.integers(-5, 5), min_size=2, max_size=12)


def test_confidence_is_the_logit_of_the_right_class() -> None:
    probabilities = np.array([[0.7, 0.2, 0.1], [0.25, 0.25, 0.5]])
    found = membership.confidence(probabilities, np.array([0, 2]))
    assert found == pytest.approx([math.log(0.7 / 0.3), math.log(0.5 / 0.5)])


def test_confidence_stays_finite_and_knows_more_than_one() -> None:
    """A float32 probability of 1 still says how small the others are."""
    sure = np.array([[1.0, 1e-20], [1.0, 1e-25], [0.0, 1.0]], np.float32)
    found = membership.confidence(sure, np.zeros(3, int))
    assert np.isfinite(found).all()
    assert found[1] > found[0] > 0 > found[2]


def test_confidence_of_several_networks_is_that_of_each() -> None:
    rng = np.random.default_rng(0)
    answers, labels = rng.dirichlet(np.ones(4), (3, 6)), rng.integers(0, 4, 6)
    each = np.stack([membership.confidence(one, labels) for one in answers])
    assert np.array_equal(membership.confidence(answers, labels), each)


def drawn(values: list[float], noise: float) -> list[float]:
    mean = sum(values) / len(values)
    spread = sum((value - mean) ** 2 for value in values) / len(values)
    trust = max(0.0, 1 - noise / spread)
    return [mean + trust * (value - mean) for value in values]


def slow_expected(shadows: np.ndarray, inside: np.ndarray) -> tuple[list[float], list[float], float, list[float]]:
    count, images = shadows.shape
    without, gain, level, squares, freedom, noise = [], [], [], 0.0, 0, []
    for image in range(images):
        seen = [shadows[k, image] for k in range(count) if inside[k, image]]
        unseen = [shadows[k, image] for k in range(count) if not inside[k, image]]
        with_it, without_it = sum(seen) / len(seen), sum(unseen) / len(unseen)
        without.append(without_it)
        gain.append(with_it - without_it)
        level.append((with_it + without_it) / 2)
        for group in (seen, unseen):
            squares += sum((value - sum(group) / len(group)) ** 2 for value in group)
            freedom += len(group) - 1
        noise.append(1 / len(seen) + 1 / len(unseen))
    variance = squares / freedom
    each = variance * sum(noise) / images  # of a gain; a level is half a sum, so that its noise is a quarter
    return drawn(level, each / 4), drawn(gain, each), variance, without


def shadow_scores(count: int = 6, images: int = 40, gain: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    inside = np.stack([rng.permutation(images) < images // 2 for _ in range(count // 2)])
    inside = np.concatenate([inside, ~inside])
    own_gain = gain * rng.random(images)
    return rng.normal(0, 1, (count, images)) + rng.normal(0, 2, images) + inside * own_gain, inside


def test_expected_scores_against_a_slow_version() -> None:
    shadows, inside = shadow_scores()
    found = membership.expected(shadows, inside)
    level, gain, variance, without = slow_expected(shadows, inside)
    assert found.without == pytest.approx(without)
    assert found.level == pytest.approx(level)
    assert found.gain == pytest.approx(gain)
    assert found.variance == pytest.approx(variance)


def test_an_image_that_no_shadow_saw_has_the_usual_gain() -> None:
    shadows, inside = shadow_scores()
    inside[:, 0], inside[:, 1] = False, True
    found = membership.expected(shadows, inside)
    usual = membership.expected(shadows[:, 2:], inside[:, 2:])
    assert found.gain[0] == found.gain[1] == pytest.approx(usual.gain.mean())
    assert found.without[0] == pytest.approx(shadows[:, 0].mean())
    assert found.without[1] == pytest.approx(shadows[:, 1].mean() - found.gain[1])


def test_noise_is_not_taken_for_knowledge() -> None:
    """Where images differ in nothing, their levels and gains are the same, however the means of few scatter."""
    rng = np.random.default_rng(0)
    inside = np.repeat([[True], [True], [False], [False]], 500, 1)
    found = membership.expected(rng.normal(0, 1, (4, 500)) + 3 * inside, inside)
    assert found.gain.std() < 0.25  # raw: 1
    assert found.level.std() < 0.15  # raw: 0.5
    assert found.gain.mean() == pytest.approx(3, abs=0.2)


def test_shadows_without_any_comparison_are_refused() -> None:
    with pytest.raises(ValueError, match="both inside and outside"):
        membership.expected(np.zeros((2, 3)), np.ones((2, 3), bool))


def test_likelihood_ratio_is_that_of_two_gaussians() -> None:
    shadows, inside = shadow_scores()
    expected = membership.expected(shadows, inside)
    scores = np.random.default_rng(2).normal(1, 2, 40)
    moved = scores + np.mean(expected.level) - scores.mean()
    sigma = expected.variance**0.5
    slow = [
        norm.logpdf(value, level + gain / 2, sigma) - norm.logpdf(value, level - gain / 2, sigma)
        for value, level, gain in zip(moved, expected.level, expected.gain, strict=True)
    ]
    assert membership.likelihood_ratio(scores, expected) == pytest.approx(slow)
    assert membership.likelihood_ratio(scores + 7, expected) == pytest.approx(slow)  # only the level differs


def test_the_attack_knows_members_that_shadows_make_known() -> None:
    shadows, inside = shadow_scores(count=16, images=400, gain=6.0)
    target, was_inside = shadows[0], inside[0]
    expected = membership.expected(shadows[1:], inside[1:])
    ratio = membership.likelihood_ratio(target, expected)
    plain = membership.auc(target[was_inside], target[~was_inside])
    assert membership.auc(ratio[was_inside], ratio[~was_inside]) > plain + 0.05


@given(SCORES, SCORES)
def test_auc_counts_pairs(members: list[int], controls: list[int]) -> None:
    wins = sum((m > c) + (m == c) / 2 for m in members for c in controls)
    found = membership.auc(np.array(members), np.array(controls))
    assert found == pytest.approx(wins / (len(members) * len(controls)))


@pytest.mark.slow
def test_interval_of_the_auc_covers_what_it_should() -> None:
    """In 100 draws of nothing learnt, about 95 % of the intervals hold 0.5."""
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(100):
        found = membership.auc_interval(rng.normal(size=60), rng.normal(size=60), rng, repeats=200)
        assert found.low <= found.value <= found.high
        held += found.low <= 0.5 <= found.high
    assert 88 <= held <= 100


def test_images_of_one_patient_are_drawn_together() -> None:
    """Twenty copies of each image say no more than one, so that the interval must not shrink."""
    rng = np.random.default_rng(4)
    members, controls = rng.normal(0.5, 1, 30), rng.normal(0, 1, 30)
    one = membership.auc_interval(members, controls, np.random.default_rng(0))
    patients = (np.repeat(np.arange(30), 20), np.repeat(np.arange(30), 20))
    many = [np.repeat(values, 20) for values in (members, controls)]
    kept = membership.auc_interval(many[0], many[1], np.random.default_rng(0), patients)
    naive = membership.auc_interval(many[0], many[1], np.random.default_rng(0))
    assert kept.high - kept.low == pytest.approx(one.high - one.low, rel=0.2)
    assert naive.high - naive.low < 0.5 * (one.high - one.low)


@given(st.integers(1, 30), st.data())
def test_exact_interval_is_where_the_tails_are_even(trials: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, trials))
    found = membership.binomial_interval(successes, trials)

    def at_least(p: float) -> float:
        return sum(math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(successes, trials + 1))

    def at_most(p: float) -> float:
        return sum(math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(successes + 1))

    assert found.value == successes / trials
    assert found.low == 0 if successes == 0 else at_least(found.low) == pytest.approx(0.025, rel=1e-6)
    assert found.high == 1 if successes == trials else at_most(found.high) == pytest.approx(0.025, rel=1e-6)


@settings(max_examples=50)
@given(SCORES, st.lists(st.integers(-5, 5), min_size=4, max_size=12), st.sampled_from([0.1, 0.25, 0.5]))
def test_true_positives_at_the_best_threshold_that_is_allowed(
    members: list[int], controls: list[int], fpr: float
) -> None:
    found = membership.tpr_at(fpr, np.array(members), np.array(controls))
    allowed = math.floor(fpr * len(controls) + 1e-9)
    if allowed < 1:
        assert found is None
        return
    best = 0
    for threshold in sorted({*members, *controls}):
        if sum(c > threshold for c in controls) <= allowed:
            best = max(best, sum(m > threshold for m in members))
    assert found is not None
    assert found.value == pytest.approx(best / len(members))


def test_too_few_controls_for_a_rate_are_said_so() -> None:
    assert membership.tpr_at(0.001, np.arange(5.0), np.arange(999.0)) is None
    assert membership.tpr_at(0.001, np.arange(5.0), np.arange(1000.0)) is not None


def test_advantage_is_nothing_for_nothing_and_all_for_all() -> None:
    rng = np.random.default_rng(5)
    none = [membership.advantage(rng.normal(size=50), rng.normal(size=50), rng) for _ in range(200)]
    assert abs(np.mean(none)) < 0.03  # a threshold chosen where it is counted gives about 0.15
    assert membership.advantage(np.arange(20.0) + 100, np.arange(20.0), rng) == 1


def test_members_found_are_above_the_allowed_controls() -> None:
    scores = np.array([9.0, 5.0, 1.0, 4.0, 3.0, 2.0])
    is_member = np.array([True, True, True, False, False, False])
    assert membership.found_members(scores, is_member, 0.01).tolist() == [0, 1]
    assert membership.found_members(scores, is_member, 0.34).tolist() == [0, 1]
    assert membership.found_members(scores - 10 * is_member, is_member, 0.01).tolist() == []


@given(SCORES, SCORES)
def test_roc_ends_at_one_and_holds_the_auc(members: list[int], controls: list[int]) -> None:
    false, true = membership.roc(np.array(members), np.array(controls))
    assert (false[0], true[0], false[-1], true[-1]) == (0, 0, 1, 1)
    area = float(np.trapezoid(true, false)) if hasattr(np, "trapezoid") else float(np.trapz(true, false))  # noqa: NPY201
    assert area == pytest.approx(membership.auc(np.array(members), np.array(controls)))
