"""Every loss of DAFL, DENSE and Co-Boosting against loops over single images, and every gradient against autograd."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedbicross.engine.student import Student
from fedbicross.steps import adversarial as adv

from .tiny import Tiny, noise, randomised, tiny_ensemble

LOGITS = noise(6, 4) * 3
OTHER = noise(6, 4, seed=1) * 3
CLIENTS = noise(3, 6, 4, seed=2) * 3
LABELS = torch.tensor([0, 1, 2, 3, 0, 1])


def softmax(row: Tensor) -> list[float]:
    top = [math.exp(v - float(row.max())) for v in row.tolist()]
    return [v / sum(top) for v in top]


def kl(teacher: Tensor, student: Tensor, temperature: float) -> float:
    p, q = softmax(teacher / temperature), softmax(student / temperature)
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


# --- DAFL ------------------------------------------------------------------------------------------------


def test_one_hot_loss():
    expected = sum(-math.log(max(softmax(row))) for row in LOGITS) / 6
    assert float(adv.one_hot_loss(LOGITS)) == pytest.approx(expected)
    assert float(adv.one_hot_loss(LOGITS * 100)) < float(adv.one_hot_loss(LOGITS)), "sure is better"


def test_information_entropy():
    mean = [sum(softmax(row)[c] for row in LOGITS) / 6 for c in range(4)]
    released = sum(p * math.log10(p) for p in mean)
    written = sum(p * math.log(p) for p in mean) / 4
    assert float(adv.information_entropy_loss(LOGITS)) == pytest.approx(released)
    assert float(adv.information_entropy_loss(LOGITS, "written")) == pytest.approx(written)
    balanced, one_class = torch.eye(4) * 50, torch.eye(4)[[0, 0, 0, 0]] * 50
    assert float(adv.information_entropy_loss(balanced)) == pytest.approx(-math.log10(4), abs=1e-4)
    assert float(adv.information_entropy_loss(one_class)) == pytest.approx(0, abs=1e-6)


def test_a_class_that_is_never_made_gives_no_nan():
    logits = torch.zeros(5, 3)
    logits[:, 0] = 1e4
    logits.requires_grad_(True)
    adv.information_entropy_loss(logits).backward()
    assert torch.isfinite(logits.grad).all()


def test_activation_is_the_mean_of_the_clients_own_terms():
    features = [noise(6, 5), noise(6, 8, seed=1)]
    per_client = [[[abs(v) for v in row] for row in feature.tolist()] for feature in features]
    norm = [sum(map(sum, client)) / 6 for client in per_client]
    assert float(adv.activation_loss(features, "written")) == pytest.approx(-(norm[0] + norm[1]) / 2)
    assert float(adv.activation_loss(features)) == pytest.approx(-(norm[0] / 5 + norm[1] / 8) / 2)


# --- DENSE and Co-Boosting -------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("boundary", [False, True])
def test_adversarial_term(temperature, boundary):
    total = 0.0
    for teacher, student in zip(LOGITS, OTHER, strict=True):
        agree = int(teacher.argmax()) == int(student.argmax())
        total += 0 if boundary and agree else kl(teacher, student, temperature)
    found = adv.adversarial_loss(LOGITS, OTHER, temperature, boundary)
    assert float(found) == pytest.approx(-total / 6 * temperature**2)
    disagree = (LOGITS.argmax(1) != OTHER.argmax(1)).sum()
    assert 0 < disagree < 6, "the mask must matter here"


def test_nothing_to_find_where_student_and_teacher_agree():
    x = LOGITS.clone().requires_grad_(True)
    loss = adv.adversarial_loss(x, x.detach() * 0.5, boundary=True)
    loss.backward()
    assert float(loss.detach()) == 0 and (x.grad == 0).all()


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
def test_hard_images_count_more(exponent):
    probabilities = [softmax(row)[int(y)] for row, y in zip(LOGITS, LABELS, strict=True)]
    expected = sum((1 - p) ** exponent * -math.log(p) for p in probabilities) / 6
    assert float(adv.hard_cross_entropy(LOGITS, LABELS, exponent)) == pytest.approx(expected)


def test_hardness_is_not_followed():
    x = LOGITS.clone().requires_grad_(True)
    adv.hard_cross_entropy(x, LABELS).backward()
    probabilities = LOGITS.softmax(1)
    weight = (1 - probabilities[torch.arange(6), LABELS]).unsqueeze(1)
    expected = weight * (probabilities - torch.nn.functional.one_hot(LABELS, 4)) / 6
    torch.testing.assert_close(x.grad, expected)


def test_an_image_that_is_certain_counts_nothing():
    sure = torch.tensor([[1e4, 0.0], [0.0, 1e4]])
    assert float(adv.hard_cross_entropy(sure, torch.tensor([0, 1]))) == 0
    assert float(adv.hard_cross_entropy(sure, torch.tensor([1, 0]))) == pytest.approx(1e4)


def test_weighted_ensemble():
    weights = torch.tensor([0.5, 0.2, 0.1], dtype=torch.float64)
    expected = sum(w * z for w, z in zip(weights, CLIENTS, strict=True)) / 0.8
    torch.testing.assert_close(adv.weighted_logits(CLIENTS, weights), expected)
    torch.testing.assert_close(adv.weighted_logits(CLIENTS, torch.full((3,), 1 / 3).double()), CLIENTS.mean(0))


@pytest.mark.parametrize("weights", [[0.3, 0.3, 0.3], [0.9, 0.05, 0.4], [1.0, 0.0, 0.0]])
def test_closed_form_gradient_is_that_of_autograd(weights):
    w = torch.tensor(weights, dtype=torch.float64, requires_grad=True)
    combined = sum(w[k] * CLIENTS[k] for k in range(3)) / w.sum()
    torch.nn.functional.cross_entropy(combined, LABELS).backward()
    found = adv.weight_gradient(CLIENTS, LABELS, w.detach())
    torch.testing.assert_close(found, w.grad, rtol=1e-12, atol=1e-14)
    assert float((found * w.detach()).sum()) == pytest.approx(0, abs=1e-14), "scaling all weights changes nothing"


def test_weight_steps():
    w, g = torch.tensor([0.2, 0.2, 0.98, 0.5]), torch.tensor([3.0, -1.0, -0.5, 0.0])
    torch.testing.assert_close(adv.updated_weights(w, g, 0.05), torch.tensor([0.15, 0.25, 1.0, 0.5]))
    torch.testing.assert_close(adv.updated_weights(w, g, 0.05, "gradient"), torch.tensor([0.05, 0.25, 1.0, 0.5]))
    torch.testing.assert_close(adv.updated_weights(w, g, 1.0), torch.tensor([0.0, 1.0, 1.0, 0.5]))
    assert torch.equal(adv.updated_weights(w, g, 0.05, "none"), w)


def test_weights_never_all_vanish():
    w, g = torch.tensor([0.1, 0.2]), torch.tensor([1.0, 1.0])
    assert torch.equal(adv.updated_weights(w, g, 0.5), w)


def test_reweighting_finds_the_client_that_is_right():
    right = torch.nn.functional.one_hot(LABELS, 4).double() * 5
    logits = torch.stack([right, right.roll(1, 1), torch.zeros(6, 4).double()])
    w = torch.full((3,), 1 / 3, dtype=torch.float64)
    for _ in range(100):
        w = adv.updated_weights(w, adv.weight_gradient(logits, LABELS, w), 0.1 / 3)
    assert int(w.argmax()) == 0 and float(w[1]) == 0


def test_diversified_images_follow_the_gradient_of_the_direction():
    ensemble, x = tiny_ensemble(2), noise(5, 3, 6, 6, seed=4)
    u = noise(5, 4, seed=5)
    leaf = x.clone().requires_grad_(True)
    total = sum((u[b] * (ensemble.logits(leaf).mean(0)[b] / 4).softmax(0)).sum() for b in range(5))
    total.backward()
    found = adv.diversified(x, lambda x: ensemble.logits(x).mean(0), u, 0.25, 4.0)
    torch.testing.assert_close(found, x + 0.25 * leaf.grad.sign())
    assert not found.requires_grad
    assert torch.equal(adv.diversified(x, lambda x: ensemble.logits(x).mean(0), u, 0.0, 4.0), x)
    with torch.no_grad():
        again = adv.diversified(x, lambda x: ensemble.logits(x).mean(0), u, 0.25, 4.0)
    assert torch.equal(again, found), "also where gradients are off"


# --- what the generator sees of its student; variety -----------------------------------------------------


def test_a_frozen_student_passes_gradients_to_images_only():
    student = Student(randomised(Tiny(), 0).float())
    x = noise(5, 3, 6, 6).float().requires_grad_(True)
    before = {name: value.detach().clone() for name, value in {**student.params, **student.buffers}.items()}
    logits = student.frozen_logits(x)
    torch.testing.assert_close(logits, student.model.eval()(x))
    student.model.train()
    logits.square().sum().backward()
    assert x.grad.abs().sum() > 0 and all(p.grad is None for p in student.params.values())
    assert all(torch.equal(value, before[name]) for name, value in {**student.params, **student.buffers}.items())
    assert student.model.training


def test_variety_is_the_spread_of_pixels_within_a_class():
    images = noise(7, 2, 3, 3)
    labels = torch.tensor([0, 0, 0, 1, 1, 3, 2])
    images[3] = images[4]
    found = adv.variety(images, labels, 5)
    assert float(found[0]) == pytest.approx(float(images[:3].std(0, unbiased=False).mean()), rel=1e-6)
    assert float(found[1]) == pytest.approx(0, abs=1e-6)
    assert all(math.isnan(float(value)) for value in found[2:]), "one image has no spread"
