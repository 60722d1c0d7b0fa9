from __future__ import annotations

import torch

from fedbicross.steps.prior_shift import shift_prior


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
