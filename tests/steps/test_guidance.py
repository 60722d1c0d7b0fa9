"""FALCON Eqs. 10-13 against loops, and the choice of a mixture."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedbicross.steps.guidance import best_mixture, ensemble_distribution, guided_loss, teach

from .test_distill import slow_softmax

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("weights", [None, [0.5, 0.2, 0.3]])
def test_equation_10(weights: list[float] | None) -> None:
    logits = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    given = None if weights is None else torch.tensor(weights)
    found = ensemble_distribution(logits, 4.0, given)
    for b in range(4):
        soft = [slow_softmax(logits[n, b].tolist(), 4.0) for n in range(3)]
        shares = weights or [1 / 3] * 3
        expected = torch.tensor([sum(w * s[c] for w, s in zip(shares, soft, strict=True)) for c in range(5)])
        torch.testing.assert_close(found[b], expected)


def test_weights_by_class_are_ours() -> None:
    logits = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    weights = torch.tensor([[1.0, 0.25, 0.0], [0.0, 0.75, 1.0]])
    found = ensemble_distribution(logits, 4.0, weights)
    for b in range(4):
        soft = [slow_softmax(logits[n, b].tolist(), 4.0) for n in range(2)]
        raw = [sum(float(weights[n, c]) * soft[n][c] for n in range(2)) for c in range(3)]
        torch.testing.assert_close(found[b], torch.tensor([value / sum(raw) for value in raw]))


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_equations_11_to_13(alpha: float) -> None:
    rng = torch.Generator().manual_seed(1)
    logits, labels, temperature = torch.randn(4, 3, generator=rng), torch.tensor([0, 2, 1, 1]), 4.0
    teacher = torch.softmax(torch.randn(4, 3, generator=rng), 1)
    expected = 0.0
    for row in range(4):
        hard, soft = slow_softmax(logits[row].tolist(), 1.0), slow_softmax(logits[row].tolist(), temperature)
        divergence = sum(float(t) * math.log(float(t) / s) for t, s in zip(teacher[row], soft, strict=True))
        expected += (1 - alpha) * -math.log(hard[labels[row]]) + alpha * temperature**2 * divergence
    assert math.isclose(float(guided_loss(logits, labels, teacher, alpha, temperature)), expected / 4)


def test_teachers_answer_in_pieces_without_gradients() -> None:
    networks = [nn.Sequential(nn.Flatten(), nn.Linear(6, 3)) for _ in range(2)]
    tokens = torch.randn(5000, 2, 3, generator=torch.Generator().manual_seed(0))
    answers = teach(networks, tokens, 2.0, None)
    assert not answers.requires_grad
    expected = ensemble_distribution(torch.stack([n(tokens) for n in networks]), 2.0)
    torch.testing.assert_close(answers, expected.detach())


def test_the_mixture_that_is_most_often_right_is_found() -> None:
    labels = torch.tensor([0, 1, 0, 1])
    right = torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.9, 0.1], [0.1, 0.9]])
    wrong = 1 - right
    assert best_mixture(torch.stack([right, wrong, wrong]), labels)[0] >= 0.75
    assert best_mixture(torch.stack([wrong, wrong, right]), labels) == (0.0, 0.0, 1.0)
    assert best_mixture(torch.stack([right, right, right]), labels) == (0.0, 0.0, 1.0), "of equals, the global one"
    # The global head is unsure and wrong once: as much of it as does no harm, and the rest to the lower loss.
    unsure = torch.tensor([[0.6, 0.4], [0.4, 0.6], [0.6, 0.4], [0.6, 0.4]])
    surer = torch.tensor([[0.99, 0.01], [0.01, 0.99], [0.99, 0.01], [0.01, 0.99]])
    assert best_mixture(torch.stack([right, surer, unsure]), labels) == (0.0, 0.25, 0.75)
    assert best_mixture(torch.stack([surer, right, unsure]), labels) == (0.25, 0.0, 0.75)
    # Two experts, each right on its half and wrong on the other: the even mixture is right everywhere.
    first, second = surer.clone(), surer.clone()
    first[2:], second[:2] = torch.tensor([[0.3, 0.7], [0.7, 0.3]]), torch.tensor([[0.3, 0.7], [0.7, 0.3]])
    flat = torch.tensor([[0.5, 0.5]] * 4)
    shares = best_mixture(torch.stack([first, flat, second]), labels)
    mixed = shares[0] * first + shares[1] * flat + shares[2] * second
    assert (mixed.argmax(1) == labels).all()
