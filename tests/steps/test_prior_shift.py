from __future__ import annotations

import math

import pytest
import torch

from fedbicross.steps.prior_shift import SHARPEST, fit_temperature, shift_prior

from .tiny import noise


def test_posterior_under_the_new_prior_by_bayes_rule() -> None:
    likelihood = torch.tensor([0.2, 0.5, 0.1], dtype=torch.float64)  # p(x|c)
    before, after = torch.tensor([10, 30, 60]), torch.tensor([49, 0, 49])
    logits = (likelihood * before / before.sum()).log()
    moved = torch.softmax(shift_prior(logits, before, after), 0)
    prior = torch.tensor([50, 1, 50]) / 101  # one image is added to every class
    expected = likelihood * prior / (likelihood * prior).sum()
    assert torch.allclose(moved, expected, atol=1e-12)


def test_the_same_class_mix_changes_no_answer() -> None:
    bias = torch.tensor([0.3, -1.0])
    moved = shift_prior(bias, torch.tensor([2, 4]), torch.tensor([1, 3]), smoothing=1.0)
    assert torch.allclose(torch.softmax(moved, 0), torch.softmax(bias, 0))
    assert moved.dtype == bias.dtype


def test_a_class_the_head_never_saw_keeps_its_bias() -> None:
    moved = shift_prior(torch.tensor([0.0, -1e9]), torch.tensor([5, 0]), torch.tensor([5, 5]))
    assert float(moved[1]) == -1e9
    assert bool(torch.isfinite(moved).all())


# --- how sure a model may be ------------------------------------------------------------------------------


def slow_surprise(rows: list[list[float]], labels: list[int], prior: list[float], tau: float) -> float:
    """-log of p(y|x)^(1/tau) pi(y), renormalised, image by image."""
    total = 0.0
    for row, label in zip(rows, labels, strict=True):
        scores = [p ** (1 / tau) * pi for p, pi in zip(row, prior, strict=True)]
        total -= math.log(scores[label] / sum(scores))
    return total


@pytest.mark.parametrize("prior", [[0.25, 0.25, 0.25, 0.25], [0.6, 0.2, 0.1, 0.1]])
def test_no_temperature_on_a_fine_grid_is_less_surprised(prior: list[float]) -> None:
    rows = (2 * noise(40, 4, seed=3).double()).log_softmax(1)
    labels = (rows + torch.tensor(prior).log() + noise(40, 4, seed=4)).argmax(1)  # right more often than not
    tau = fit_temperature(rows, labels, torch.tensor(prior).log())
    assert 1 / SHARPEST + 0.05 < tau < SHARPEST - 0.05, "inside the bounds, so that there is something to find"
    values = {t: slow_surprise(rows.exp().tolist(), labels.tolist(), prior, t) for t in torch.linspace(0.5, 2, 301)}
    best = min(values, key=lambda t: values[t])
    assert abs(tau - float(best)) < 0.01
    assert slow_surprise(rows.exp().tolist(), labels.tolist(), prior, tau) <= min(values.values()) + 1e-9


def test_a_model_that_is_never_wrong_stays_within_bounds() -> None:
    rows = torch.tensor([[0.6, 0.4], [0.4, 0.6]]).log()
    flat = torch.zeros(2)
    assert fit_temperature(rows, torch.tensor([0, 1]), flat) == pytest.approx(1 / SHARPEST, rel=1e-3)
    assert fit_temperature(rows, torch.tensor([1, 0]), flat) == pytest.approx(SHARPEST, rel=1e-3)
