from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from fedbicross.engine.student import Student
from steps.tiny import Tiny, noise, randomised


def network():
    return randomised(Tiny(), seed=3)


def loss_on(labels):
    return lambda logits: F.cross_entropy(logits, labels)


LABELS = torch.tensor([0, 1, 2, 3, 0, 1])


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 0.0), (0.9, 0.05)])
@pytest.mark.parametrize(
    ("tensor_rate", "fast", "kernel"),
    [(False, False, True), (True, False, True), (True, True, True), (True, True, False)],
)
def test_gradient_and_update_equal_torch_sgd(momentum, weight_decay, tensor_rate, fast, kernel, monkeypatch):
    if not kernel:  # a torch that has renamed what is private to it
        monkeypatch.setattr("fedbicross.engine.student._FUSED_SGD", None)
    student, plain = Student(network(), fast=fast), network().train()
    optimiser = torch.optim.SGD(plain.parameters(), lr=1.0, momentum=momentum, weight_decay=weight_decay)
    for step in range(5):
        x, lr = noise(6, 3, 5, 5, seed=step), 0.2 / (step + 1)
        loss, gradients = student.gradient(x, loss_on(LABELS))
        student.update(gradients, torch.tensor(lr) if tensor_rate else lr, momentum, weight_decay)
        for group in optimiser.param_groups:
            group["lr"] = lr
        expected = F.cross_entropy(plain(x), LABELS)
        optimiser.zero_grad()
        expected.backward()
        optimiser.step()
        assert not loss.requires_grad
        torch.testing.assert_close(loss, expected.detach())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(student.state()[name], value)
    assert int(student.state()["bn1.num_batches_tracked"]) == 5


def test_a_gradient_of_another_layout_moves_the_same_weights():
    """The kernel of the fast path reads weights and gradients side by side in memory."""
    ends = []
    for lay_out in (torch.Tensor.contiguous, lambda g: g.transpose(0, -1).contiguous().transpose(0, -1)):
        student = Student(network(), fast=True)
        _, gradients = student.gradient(noise(6, 3, 5, 5), loss_on(LABELS))
        student.update([lay_out(g) for g in gradients], torch.tensor(0.1), 0.9, 0.0)
        ends.append(student.state())
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name])


def test_the_gradient_alone_changes_no_weight():
    student = Student(network())
    before = {name: value.clone() for name, value in student.params.items()}
    student.gradient(noise(6, 3, 5, 5), loss_on(LABELS))
    assert all(torch.equal(student.params[name], value) for name, value in before.items())


def test_untracked_batches_leave_the_running_statistics_alone():
    student, x = Student(network()), noise(6, 3, 5, 5)
    before = {name: value.clone() for name, value in student.buffers.items()}
    untracked = student.gradient(x, loss_on(LABELS), track=False)
    assert all(torch.equal(student.buffers[name], value) for name, value in before.items())
    tracked = student.gradient(x, loss_on(LABELS))
    assert not any(torch.equal(student.buffers[name], value) for name, value in before.items())
    for left, right in zip(untracked[1], tracked[1], strict=True):
        assert torch.equal(left, right), "the same gradient, by the statistics of the batch, either way"


@pytest.mark.usefixtures("float64")
def test_eval_logits_are_those_of_the_finished_network():
    student, x = Student(network()), noise(6, 3, 5, 5)
    student.gradient(x, loss_on(LABELS))
    finished = Tiny().eval()
    finished.load_state_dict(student.state())
    torch.testing.assert_close(student.eval_logits(x), finished(x).detach())
    before = student.state()
    student.eval_logits(x + 1)
    assert all(torch.equal(before[name], value) for name, value in student.state().items())
    assert student.model.training, "training goes on afterwards"


def test_a_stopped_student_goes_on_to_the_same_bytes():
    def steps(student, numbers):
        for step in numbers:
            _, gradients = student.gradient(noise(6, 3, 5, 5, seed=step), loss_on(LABELS))
            student.update(gradients, 0.1, 0.9, 5e-4)

    straight, first, second = Student(network()), Student(network()), Student(randomised(Tiny(), seed=9))
    steps(straight, range(5))
    steps(first, range(3))
    kept = copy.deepcopy(first.tensors())
    steps(first, range(3, 4))  # what is kept is a snapshot
    second.load(kept)
    steps(second, range(3, 5))
    for name, value in straight.tensors().items():
        assert torch.equal(second.tensors()[name], value), name


def test_state_is_a_snapshot_in_the_networks_order():
    student = Student(network())
    state = student.state()
    assert list(state) == list(network().state_dict())
    _, gradients = student.gradient(noise(6, 3, 5, 5), loss_on(LABELS))
    student.update(gradients, 0.1, 0.9, 0.0)
    assert not torch.equal(state["head.weight"], student.state()["head.weight"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_finite(bad):
    student = Student(network())
    assert student.finite
    with torch.no_grad():
        student.params["head.bias"][0] = bad
    assert not student.finite
