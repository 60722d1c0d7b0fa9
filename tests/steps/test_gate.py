"""The gate at a client: mixtures, folds and the estimated class mix against loops; the rule by what it must do."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fedbicross.steps.gate import FOLDS, OWN, Choice, Mixture, choose, estimate_prior, make_folds, mixed

from .tiny import noise

COUNTS = torch.tensor([6, 0, 3, 1])


def log_posteriors(images: int, classes: int = 4, seed: int = 0) -> Tensor:
    return (2 * noise(images, classes, seed=seed)).log_softmax(1)


# --- the mixture ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_prior", [False, True])
@pytest.mark.parametrize("mixture", [OWN, Mixture(0.0, 2.0, 1.0), Mixture(0.3, 0.5, 0.1), Mixture(0.9, 1.4, 0.001)])
def test_a_mixture_equals_the_formula_number_by_number(mixture: Mixture, has_prior: bool) -> None:
    own, shared = log_posteriors(3, seed=1), log_posteriors(3, seed=2)
    found = mixed(own, shared, COUNTS, mixture, has_prior)
    w, t, e = mixture.share, mixture.temperature, mixture.flatness
    for image in range(3):
        for c in range(4):
            prior = (1 - e) * float(COUNTS[c]) / 10 + e / 4
            given = (1 - w if has_prior else 1) * (math.log(prior) if prior else -1e4)
            expected = (w * float(own[image, c]) + (1 - w) * float(shared[image, c])) / t + given
            assert float(found[image, c]) == pytest.approx(expected, rel=1e-12)


def test_the_own_model_alone_is_what_the_client_has_without_a_federation() -> None:
    own, shared = log_posteriors(5, seed=1), log_posteriors(5, seed=2)
    assert torch.equal(mixed(own, shared, COUNTS, OWN, own_has_prior=True), own), "its class mix is in it already"
    balanced = mixed(own, shared, COUNTS, OWN).softmax(1)
    joint = own.exp() * COUNTS.double() / 10
    torch.testing.assert_close(balanced, joint / joint.sum(1, keepdim=True))
    assert (balanced[:, 1] == 0).all(), "a class that the client lacks"


def test_a_flat_class_mix_is_for_any_patient() -> None:
    own, shared = log_posteriors(5, seed=1), log_posteriors(5, seed=2)
    torch.testing.assert_close(mixed(own, shared, COUNTS, Mixture(0.0, 1.0, 1.0)).softmax(1), shared.exp())


# --- folds ------------------------------------------------------------------------------------------------


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("images", [1, 2, 4, 5, 6, 23])
def test_every_image_is_in_one_fold(images: int) -> None:
    folds = make_folds(images, None, rng())
    assert len(folds) == min(FOLDS, images)
    assert sorted(torch.cat(folds).tolist()) == list(range(images))
    sizes = [len(fold) for fold in folds]
    assert max(sizes) - min(sizes) <= 1


def test_no_images_make_no_folds() -> None:
    assert make_folds(0, None, rng()) == []
    assert make_folds(0, np.array([], dtype=str), rng()) == []


@pytest.mark.parametrize("people", [1, 3, 5, 9])
def test_all_images_of_a_patient_are_in_one_fold(people: int) -> None:
    patients = np.array([f"patient {number % people}" for number in range(27)])
    folds = make_folds(27, patients, rng())
    assert len(folds) == min(FOLDS, people)
    assert sorted(torch.cat(folds).tolist()) == list(range(27))
    seen = [set(patients[fold.numpy()]) for fold in folds]
    assert sum(len(group) for group in seen) == people, "nobody is in two"


def test_folds_are_drawn_and_drawn_again() -> None:
    first, again, other = (make_folds(40, None, rng(seed)) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


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


# --- the rule: what any must do ---------------------------------------------------------------------------

ALL = torch.tensor([25, 25, 25, 25])


def answers(labels: Tensor, right: float, seed: int) -> Tensor:
    """Log-probabilities of a model that is sure, and right on this share of the images."""
    wrong = torch.rand(len(labels), generator=torch.Generator().manual_seed(seed)) >= right
    said = torch.where(wrong, (labels + 1) % 4, labels)
    return torch.nn.functional.one_hot(said, 4).double().mul(3).log_softmax(1)


def decide(own_right: float, shared_right: float) -> Choice:
    labels = torch.arange(200) % 4
    folds = make_folds(200, None, rng())
    return choose(answers(labels, own_right, 1), answers(labels, shared_right, 2), labels, ALL, folds)


def test_a_clearly_better_shared_model_is_taken() -> None:
    choice = decide(own_right=0.5, shared_right=0.98)
    assert choice.accepted and choice.mixture.share < 1 and choice.images == 200
    assert choice.gain > 0 and choice.right_mixed > choice.right_own


def test_a_clearly_worse_shared_model_is_not() -> None:
    choice = decide(own_right=0.98, shared_right=0.3)
    assert not choice.accepted and choice.mixture == OWN


@pytest.mark.parametrize("images", [0, 1])
def test_without_validation_images_the_own_model_stays(images: int) -> None:
    labels, folds = torch.zeros(images, dtype=torch.long), make_folds(images, None, rng())
    choice = choose(log_posteriors(images), log_posteriors(images, seed=1), labels, ALL, folds)
    assert not choice.accepted and choice.mixture == OWN and choice.images == images
