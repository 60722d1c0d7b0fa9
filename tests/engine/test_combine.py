"""How the answers of networks are combined, against loops over images, classes and clients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedbicross.engine.combine import (
    NEVER,
    NOT_REFERRED,
    class_weights,
    combine_logits,
    contrast_counts,
    log_prior,
    refer,
    referral_odds,
    weighting_counts,
)
from fedbicross.errors import MethodError
from small import refuses

COUNTS = torch.tensor([[30, 0, 2], [5, 5, 5], [0, 900, 1]], dtype=torch.float64)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log_softmax(row: list[float]) -> list[float]:
    largest = max(row)
    total = sum(math.exp(value - largest) for value in row)
    return [value - largest - math.log(total) for value in row]


def softmax(row: list[float]) -> list[float]:
    return [math.exp(value) for value in log_softmax(row)]


def slow_consensus(
    logits: list[list[list[float]]], weights: list[list[float]], temperature: float, prior: list[float]
) -> list[list[float]]:
    """softmax(T/τ), T(c) = Σ_i a(i,c) log p_i(c|x) + b(c), over the classes that somebody has."""
    known = [c for c in range(len(prior)) if any(of_client[c] > 0 for of_client in weights)]
    out = []
    for image in range(len(logits[0])):
        said = [log_softmax(of_client[image]) for of_client in logits]
        scores = {c: prior[c] + sum(a[c] * s[c] for a, s in zip(weights, said, strict=True)) for c in known}
        total = sum(math.exp(score / temperature) for score in scores.values())
        out.append([math.exp(scores[c] / temperature) / total if c in scores else 0.0 for c in range(len(prior))])
    return out


def test_means_and_class_weights_equal_loops() -> None:
    logits = numbers(2, 3, 4)
    weights = class_weights(torch.tensor([[3, 0, 1, 0], [1, 5, 1, 0]]))
    assert weights.tolist() == [[0.75, 0.0, 0.5, 0.0], [0.25, 1.0, 0.5, 0.0]]
    mean_logits = combine_logits(logits, "mean_logits", 5.0)
    mean_probs = combine_logits(logits, "mean_probs", 5.0)
    weighted = combine_logits(logits, "class_weighted", 5.0, weights)
    for b in range(3):
        softened = [softmax((logits[i, b] / 5).tolist()) for i in range(2)]
        assert mean_logits[b].tolist() == pytest.approx(softmax((logits[:, b].mean(0) / 5).tolist()))
        assert mean_probs[b].tolist() == pytest.approx([(softened[0][c] + softened[1][c]) / 2 for c in range(4)])
        raw = [sum(weights[i, c].item() * softened[i][c] for i in range(2)) for c in range(4)]
        assert weighted[b].tolist() == pytest.approx([value / sum(raw) for value in raw])
        assert weighted[b, 3] == 0


@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize("prior", [None, [-0.1, -3.0, -1.0]])
def test_consensus_equals_loops(temperature: float, prior: list[float] | None) -> None:
    logits, weights = numbers(3, 5, 3), class_weights(COUNTS)
    found = combine_logits(logits, "consensus", temperature, weights, None if prior is None else torch.tensor(prior))
    expected = slow_consensus(logits.tolist(), weights.tolist(), temperature, prior or [0.0] * 3)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-7)


def test_consensus_of_one_network_is_its_own_answer() -> None:
    logits = numbers(1, 4, 3)
    found = combine_logits(logits, "consensus", 2.0, torch.ones(1, 3))
    torch.testing.assert_close(found, (logits[0] / 2).softmax(1))


def test_a_prior_moves_the_answer_as_bayes_says() -> None:
    logits, prior = numbers(1, 4, 3), torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    joint = logits[0].softmax(1) * prior
    found = combine_logits(logits, "consensus", 1.0, torch.ones(1, 3), prior.log())
    torch.testing.assert_close(found, joint / joint.sum(1, keepdim=True))


def test_a_class_that_nobody_has_gets_nothing_however_loud_the_networks_are() -> None:
    weights = class_weights(torch.tensor([[3, 0, 1], [1, 0, 1]]))
    logits = torch.tensor([0.0, 500.0, 0.0]).repeat(2, 4, 1)
    for temperature in (1.0, 20.0):
        found = combine_logits(logits, "consensus", temperature, weights)
        assert (found[:, 1] == 0).all() and torch.allclose(found.sum(1), torch.ones(4))


def test_who_is_sure_of_something_else_has_a_veto() -> None:
    """Two clients share a class; one says it with 0.9, the other rules it out. A mixture of probabilities would not."""
    logits = torch.tensor([[[0.9, 0.05, 0.05]], [[1e-9, 0.5, 0.5]]]).log()
    weights = torch.full((2, 3), 0.5)
    assert combine_logits(logits, "consensus", 1.0, weights)[0, 0] < 0.01
    assert combine_logits(logits, "class_weighted", 1.0, weights)[0, 0] > 0.4


def test_answers_stay_finite_where_every_expert_is_sure_of_another() -> None:
    logits = torch.tensor([[[0.0, 3e4]], [[3e4, 0.0]]])
    rules = [("consensus", torch.eye(2)), ("consensus", torch.full((2, 2), 0.5)), ("class_weighted", torch.eye(2))]
    for how, weights in rules:
        found = combine_logits(logits, how, 1.0, weights)  # type: ignore[arg-type]
        assert found.isfinite().all() and torch.allclose(found, torch.full((1, 2), 0.5))


@pytest.mark.parametrize("how", ["consensus", "class_weighted"])
def test_rules_by_class_need_class_weights(how: str) -> None:
    with refuses(MethodError, "no_class_counts", how):
        combine_logits(numbers(2, 3, 3), how, 1.0)  # type: ignore[arg-type]


def test_class_weights_need_counts_which_noise_may_have_made_negative() -> None:
    with pytest.raises(MethodError, match="no_class_counts"):
        class_weights(torch.zeros(2, 3))
    assert class_weights(torch.tensor([[0.5, -1.0], [0.5, 2.0]])).tolist() == [[0.5, 0.0], [0.5, 1.0]]


def test_an_unknown_rule_fails_loudly() -> None:
    with pytest.raises(AssertionError):
        combine_logits(numbers(2, 3, 4), "median", 1.0)  # type: ignore[arg-type]


# --- counts and priors ------------------------------------------------------------------------------------


def slow_contrast(counts: list[list[float]]) -> list[list[float]]:
    out = [[min(row[c], sum(row) - row[c]) for c in range(len(row))] for row in counts]
    for c in range(len(counts[0])):
        if all(row[c] == 0 for row in out):
            for mine, given in zip(out, counts, strict=True):
                mine[c] = given[c]
    return out


@pytest.mark.parametrize("seed", range(5))
def test_contrast_counts_equal_loops(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 50, (4, 5), generator=generator).double()
    counts = counts * (torch.rand(4, 5, generator=generator) < 0.5)
    expected = slow_contrast(counts.tolist())
    assert contrast_counts(counts).tolist() == weighting_counts(counts, "contrast").tolist() == expected
    assert weighting_counts(counts, "root").tolist() == [[math.sqrt(n) for n in row] for row in expected]
    assert torch.equal(weighting_counts(counts, "counts"), counts)


def test_a_hospital_of_nearly_one_class_hardly_counts_for_it() -> None:
    counts = torch.tensor([[1000.0, 3.0], [50.0, 50.0]])
    assert contrast_counts(counts).tolist() == [[3, 3], [50, 50]]
    assert class_weights(contrast_counts(counts))[0, 0] < 0.06
    assert class_weights(counts)[0, 0] > 0.95


def test_a_class_that_nobody_can_tell_from_anything_keeps_its_counts() -> None:
    assert contrast_counts(torch.tensor([[7.0, 0.0], [0.0, 9.0]])).tolist() == [[7, 0], [0, 9]]
    assert contrast_counts(torch.tensor([[7.0, 0.0]])).tolist() == [[7, 0]]
    one_knows = torch.tensor([[7.0, 0.0, 0.0], [4.0, 2.0, 0.0]])
    assert contrast_counts(one_knows).tolist() == [[0, 0, 0], [2, 2, 0]]
    assert contrast_counts(torch.tensor([[-2.0, 5.0, 5.0]])).tolist() == [[0, 5, 5]], "counts with privacy noise"


@pytest.mark.parametrize("flatness", [0.0, 0.001, 0.3, 1.0])
def test_log_prior_equals_a_loop(flatness: float) -> None:
    counts = [6, 0, 3, 1]
    shares = [(1 - flatness) * count / 10 + flatness / 4 for count in counts]
    expected = torch.tensor([math.log(share) if share else NEVER for share in shares], dtype=torch.float64)
    found = log_prior(torch.tensor(counts), flatness)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected)


def test_log_prior_of_odd_counts_is_finite() -> None:
    assert log_prior(torch.tensor([0, 0])).tolist() == [NEVER, NEVER]
    assert log_prior(torch.tensor([0, 0]), 1.0).tolist() == pytest.approx([math.log(0.5)] * 2)
    assert log_prior(torch.tensor([4, 0])).tolist() == [0, NEVER], "one class: the answer is known"
    assert log_prior(torch.tensor([-3.0, 2.0])).tolist() == [NEVER, 0], "counts with privacy noise"


# --- referral ---------------------------------------------------------------------------------------------

MARKS = [[1, 0, 0, 0], [0, 1, 0, 1], [1, 1, 1, 0]]


def slow_odds(row: list[float], marks: list[int]) -> list[float]:
    others = max(value for value, mark in zip(row, marks, strict=True) if not mark)
    return [value - others for value in row]


@pytest.mark.parametrize("marks", MARKS)
def test_referral_odds_equal_a_loop(marks: list[int]) -> None:
    rows = numbers(20, 4).log_softmax(1)
    found = referral_odds(rows, torch.tensor(marks) > 0)
    expected = [slow_odds(row, marks) for row in rows.tolist()]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(referral_odds(rows + 7, torch.tensor(marks) > 0), found)  # of logits the same


@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize("threshold", [-1.5, 0.0, 1.0, 9e3, -1e4])
def test_refer_equals_a_loop(threshold: float, marks: list[int]) -> None:
    given, logits = numbers(30, 4, seed=1).softmax(1), numbers(30, 4, seed=2)
    thresholds = [threshold + c / 4 if mark else NOT_REFERRED for c, mark in enumerate(marks)]  # each class its own
    expected = []
    for row, said in zip(given.tolist(), logits.tolist(), strict=True):
        shared = log_softmax(said)
        likeliest = max((c for c in range(4) if marks[c]), key=lambda c: shared[c])
        passed = slow_odds(shared, marks)[likeliest] > thresholds[likeliest]
        expected.append([math.exp(value) for value in shared] if passed else row)
    found = refer(given, logits, torch.tensor(thresholds))
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)
    referred = (found != given).any(1)
    assert torch.equal(found[~referred], given[~referred]), "to the last bit"
    if abs(threshold) > 1e3:
        assert referred.all() == (threshold < 0) and referred.any() == (threshold < 0)


def test_odds_that_equal_the_threshold_are_not_beyond_it() -> None:
    given, logits = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.0, 2.0]])
    shared = logits.log_softmax(1)
    threshold = shared[0, 1] - shared[0, 0]
    assert torch.equal(refer(given, logits, torch.tensor([NOT_REFERRED, float(threshold)])), given)


def test_refer_stays_finite_where_the_shared_model_is_as_sure_as_can_be() -> None:
    logits = torch.tensor([[0.0, 3e38], [3e38, 0.0]])
    found = refer(torch.full((2, 2), 0.5), logits, torch.tensor([NOT_REFERRED, 5.0]))
    assert found.tolist() == [[0, 1], [0.5, 0.5]]
