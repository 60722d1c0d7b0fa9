from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fedbicross.engine.combine import soften
from fedbicross.steps import distill

from .tiny import noise


def slow_softmax(row, temperature):
    exponentials = [math.exp(value / temperature) for value in row]
    return [e / sum(exponentials) for e in exponentials]


def slow_kl(teacher_rows, student_rows, temperature):
    total = 0.0
    for teacher, student in zip(teacher_rows, student_rows, strict=True):
        q = slow_softmax(student, temperature)
        total += sum(p * (math.log(p) - math.log(q[c])) for c, p in enumerate(teacher) if p > 0)
    return temperature**2 * total / len(teacher_rows)


@pytest.mark.parametrize("temperature", [1.0, 20.0])
def test_kd_loss_equals_loops(temperature):
    student, teacher = noise(4, 3, seed=1) * 3, noise(4, 3, seed=2) * 3
    rows = [slow_softmax(row, temperature) for row in teacher.tolist()]
    expected = slow_kl(rows, student.tolist(), temperature)
    assert distill.kd_loss(student, teacher, temperature).item() == pytest.approx(expected, abs=1e-10)
    soft = soften(teacher, temperature)
    assert distill.soft_kd_loss(student, soft, temperature).item() == pytest.approx(expected, abs=1e-10)


def test_kd_loss_is_zero_at_the_teacher_and_accepts_hard_labels():
    teacher = noise(4, 3)
    assert distill.kd_loss(teacher, teacher, 20).item() == pytest.approx(0, abs=1e-10)
    hard = torch.eye(3, dtype=torch.float64)
    assert distill.soft_kd_loss(noise(3, 3), hard, 1).item() == pytest.approx(
        F.cross_entropy(noise(3, 3), torch.arange(3)).item()
    )


def test_tau_squared_keeps_the_gradient_at_the_size_of_a_logit_regression():
    student = noise(4, 3, seed=3).requires_grad_(True)
    teacher = noise(4, 3, seed=4)
    (gradient,) = torch.autograd.grad(distill.kd_loss(student, teacher, 1e4), student)
    centred = (student - teacher) - (student - teacher).mean(1, keepdim=True)
    torch.testing.assert_close(gradient, (centred / 3 / 4).detach(), rtol=1e-3, atol=1e-4)


def test_noise_level_end_points():
    assert distill.noise_level(500, 500) == 0
    assert distill.noise_level(0, 500) == 1
    assert distill.noise_level(1, 500, "released") == 1
    assert distill.noise_level(500, 500, "released") == pytest.approx(1 / 500)


def test_mixed_loss_end_points_and_middle():
    student, original, adapted = noise(4, 3, seed=1), noise(4, 3, seed=2), noise(4, 3, seed=3)
    soft_original, soft_adapted = soften(original, 20), soften(adapted, 20)
    from_original, from_adapted = distill.kd_loss(student, original, 20), distill.kd_loss(student, adapted, 20)
    for lam in (0.0, 0.25, 1.0):
        mixed = distill.mixed_kd_loss(student, soft_original, soft_adapted, lam, 20)
        torch.testing.assert_close(mixed, lam * from_adapted + (1 - lam) * from_original)


def test_personal_loss_is_equation_9():
    mine, cluster, client = noise(4, 3, seed=1), noise(4, 3, seed=2), noise(4, 3, seed=3)
    labels = torch.tensor([0, 2, 1, 0])
    loss = distill.personal_loss(mine, labels, cluster, client, temperature=2.0)
    log_probs = [[math.log(p) for p in slow_softmax(row, 1.0)] for row in mine.tolist()]
    cross_entropy = -sum(log_probs[b][labels[b]] for b in range(4)) / 4
    from_cluster = slow_kl([slow_softmax(r, 2.0) for r in cluster.tolist()], mine.tolist(), 2.0)
    from_client = slow_kl([slow_softmax(r, 2.0) for r in client.tolist()], mine.tolist(), 2.0)
    assert loss.total.item() == pytest.approx(cross_entropy + 0.5 * from_cluster + 0.3 * from_client)
    assert loss.from_cluster.item() == pytest.approx(from_cluster)
    assert loss.from_client.item() == pytest.approx(from_client)
