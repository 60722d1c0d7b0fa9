from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedbicross import models as product_models
from fedbicross.engine.ensemble import Ensemble
from fedbicross.steps import inversion
from fedbicross.steps.inversion import Inversion, InversionSettings

from .tiny import Tiny, no_bn, noise, randomised, tiny_ensemble

SMALL = InversionSettings(steps=6, batch=8)
IMAGE = (3, 8, 8)


def slow_total_variation(x):
    sums = [0.0, 0.0, 0.0, 0.0]
    batch, channels, height, width = x.shape
    for b in range(batch):
        for c in range(channels):
            for i in range(height):
                for j in range(width):
                    for k, (di, dj) in enumerate([(0, 1), (1, 0), (1, 1), (1, -1)]):
                        if i + di < height and 0 <= j + dj < width:
                            sums[k] += float(x[b, c, i + di, j + dj] - x[b, c, i, j]) ** 2
    return sum(math.sqrt(s) for s in sums)


def test_total_variation_equals_loops():
    x = noise(2, 2, 4, 5)
    assert inversion.total_variation(x).item() == pytest.approx(slow_total_variation(x), abs=1e-10)
    assert inversion.total_variation(torch.full((2, 1, 3, 3), 0.7)).item() == 0


@given(st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 7), st.integers(1, 7))
@settings(max_examples=40)
def test_circular_shift_is_roll(dy, dx, height, width):
    x = noise(2, 1, height, width)
    assert torch.equal(inversion.circular_shift(x, torch.tensor([dy, dx])), torch.roll(x, (dy, dx), (2, 3)))


def test_cross_entropies():
    logits, labels = noise(3, 5, 4), torch.tensor([0, 1, 2, 3, 0])
    mean = sum(logits) / 3
    expected = sum(-F.log_softmax(mean[b], 0)[labels[b]] for b in range(5)) / 5
    assert torch.allclose(inversion.ensemble_cross_entropy(logits, labels, "mean_logits"), expected)
    expected = sum(-F.log_softmax(logits[i, b], 0)[labels[b]] for i in range(3) for b in range(5)) / 15
    assert torch.allclose(inversion.ensemble_cross_entropy(logits, labels, "mean_ce"), expected)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_inversion_loss_is_the_weighted_sum(reduction):
    models = [randomised(no_bn(), 5)]
    ensemble = Ensemble(models)
    both = tiny_ensemble(2)
    chosen = InversionSettings(bn_reduction=reduction, alpha_tv=0.3, alpha_bn=7.0)
    x, labels = noise(8, 3, 6, 6), inversion.balanced_labels(8, 4)
    loss = inversion.inversion_loss(both, x, labels, chosen)
    _, bn = both.logits_and_bn_loss(x)
    expected_bn = bn.mean() if reduction == "mean" else bn.sum()
    expected = F.cross_entropy(both.logits(x).mean(0), labels) + 0.3 * inversion.total_variation(x) + 7 * expected_bn
    torch.testing.assert_close(loss.total, expected)
    torch.testing.assert_close(loss.batch_norm, expected_bn)
    assert inversion.inversion_loss(ensemble, x, labels, chosen).batch_norm == 0


def test_bn_mean_is_over_clients_that_have_bn():
    losses = torch.tensor([2.0, 0.0, 4.0])
    assert inversion.reduce_bn_loss(losses, [True, False, True], "mean") == 3
    assert inversion.reduce_bn_loss(losses, [True, False, True], "sum") == 6
    assert inversion.reduce_bn_loss(torch.zeros(2), [False, False], "mean") == 0


def test_labels_are_balanced_and_cyclic():
    assert inversion.balanced_labels(7, 3).tolist() == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adam_equals_torch(dtype):
    x = noise(3, 4).to(dtype)
    reference = nn.Parameter(x.clone())
    optimiser = torch.optim.Adam([reference], lr=5e-2)
    first, second = torch.zeros_like(x), torch.zeros_like(x)
    for t in range(1, 30):
        gradient = noise(3, 4, seed=t).to(dtype)
        reference.grad = gradient.clone()
        optimiser.step()
        x, first, second = inversion.adam_step(x, gradient, first, second, torch.tensor(t), 5e-2)
        assert x.dtype == dtype
        # Thirty roundings of numbers below 4: each half of 2e-7 in float32, of 4e-16 in float64.
        torch.testing.assert_close(x, reference.detach(), rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5)


def start(seed=0, chosen=SMALL, ensemble=None):
    labels = inversion.balanced_labels(8, 4)
    generator = torch.Generator().manual_seed(seed)
    return Inversion.start(ensemble or tiny_ensemble(2), labels, (3, 6, 6), chosen, generator, torch.float64)


def test_steps_equal_a_plain_loop_with_torch_adam_and_roll():
    ensemble = tiny_ensemble(2)
    run = start(ensemble=ensemble)
    state = run.tensors()
    x = nn.Parameter(state["images"].clone())
    optimiser = torch.optim.Adam([x], lr=SMALL.lr)
    for t in range(SMALL.steps):
        dy, dx = state["offsets"][t].tolist()
        loss = inversion.inversion_loss(ensemble, torch.roll(x, (dy, dx), (2, 3)), state["labels"], SMALL)
        optimiser.zero_grad()
        loss.total.backward()
        optimiser.step()
        terms = run.step()
        torch.testing.assert_close(terms.total, loss.total.detach())
        assert not terms.total.requires_grad
    torch.testing.assert_close(run.images, x.detach(), rtol=0, atol=1e-10)
    assert run.t == SMALL.steps
    with pytest.raises(ValueError, match="done"):
        run.step()


def test_synthesis_lowers_the_loss():
    run = start(chosen=InversionSettings(steps=60, batch=8))
    losses = [run.step().total.item() for _ in range(60)]
    assert losses[-1] < 0.7 * losses[0]


def test_offsets_cover_the_reach_and_no_more():
    run = start(chosen=InversionSettings(steps=400, batch=8))
    assert sorted(run.tensors()["offsets"].unique().tolist()) == [-2, -1, 0, 1, 2]
    still = start(chosen=InversionSettings(steps=4, batch=8, jitter=0))
    assert still.tensors()["offsets"].abs().sum() == 0


def test_kept_images_do_not_change_with_later_steps():
    run = start()
    run.step()
    kept, copy = run.images, run.images.clone()
    run.step()
    assert torch.equal(kept, copy)


def test_a_stopped_run_continues_to_the_same_bytes():
    straight = start()
    for _ in range(SMALL.steps):
        straight.step()
    stopped = start()
    for _ in range(2):
        stopped.step()
    saved = {name: tensor.clone() for name, tensor in stopped.tensors().items()}
    resumed = Inversion(tiny_ensemble(2), SMALL, saved)
    assert resumed.t == 2
    for _ in range(SMALL.steps - 2):
        resumed.step()
    for name, tensor in straight.tensors().items():
        assert torch.equal(tensor, resumed.tensors()[name]), name


def test_a_run_needs_no_grad_mode_and_leaves_the_global_generator_alone():
    ensemble = tiny_ensemble(2)  # building layers does use the global generator
    before = torch.random.get_rng_state()
    with torch.no_grad():
        start(ensemble=ensemble).step()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_labels_must_fit_the_batch():
    with pytest.raises(ValueError, match="7 labels"):
        Inversion.start(
            tiny_ensemble(1), inversion.balanced_labels(7, 4), (3, 6, 6), SMALL, torch.Generator().manual_seed(0)
        )


def test_structure_tells_noise_from_smooth_images():
    white = noise(64, 3, 28, 28)
    assert abs(inversion.structure(white).item()) < 0.02
    grid = torch.linspace(0, 3, 28, dtype=torch.float64)
    smooth = torch.sin(grid[:, None] + noise(8, 3, 1, 1)) * torch.cos(grid[None, :])
    assert inversion.structure(smooth).item() > 0.8
    assert inversion.structure(torch.ones(2, 1, 5, 5)).item() == 0
    half = inversion.structure(white + 2 * F.avg_pool2d(white, 5, 1, 2) * 5)
    assert 0.2 < half.item() < 0.95


@pytest.mark.parametrize("ce", ["mean_logits", "mean_ce"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("at_once", [1, 2, 3, 4])
def test_groups_of_clients_give_the_loss_and_gradient_of_all(ce, reduction, at_once):
    """In float64, where only the order of the sums differs."""
    models = [randomised(Tiny(), seed) for seed in range(4)] + [randomised(no_bn(), 9)]
    ensemble, labels = Ensemble(models), torch.arange(6) % 3
    chosen = InversionSettings(batch=6, bn_reduction=reduction, ce=ce, alpha_tv=0.01)
    x = noise(6, *IMAGE)
    leaf = x.clone().requires_grad_(True)
    whole = inversion.inversion_loss(ensemble, leaf, labels, chosen)
    (gradient,) = torch.autograd.grad(whole.total, leaf)
    ensemble.at_once = at_once
    assert [len(group) for group in ensemble.groups()] == {1: [1] * 5, 2: [2, 2, 1], 3: [3, 2], 4: [4, 1]}[at_once]
    loss, found = inversion.inversion_gradient(ensemble, x, labels, chosen)
    for term, expected in zip(loss, whole, strict=True):
        torch.testing.assert_close(term, expected.detach(), rtol=1e-12, atol=1e-12)
        assert not term.requires_grad
    torch.testing.assert_close(found, gradient, rtol=1e-10, atol=1e-13)


def test_where_all_fit_grouping_changes_no_bit():
    ensemble, labels = tiny_ensemble(3), torch.arange(8) % 3
    made = []
    for at_once in (None, 3, 100):
        ensemble.at_once = at_once
        assert ensemble.groups() == [ensemble]
        run = Inversion.start(ensemble, labels, IMAGE, SMALL, torch.Generator().manual_seed(1), torch.float64)
        for _ in range(SMALL.steps):
            loss = run.step()
        made.append((run.images, loss.total))
    assert all(torch.equal(images, made[0][0]) and torch.equal(total, made[0][1]) for images, total in made)


def test_one_client_at_a_time_keeps_one_clients_activations():
    """What autograd holds at any moment, counted: with groups it no longer grows with the number of clients."""

    class Gauge:
        now = most = 0

        def pack(self, tensor):
            gauge, size = self, tensor.numel()

            class Held:
                def __init__(self):
                    self.tensor = tensor
                    gauge.now += size
                    gauge.most = max(gauge.most, gauge.now)

                def __del__(self):
                    gauge.now -= size

            return Held()

    def most(clients, at_once):
        ensemble, gauge = tiny_ensemble(clients), Gauge()
        ensemble.at_once = at_once
        with torch.autograd.graph.saved_tensors_hooks(gauge.pack, lambda held: held.tensor):
            inversion.inversion_gradient(ensemble, noise(8, *IMAGE), torch.arange(8) % 3, SMALL)
        return gauge.most

    assert most(12, 1) < 1.2 * most(1, None) < most(4, None) / 2
    assert most(12, None) > 5 * most(12, 2)


def test_how_many_clients_fit(monkeypatch):
    monkeypatch.setattr(inversion, "MEMORY_CPU", 10**9)
    shape = (3, 8, 28)
    each = 4 * inversion.KEPT * 256 * product_models.normalised_values("resnet18", *shape)
    assert inversion.clients_that_fit(["resnet18"], shape, 256, "cpu") == max(1, 10**9 // each) == 1
    assert inversion.clients_that_fit(["resnet8"], shape, 32, "cpu") > 20
    mixed = inversion.clients_that_fit(["resnet8", "resnet34"], shape, 32, "cpu")
    assert mixed == inversion.clients_that_fit(["resnet34"], shape, 32, "cpu"), "the largest counts"
    assert inversion.clients_that_fit(["cnn"], shape, 32, "cpu") > 10**6, "no batch normalisation: nothing to keep"


@pytest.mark.parametrize("name", ["resnet8", "vgg8", "wrn16_2"])
def test_the_estimate_of_what_autograd_keeps_holds(name):
    model = product_models.build(name, 3, 4, 16)
    product_models.initialise(model, torch.Generator().manual_seed(0))
    ensemble, held = Ensemble([model]), {}
    own = {tensor.data_ptr() for tensor in ensemble._clients[0].model.state_dict().values()}

    def pack(tensor):
        if tensor.data_ptr() not in own:
            held[tensor.untyped_storage().data_ptr()] = tensor  # kept alive, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
        inversion.inversion_loss(ensemble, x, torch.arange(4), InversionSettings(batch=4))
    numbers = sum(tensor.untyped_storage().nbytes() // 4 for tensor in held.values())
    share = numbers / (4 * product_models.normalised_values(name, 3, 4, 16))
    assert 2 < share <= inversion.KEPT
