from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from fedbicross.steps import bilevel, distill

from .tiny import noise


def forward(theta, x):
    return torch.tanh(x @ theta[0] + theta[1]) @ theta[2]


def problem(sources=3):
    theta = [noise(4, 5, seed=1), noise(5, seed=2), noise(5, 3, seed=3)]
    inputs = [noise(6, 4, seed=10 + j) for j in range(sources)]
    teachers = [noise(6, 3, seed=20 + j) for j in range(sources)]
    validation = (noise(7, 4, seed=30), noise(7, 3, seed=31))
    return theta, inputs, teachers, validation


def sgd_step(params, grads, buffers, lr, momentum, weight_decay):
    moved = [momentum * b + g + weight_decay * p for p, g, b in zip(params, grads, buffers, strict=True)]
    return [p - lr * b for p, b in zip(params, moved, strict=True)]


def inner_step(w, theta, buffers, inputs, teachers, lr, momentum, weight_decay, graph):
    """Eq. 7 the direct way: the weighted loss is differentiated as one."""
    leaves = [p.detach().requires_grad_(True) for p in theta]
    loss = sum(w[j] * distill.kd_loss(forward(leaves, inputs[j]), teachers[j], 4.0) for j in range(len(inputs)))
    grads = torch.autograd.grad(loss, leaves, create_graph=graph)
    return sgd_step(leaves, grads, buffers, lr, momentum, weight_decay)


def source_gradients(theta, inputs, teachers):
    leaves = [p.detach().requires_grad_(True) for p in theta]
    rows = [
        torch.autograd.grad(distill.kd_loss(forward(leaves, x), t, 4.0), leaves)
        for x, t in zip(inputs, teachers, strict=True)
    ]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


SETTINGS = [(0.0, 0.0), (0.9, 0.0), (0.0, 0.01), (0.9, 0.01)]


@pytest.mark.parametrize(("momentum", "weight_decay"), SETTINGS)
def test_hypergradient_equals_double_backward_and_finite_differences(momentum, weight_decay):
    theta, inputs, teachers, (x_val, t_val) = problem()
    buffers = [noise(*p.shape, seed=40 + i) * 0.1 for i, p in enumerate(theta)]
    lr, w = 0.3, torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)

    def validation_loss(weights, graph):
        updated = inner_step(weights, theta, buffers, inputs, teachers, lr, momentum, weight_decay, graph)
        return distill.kd_loss(forward(updated, x_val), t_val, 4.0)

    leaf = w.clone().requires_grad_(True)
    (second_order,) = torch.autograd.grad(validation_loss(leaf, True), leaf)

    gradients = source_gradients(theta, inputs, teachers)
    combined = bilevel.weighted_gradient(w, gradients)
    updated = sgd_step(theta, combined, buffers, lr, momentum, weight_decay)
    leaves = [p.requires_grad_(True) for p in updated]
    at_updated = torch.autograd.grad(distill.kd_loss(forward(leaves, x_val), t_val, 4.0), leaves)
    exact = bilevel.hypergradient(at_updated, gradients, lr)

    torch.testing.assert_close(exact, second_order, rtol=0, atol=1e-8)
    for j in range(3):
        nudge = torch.zeros(3, dtype=torch.float64)
        nudge[j] = 1e-5
        difference = (validation_loss(w + nudge, False) - validation_loss(w - nudge, False)) / 2e-5
        assert exact[j].item() == pytest.approx(difference.item(), abs=1e-6)


def test_hypergradient_of_all_students_at_once():
    validation = [noise(4, 3, 2, seed=1), noise(4, 5, seed=2)]
    sources = [noise(4, 6, 3, 2, seed=3), noise(4, 6, 5, seed=4)]
    together = torch.vmap(bilevel.hypergradient, in_dims=(0, 0, None))(validation, sources, 0.1)
    assert together.shape == (4, 6)
    for k in range(4):
        alone = bilevel.hypergradient([v[k] for v in validation], [s[k] for s in sources], 0.1)
        torch.testing.assert_close(together[k], alone)


def test_hypergradient_of_half_precision_gradients_is_float32():
    validation, sources = [noise(4).bfloat16()], [noise(2, 4, seed=1).bfloat16()]
    assert bilevel.hypergradient(validation, sources, 0.1).dtype == torch.float32


def brute_force_projection(v):
    """Try every support: the KKT point of a fixed support is v minus one constant."""
    best, best_distance = None, np.inf
    for size in range(1, len(v) + 1):
        for support in map(list, itertools.combinations(range(len(v)), size)):
            candidate = np.zeros(len(v))
            candidate[support] = v[support] - (v[support].sum() - 1) / size
            distance = ((candidate - v) ** 2).sum()
            if (candidate >= -1e-12).all() and distance < best_distance:
                best, best_distance = candidate, distance
    return best


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6))
@settings(max_examples=80)
def test_projection_equals_brute_force(values):
    v = torch.tensor(values, dtype=torch.float64)
    projected = bilevel.project_to_simplex(v)
    assert projected.min() >= 0 and projected.sum().item() == pytest.approx(1)
    np.testing.assert_allclose(projected.numpy(), brute_force_projection(v.numpy()), atol=1e-9)


def test_projection_equals_a_quadratic_programme():
    v = noise(5, seed=7).numpy()
    found = minimize(
        lambda p: ((p - v) ** 2).sum(),
        np.full(5, 0.2),
        bounds=[(0, None)] * 5,
        constraints={"type": "eq", "fun": lambda p: p.sum() - 1},
        tol=1e-12,
    )
    np.testing.assert_allclose(bilevel.project_to_simplex(torch.from_numpy(v)).numpy(), found.x, atol=1e-6)


def test_projection_is_batched_and_leaves_the_simplex_alone():
    rows = noise(2, 3, 4)
    together = bilevel.project_to_simplex(rows)
    for i, j in itertools.product(range(2), range(3)):
        torch.testing.assert_close(together[i, j], bilevel.project_to_simplex(rows[i, j]))
    inside = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    torch.testing.assert_close(bilevel.project_to_simplex(inside), inside)
    assert bilevel.project_to_simplex(torch.tensor([1e6, 0.0])).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("kind", ["projected", "mirror"])
def test_weight_steps_stay_on_the_simplex_and_go_downhill(kind):
    w = torch.tensor([[0.2, 0.3, 0.5], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64)
    gradient = torch.tensor([[1.0, -1.0, 0.0], [0.0, 0.0, 2.0]], dtype=torch.float64)
    stepped = bilevel.weight_step(w, gradient, 0.1, kind)
    torch.testing.assert_close(stepped.sum(1), torch.ones(2, dtype=torch.float64))
    assert (stepped >= 0).all()
    assert ((stepped - w) * gradient).sum(1).max() < 0
    torch.testing.assert_close(bilevel.weight_step(w, torch.zeros_like(w), 0.1, kind), w)


def test_mirror_step_equals_its_formula_and_keeps_zeros():
    w, gradient = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([1.0, 0.0, -9.0])
    raw = w * torch.exp(-0.3 * gradient)
    torch.testing.assert_close(bilevel.weight_step(w, gradient, 0.3, "mirror"), raw / raw.sum())


def test_fixed_weights():
    assert torch.equal(bilevel.cross_cluster_weights("uniform", 4), torch.full((4, 4), 0.25))
    assert torch.equal(bilevel.cross_cluster_weights("intra", 3), torch.eye(3))
    centroids = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]], dtype=torch.float64)
    rows = bilevel.cross_cluster_weights("similarity", 3, centroids)
    distances = [[0, 5, 1], [5, 0, 18**0.5], [1, 18**0.5, 0]]
    mean = (5 + 1 + 18**0.5) / 3
    for k in range(3):
        raw = [np.exp(-d / mean) for d in distances[k]]
        assert rows[k].tolist() == pytest.approx([value / sum(raw) for value in raw])
    assert bilevel.cross_cluster_weights("similarity", 1, centroids[:1]).tolist() == [[1.0]]
    same = bilevel.cross_cluster_weights("similarity", 2, torch.ones(2, 7))
    assert same.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    with pytest.raises(ValueError, match="one centroid"):
        bilevel.cross_cluster_weights("similarity", 3, centroids[:2])
