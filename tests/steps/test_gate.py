"""The gate at a client: each function against loops in float64, and the rules by what they promise."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from scipy.stats import ttest_rel
from torch import Tensor

from fedbicross.engine.combine import NOT_REFERRED, refer, referral_odds
from fedbicross.steps.gate import (
    FLATNESS,
    MARGIN,
    SELDOM,
    SHARES,
    Choice,
    better_beyond_chance,
    choose,
    estimate_prior,
    mixed,
    referral,
)

from .tiny import noise

COUNTS = torch.tensor([6, 0, 3, 1])
ALL = torch.tensor([25, 25, 25, 25])


def log_posteriors(images: int, classes: int = 4, seed: int = 0) -> Tensor:
    return (2 * noise(images, classes, seed=seed)).log_softmax(1)


# --- the mixture ------------------------------------------------------------------------------------------


def slow_mixed(own: list[float], shared: list[float], counts: list[int], w: float, e: float) -> list[float]:
    """log of p_own^w [p_shared pi_e]^(1-w), renormalised, of one image."""
    shares = [(1 - e) * count / sum(counts) + e / len(counts) for count in counts]
    scores = [w * a + (1 - w) * (b + math.log(pi)) for a, b, pi in zip(own, shared, shares, strict=True)]
    total = math.log(sum(map(math.exp, scores)))
    return [score - total for score in scores]


@pytest.mark.parametrize("flatness", FLATNESS)
@pytest.mark.parametrize("share", [1.0, *SHARES])
def test_a_mixture_equals_the_formula_number_by_number(share: float, flatness: float) -> None:
    own, shared = log_posteriors(5, seed=1), log_posteriors(5, seed=2)
    rows = zip(own.tolist(), shared.tolist(), strict=True)
    expected = [slow_mixed(a, b, COUNTS.tolist(), share, flatness) for a, b in rows]
    found = mixed(own, shared, COUNTS, share, flatness)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-11, atol=1e-12)


def test_at_the_ends_a_mixture_is_one_of_the_models() -> None:
    own, shared = log_posteriors(5, seed=1), log_posteriors(5, seed=2)
    torch.testing.assert_close(mixed(own, shared, COUNTS, 1.0, 0.3), own, msg="its class mix is in it already")
    joint = shared.exp() * (0.7 * COUNTS.double() / 10 + 0.3 / 4)
    torch.testing.assert_close(mixed(own, shared, COUNTS, 0.0, 0.3).exp(), joint / joint.sum(1, keepdim=True))
    even = mixed(own, shared, ALL, 0.0, 0.3)
    torch.testing.assert_close(even, shared, msg="where all classes are alike, the class mix says nothing")


# --- the sign test ----------------------------------------------------------------------------------------


def chance(won: int, lost: int) -> Fraction:
    """How probably a fair coin wins at least so many of all throws, as an exact fraction."""
    throws = won + lost
    return Fraction(sum(math.comb(throws, k) for k in range(won, throws + 1)), 2**throws)


def test_the_sign_test_equals_a_sum_of_binomial_coefficients() -> None:
    for won in range(41):
        for lost in range(41):
            assert better_beyond_chance(won, lost) == (chance(won, lost) < Fraction(1, 20)), (won, lost)


@pytest.mark.parametrize(("won", "lost"), [(526, 474), (527, 473), (528, 472), (560, 440)])
def test_the_sign_test_on_many_images(won: int, lost: int) -> None:
    assert better_beyond_chance(won, lost) == (chance(won, lost) < Fraction(1, 20))


def test_four_wins_are_too_few_and_five_are_enough() -> None:
    assert not better_beyond_chance(0, 0) and not better_beyond_chance(4, 0) and better_beyond_chance(5, 0)
    assert not better_beyond_chance(7, 2) and better_beyond_chance(8, 1)
    assert not better_beyond_chance(0, 50)


# --- own model or mixture ---------------------------------------------------------------------------------


def slow_choose(own: Tensor, shared: Tensor, labels: list[int], counts: list[int]) -> tuple[float, float, int, int]:
    """w, e, and the answers won and lost, image by image; the t-test by SciPy on two lists of losses."""
    own_rows, shared_rows, images = own.tolist(), shared.tolist(), range(len(labels))
    mixtures = [(w, e) for w in (0.7, 0.5, 0.3, 0.0) for e in (0.01, 0.1, 0.3)]
    says = {m: [slow_mixed(own_rows[i], shared_rows[i], counts, *m) for i in images] for m in mixtures}

    def lowest_loss(some: list[int]) -> tuple[float, float]:
        return min(mixtures, key=lambda m: -sum(says[m][i][labels[i]] for i in some))

    chosen = [lowest_loss([j for j in images if j % 5 != i % 5]) for i in images]
    alone = [-own_rows[i][labels[i]] for i in images]
    mixing = [-says[chosen[i]][i][labels[i]] for i in images]
    own_right = [own_rows[i].index(max(own_rows[i])) == labels[i] for i in images]
    right = [says[chosen[i]][i].index(max(says[chosen[i]][i])) == labels[i] for i in images]
    pairs = list(zip(right, own_right, strict=True))
    won, lost = pairs.count((True, False)), pairs.count((False, True))
    better = ttest_rel(alone, mixing, alternative="greater").pvalue < 0.05 and won > lost
    return (*(lowest_loss(list(images)) if better else (1.0, 0.3)), won, lost)


def noisy(labels: Tensor, signal: float, seed: int) -> Tensor:
    """Log-probabilities of a model that sees so much of the label."""
    seen = torch.nn.functional.one_hot(labels, 4).double()
    return (signal * seen + noise(len(labels), 4, seed=seed)).log_softmax(1)


def test_the_choice_equals_loops() -> None:
    found = set()
    for seed, (own, shared) in enumerate([(0.0, 4.0), (0.5, 1.0), (1.0, 1.0), (1.0, 0.8), (2.0, 0.0), (0.3, 0.8)] * 4):
        labels = torch.randint(4, (70,), generator=torch.Generator().manual_seed(seed))
        counts = torch.bincount(labels, minlength=4)
        a, b = noisy(labels, own, 2 * seed), noisy(labels, shared, 2 * seed + 1)
        choice = choose(a, b, labels, counts)
        found_slowly = slow_choose(a, b, labels.tolist(), counts.tolist())
        assert (choice.share, choice.flatness, choice.won, choice.lost) == found_slowly
        found.add(choice.share)
    assert 1.0 in found and len(found) >= 3, "the cases above do not all end alike"


def answers(said: Tensor, sure: float | Tensor = 3.0) -> Tensor:
    """Log-probabilities of a model that says this, and how sure it is."""
    return (torch.nn.functional.one_hot(said, 4).double() * torch.as_tensor(sure).view(-1, 1)).log_softmax(1)


def says(labels: Tensor, right: float, seed: int) -> Tensor:
    """Answers of which this share is right."""
    wrong = torch.rand(len(labels), generator=torch.Generator().manual_seed(seed)) >= right
    return torch.where(wrong, (labels + 1) % 4, labels)


LABELS = torch.arange(200) % 4


def test_a_clearly_better_shared_model_is_taken() -> None:
    choice = choose(answers(says(LABELS, 0.5, 1)), answers(says(LABELS, 0.98, 2)), LABELS, ALL)
    assert choice.share < 1 and choice.images == 200 and choice.won > 80 and choice.lost < 10


@pytest.mark.parametrize("sure", [1.0, 30.0])
def test_a_model_with_the_same_answers_is_not_taken(sure: float) -> None:
    """Though it may be the better calibrated one: what a client gains must be answers."""
    same = says(LABELS, 0.7, 1)
    choice = choose(answers(same), answers(same, sure), LABELS, ALL)
    assert (choice.share, choice.won, choice.lost) == (1.0, 0, 0)


@pytest.mark.parametrize("sure", [1.0, 30.0])
def test_a_worse_model_is_not_taken(sure: float) -> None:
    choice = choose(answers(says(LABELS, 0.98, 1)), answers(says(LABELS, 0.6, 2), sure), LABELS, ALL)
    assert choice.share == 1


@pytest.mark.parametrize("images", [0, 1, 9])
def test_with_too_few_validation_images_the_own_model_stays(images: int) -> None:
    labels = LABELS[:images]
    choice = choose(answers((labels + 1) % 4), answers(labels, 30.0), labels, ALL)
    assert choice == Choice(1.0, images), "even if the shared model is always right and the own one never"


def test_a_model_that_knows_nothing_more_is_seldom_let_in() -> None:
    """The own model says of every image just how probable each class is: nothing that is mixed in can tell more."""
    generator, runs, let_in = torch.Generator().manual_seed(0), 200, 0
    for run in range(runs):
        own = (2 * noise(100, 4, seed=2 * run)).log_softmax(1)
        labels = torch.multinomial(own.exp(), 1, generator=generator)[:, 0]
        let_in += choose(own, log_posteriors(100, seed=2 * run + 1), labels, ALL).share < 1
    assert let_in / runs < 0.1, "5 % and its chance error: 0.05 + 3 * (0.05 * 0.95 / 200) ** 0.5"


# --- referral ---------------------------------------------------------------------------------------------


def marks(found: Tensor) -> list[int]:
    return (found < NOT_REFERRED).int().tolist()


def slow_referral(shared: list[list[float]], labels: list[int], counts: list[int]) -> list[float] | None:
    seldom, out = [100 * count < sum(counts) for count in counts], []
    own = [row for row, label in zip(shared, labels, strict=True) if not seldom[label]]
    for c in range(4):
        odds = sorted(row[c] - max(row[d] for d in range(4) if not seldom[d]) for row in own)
        middle = odds[(len(odds) - 1) // 2]  # of two in the middle the lower one
        out.append(odds[-1] + 0.2 * (odds[-1] - middle) if seldom[c] else NOT_REFERRED)
    return out


@pytest.mark.parametrize("counts", [[120, 79, 0, 1], [150, 50, 0, 0], [1, 0, 0, 199], [0, 0, 1, 0], [0, 0, 2, 0]])
def test_the_referral_equals_loops(counts: list[int]) -> None:
    labels = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    shared = log_posteriors(len(labels), seed=3)
    found = referral(shared, labels, torch.tensor(counts))
    assert found is not None and found.dtype == torch.float64
    assert found.tolist() == pytest.approx(slow_referral(shared.tolist(), labels.tolist(), counts), rel=1e-12)


def test_no_own_image_of_a_common_class_is_referred() -> None:
    """The threshold is beyond every one of them, by a fifth of the way from their median."""
    counts = torch.tensor([60, 0, 39, 1])  # 1 of 100 is not seldom
    labels = torch.repeat_interleave(torch.arange(4), counts)
    for seed in range(20):
        shared = log_posteriors(100, seed=seed)
        found = referral(shared, labels, counts)
        assert found is not None and marks(found) == [0, 1, 0, 0]
        odds = referral_odds(shared, found < NOT_REFERRED)[:, 1]
        assert float(found[1]) == pytest.approx(float(odds.max() + MARGIN * (odds.max() - odds.median())))
        assert (odds < found[1]).all()
        kept = torch.zeros(100, 4, dtype=torch.float64)
        assert torch.equal(refer(kept, shared, found), kept)


def test_own_images_of_seldom_classes_do_not_count() -> None:
    counts = torch.tensor([150, 149, 1, 0])
    labels = torch.repeat_interleave(torch.arange(4), counts)
    shared = log_posteriors(300, seed=4)
    expected = referral(shared, labels, counts)
    assert expected is not None and marks(expected) == [0, 0, 1, 1]
    shared[299] = torch.tensor([-50.0, -50.0, 0.0, -50.0])  # the only image of the third class, as sure as can be
    assert torch.equal(referral(shared, labels, counts), expected)
    shared[0] = shared[299]
    changed = referral(shared, labels, counts)
    assert changed[2] > expected[2], "an image of a common class does"


@pytest.mark.parametrize("counts", [[25, 25, 25, 25], [97, 1, 1, 1], [0, 0, 0, 0]])
def test_no_referral_where_no_class_is_seldom(counts: list[int]) -> None:
    labels = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    assert referral(log_posteriors(len(labels)), labels, torch.tensor(counts)) is None


@pytest.mark.parametrize("images", [1, 99, 100, 101, 300, 700, 1000, 2900, 123_400])
def test_seldom_is_less_than_one_image_in_a_hundred(images: int) -> None:
    """Exactly one in a hundred is not, whatever the rounding of 0.01."""
    assert SELDOM == 0.01
    for few in (images // 100, images // 100 + 1):
        counts = torch.tensor([images - few, few, 0])
        labels = torch.tensor([0])  # one image is enough: the counts alone decide
        found = referral(log_posteriors(1, 3), labels, counts)
        expected = [float(100 * count < images) for count in counts.tolist()]
        assert found is None if expected[0] else found is not None and marks(found) == expected


def test_a_referral_seldom_takes_an_image_from_the_own_model() -> None:
    """Of own images and one more of the same kind, the last is beyond all others with probability 1/(n+1)."""
    generator, runs, n = torch.Generator().manual_seed(1), 2000, 19
    lost, counts = 0, torch.tensor([10, 9, 0])
    labels = torch.repeat_interleave(torch.arange(3), counts)
    for _ in range(runs):
        shared = torch.randn(n + 1, 3, generator=generator, dtype=torch.float64).log_softmax(1)
        found = referral(shared[:n], labels, counts)
        lost += bool(referral_odds(shared[n:], found < NOT_REFERRED)[0, 2] > found[2])
    assert 0 < lost < runs / (n + 1)


# --- the class mix of unlabelled images -------------------------------------------------------------------


def slow_estimate(probabilities: list[list[float]], assumed: list[float], rounds: int) -> list[float]:
    """Saerens et al. (2002), Eq. 2.4, image by image."""
    prior = list(assumed)
    for _ in range(rounds):
        total = [0.0] * len(prior)
        for row in probabilities:
            joint = [p * new / old for p, new, old in zip(row, prior, assumed, strict=True)]
            for c, value in enumerate(joint):
                total[c] += value / sum(joint) / len(probabilities)
        prior = total
    return prior


def test_a_class_that_the_shared_model_never_names_is_not_referred() -> None:
    rows = log_posteriors(12)
    labels = torch.tensor([0, 2, 3] * 4)
    never = rows.clone()
    never[:, 1] = -1e30
    assert referral(never, labels, COUNTS) is None and referral(rows, labels, COUNTS) is not None


@pytest.mark.parametrize("rounds", [1, 7])
def test_the_estimate_equals_a_loop(rounds: int) -> None:
    rows, assumed = log_posteriors(12).exp(), torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    found = estimate_prior(rows, assumed, rounds, tolerance=0)
    torch.testing.assert_close(found, torch.tensor(slow_estimate(rows.tolist(), assumed.tolist(), rounds)).double())


def test_a_known_class_mix_is_found_again() -> None:
    """Exact posteriors under one class mix, images of another: the estimate ends at the other."""
    likelihood = torch.tensor([[0.8, 0.15, 0.05], [0.1, 0.8, 0.1], [0.1, 0.2, 0.7]], dtype=torch.float64)  # p(x|c)
    true, assumed = torch.tensor([0.7, 0.25, 0.05]), torch.tensor([1 / 3, 1 / 3, 1 / 3])
    shown = likelihood.T @ true.double()  # how often each of the three images is seen
    posterior = (likelihood.T * assumed) / (likelihood.T * assumed).sum(1, keepdim=True)
    images = torch.repeat_interleave(posterior, (shown * 10_000).round().long(), dim=0)
    assert estimate_prior(images, assumed).tolist() == pytest.approx(true.tolist(), abs=1e-3)


def test_the_estimate_is_a_distribution_and_stays_where_images_say_nothing() -> None:
    assumed = torch.tensor([0.5, 0.3, 0.2])
    silent = assumed.repeat(6, 1)
    torch.testing.assert_close(estimate_prior(silent, assumed), assumed.double())
    sure = torch.eye(3)[[0, 0, 2]]
    assert estimate_prior(sure, assumed).tolist() == pytest.approx([2 / 3, 0, 1 / 3])
    never = estimate_prior(torch.tensor([[0.6, 0.4, 0.0]]), torch.tensor([0.5, 0.5, 0.0]))
    assert never.isfinite().all() and float(never.sum()) == pytest.approx(1) and never[2] == 0
