from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fedbicross.engine.ensemble import Ensemble, statistics_from_tensors, statistics_to_tensors
from fedbicross.errors import MethodError
from small import refuses


class Net(nn.Module):
    def __init__(self, width: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(2, width, 3, padding=1), nn.BatchNorm2d(width)
        self.block = nn.Sequential(nn.Conv2d(width, width, 3), nn.BatchNorm2d(width, affine=False), nn.ReLU())
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(torch.relu(self.bn1(self.conv1(x))))
        return self.head(self.drop(x.mean((2, 3))))


class Plain(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 3, 3), nn.Linear(3, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))


def randomised(model: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = model.double()
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            value = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            tensor.copy_(value.abs() + 0.5 if name.endswith("running_var") else value)
    return model


@pytest.fixture
def models() -> list[nn.Module]:
    return [randomised(Net(4), 0), randomised(Plain(), 1), randomised(Net(6), 2)]


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 2, 7, 6, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


BN_DISTANCES = ("absolute", "relative")


def _bn_layers(model):
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


def hooked_bn_losses(model: nn.Module, x: Tensor) -> Tensor:
    """The BN term the slow way: forward hooks, and per-channel Python loops for mean and variance."""
    total = []

    def hook(layer: nn.BatchNorm2d, inputs: tuple[Tensor], output: Tensor) -> None:
        (features,) = inputs
        means = torch.stack([features[:, c].mean() for c in range(features.shape[1])])
        variances = torch.stack([((features[:, c] - means[c]) ** 2).mean() for c in range(features.shape[1])])
        total.append(
            ((means - layer.running_mean) ** 2).sum().sqrt() + ((variances - layer.running_var) ** 2).sum().sqrt()
        )

    handles = [m.register_forward_hook(hook) for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    model.eval()(x)
    for handle in handles:
        handle.remove()
    return torch.stack(total).sum() if total else torch.zeros((), dtype=x.dtype)


def test_logits_are_those_of_the_models_in_eval_mode(models, x):
    expected = torch.stack([copy.deepcopy(m).eval()(x) for m in models])
    torch.testing.assert_close(Ensemble(models).logits(x), expected, rtol=0, atol=1e-12)


def test_shape_length_and_bn_flags(models, x):
    ensemble = Ensemble(models)
    assert len(ensemble) == 3
    assert ensemble.has_batchnorm == [True, False, True]
    assert ensemble.logits(x).shape == (3, 5, 3)


def test_callers_models_are_left_alone(models, x):
    models[0].train()
    before = copy.deepcopy(models[0].state_dict())
    ensemble = Ensemble(models)
    ensemble.batch_logits(x)
    ensemble.update_statistics(ensemble.initial_statistics(), x, 0.5)
    assert models[0].training and all(p.requires_grad for p in models[0].parameters())
    assert isinstance(models[0].bn1, nn.BatchNorm2d)
    for name, tensor in models[0].state_dict().items():
        assert torch.equal(tensor, before[name])


def test_teachers_are_frozen(models, x):
    leaf = x.clone().requires_grad_(True)
    logits, bn = Ensemble(models).logits_and_bn_loss(leaf)
    (logits.sum() + bn.sum()).backward()
    assert leaf.grad is not None and leaf.grad.abs().sum() > 0
    assert all(p.grad is None for m in models for p in m.parameters())
    assert not Ensemble(models).logits(x).requires_grad


def test_bn_loss_and_its_gradient_equal_the_hooked_version(models, x):
    leaf, slow_leaf = x.clone().requires_grad_(True), x.clone().requires_grad_(True)
    logits, bn = Ensemble(models).logits_and_bn_loss(leaf)
    slow = torch.stack([hooked_bn_losses(m, slow_leaf) for m in models])
    torch.testing.assert_close(bn, slow, rtol=0, atol=1e-10)
    assert bn[1] == 0
    torch.testing.assert_close(logits, Ensemble(models).logits(x))
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    (fast_gradient,) = torch.autograd.grad((weights * bn).sum(), leaf)
    (slow_gradient,) = torch.autograd.grad((weights * slow).sum(), slow_leaf)
    torch.testing.assert_close(fast_gradient, slow_gradient, rtol=0, atol=1e-10)


@pytest.mark.parametrize("fast", [False, True])
def test_relative_bn_loss_and_its_gradient_equal_the_written_out_version(models, x, fast):
    other = x.clone().requires_grad_(True)
    seen = []
    handles = [m.register_forward_hook(lambda m, given, _: seen.append((m, given[0]))) for m in _bn_layers(models[0])]
    models[0].eval()(other)
    slow = torch.zeros((), dtype=x.dtype)
    for layer, features in seen:
        mean = features.mean((0, 2, 3))
        variance = features.var((0, 2, 3), correction=0)
        slow = slow + (mean - layer.running_mean).norm() / layer.running_var.sum().sqrt()
        slow = slow + (variance - layer.running_var).norm() / layer.running_var.norm()
    for handle in handles:
        handle.remove()
    leaf = x.clone().requires_grad_(True)
    _, bn = Ensemble([models[0]], fast=fast, bn_distance="relative").logits_and_bn_loss(leaf)
    torch.testing.assert_close(bn[0], slow, rtol=0, atol=1e-10)
    gradients = [torch.autograd.grad(loss, given)[0] for loss, given in ((bn.sum(), leaf), (slow, other))]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-9)


def test_relative_bn_loss_does_not_hang_on_the_scale_of_a_layer(models, x):
    """Weights s times as large before a batch norm, and its statistics to match, compute the same function."""
    scaled = copy.deepcopy(models[0])
    with torch.no_grad():
        for parameter in scaled.conv1.parameters():
            parameter.mul_(3)
        scaled.bn1.running_mean.mul_(3)
        scaled.bn1.running_var.mul_(9)
    terms = {kind: Ensemble([models[0], scaled], bn_distance=kind).logits_and_bn_loss(x)[1] for kind in BN_DISTANCES}
    assert terms["absolute"][1] > 1.5 * terms["absolute"][0]
    assert terms["relative"][1] == pytest.approx(terms["relative"][0].item(), rel=1e-3)  # eps beside the variance


def test_bn_loss_is_zero_with_a_finite_gradient_where_statistics_match(x):
    model = nn.Sequential(nn.BatchNorm2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    with torch.no_grad():
        model[0].running_mean.copy_(x.mean((0, 2, 3)))
        model[0].running_var.copy_(x.var((0, 2, 3), correction=0))
    leaf = x.clone().requires_grad_(True)
    _, bn = Ensemble([model]).logits_and_bn_loss(leaf)
    (gradient,) = torch.autograd.grad(bn.sum(), leaf)
    assert bn.item() < 1e-12 and gradient.isfinite().all()


def test_batch_logits_equal_train_mode_without_dropout(models, x):
    expected = []
    for model in models:
        twin = copy.deepcopy(model).train()
        for module in twin.modules():
            if isinstance(module, nn.Dropout):
                module.eval()
        expected.append(twin(x))
    ensemble = Ensemble(models)
    before = ensemble.logits(x)
    torch.testing.assert_close(ensemble.batch_logits(x), torch.stack(expected), rtol=0, atol=1e-10)
    assert torch.equal(ensemble.logits(x), before)


def test_initial_statistics_give_the_original_teacher(models, x):
    ensemble = Ensemble(models)
    torch.testing.assert_close(ensemble.adapted_logits(x, ensemble.initial_statistics()), ensemble.logits(x))


def test_updated_statistics_follow_train_mode(models, x):
    """torch's own running mean in train mode is the same average; its variance, made biased, too."""
    ensemble = Ensemble(models)
    updated = ensemble.update_statistics(ensemble.initial_statistics(), x, 0.9)
    twin = copy.deepcopy(models[0]).train()
    old_var = {n: m.running_var.clone() for n, m in twin.named_modules() if isinstance(m, nn.BatchNorm2d)}
    sizes: dict[str, int] = {}
    for name, module in twin.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1
            module.register_forward_hook(lambda m, i, o, name=name: sizes.update({name: i[0].numel() // i[0].shape[1]}))
    twin(x)
    assert list(updated[0]) == ["bn1", "block.1"] and updated[1] == {}
    for name, (mean, var) in updated[0].items():
        module = twin.get_submodule(name)
        torch.testing.assert_close(mean, module.running_mean, rtol=0, atol=1e-12)
        unbiased = (module.running_var - 0.9 * old_var[name]) / 0.1
        biased = unbiased * (sizes[name] - 1) / sizes[name]
        torch.testing.assert_close(var, 0.9 * old_var[name] + 0.1 * biased, rtol=0, atol=1e-10)


def test_momentum_zero_on_the_same_batch_is_the_batch_teacher(models, x):
    ensemble = Ensemble(models)
    statistics = ensemble.update_statistics(ensemble.initial_statistics(), x, 0.0)
    torch.testing.assert_close(ensemble.adapted_logits(x, statistics), ensemble.batch_logits(x), rtol=0, atol=1e-10)


def test_updating_is_pure(models, x):
    ensemble = Ensemble(models)
    first = ensemble.initial_statistics()
    ensemble.update_statistics(first, x, 0.9)
    for old, again in zip(first, ensemble.initial_statistics(), strict=True):
        assert all(torch.equal(old[n][0], again[n][0]) and torch.equal(old[n][1], again[n][1]) for n in old)


def test_statistics_survive_a_checkpoint(models, x):
    ensemble = Ensemble(models)
    statistics = ensemble.update_statistics(ensemble.initial_statistics(), x, 0.9)
    back = statistics_from_tensors(statistics_to_tensors(statistics))
    assert len(back) == 3 and back[1] == {}
    assert torch.equal(ensemble.adapted_logits(x, back), ensemble.adapted_logits(x, statistics))


def test_subset_keeps_order_and_repeats(models, x):
    ensemble = Ensemble(models)
    part = ensemble.subset([2, 0])
    assert len(part) == 2 and part.has_batchnorm == [True, True]
    assert torch.equal(part.logits(x), ensemble.logits(x)[[2, 0]])


def test_a_copy_that_travels_says_the_same(models, x):
    ensemble = Ensemble(models).subset([2, 0])
    ensemble.at_once, ensemble.captured = 1, {"recorded": object()}
    leaf = x.clone().requires_grad_(True)
    expected = [value.detach() for value in ensemble.logits_and_bn_loss(leaf)]  # leaves tensors of the graph behind
    copied = ensemble.on("cpu")
    assert (copied.at_once, copied.captured, len(copied)) == (1, {}, 2)
    for found, known in zip(copied.logits_and_bn_loss(x), expected, strict=True):
        assert torch.equal(found, known)
    torch.testing.assert_close(copied.batch_logits(x), ensemble.batch_logits(x), rtol=0, atol=0)
    for client in copied._clients:
        for tensor in client.model.state_dict().values():
            tensor.zero_()
    assert torch.equal(ensemble.logits(x), expected[0]), "its networks are its own"
    assert all(tensor.is_meta for c in ensemble.on("meta")._clients for tensor in c.model.state_dict().values())


def test_a_layer_used_twice_stays_one_layer(x):
    shared = nn.BatchNorm2d(2)
    model = randomised(nn.Sequential(shared, nn.Conv2d(2, 2, 1), shared, nn.AdaptiveAvgPool2d(1), nn.Flatten()), 4)
    ensemble = Ensemble([model])
    torch.testing.assert_close(ensemble.logits_and_bn_loss(x)[1][0], hooked_bn_losses(model, x))
    updated = ensemble.update_statistics(ensemble.initial_statistics(), x, 0.9)
    assert len(updated[0]) == 1


def test_a_failing_forward_leaves_the_ensemble_usable(models, x):
    ensemble = Ensemble(models)
    before = ensemble.logits(x)
    with pytest.raises(RuntimeError):
        ensemble.batch_logits(x[:, :1])
    assert torch.equal(ensemble.logits(x), before)


def test_layers_without_running_statistics_are_left_out(x):
    model = nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    ensemble = Ensemble([model])
    assert ensemble.has_batchnorm == [False]
    assert ensemble.logits_and_bn_loss(x)[1].tolist() == [0.0]


def test_statistics_of_half_precision_activations_are_float32(x):
    model = Net(4).bfloat16()
    ensemble = Ensemble([model])
    _, bn = ensemble.logits_and_bn_loss(x.bfloat16())
    assert bn.dtype == torch.float32 and bn.isfinite().all()


def test_no_models_or_different_classes_are_refused(models, x):
    with pytest.raises(MethodError, match="no_clients"):
        Ensemble([])
    with pytest.raises(MethodError, match="no_clients"):
        Ensemble(models).subset([])
    with pytest.raises(MethodError, match="class_mismatch"):
        Ensemble([Net(4, 3).double(), Net(4, 5).double()]).logits(x)


@pytest.mark.usefixtures("float64")
def test_features_are_what_each_head_was_given():
    from fedbicross import models as architectures

    networks = [architectures.build(name, 3, 4, 12) for name in ("resnet8", "wrn16_2", "cnn")]
    for seed, network in enumerate(networks):
        architectures.initialise(network, torch.Generator().manual_seed(seed))
    x = torch.randn(5, 3, 12, 12, generator=torch.Generator().manual_seed(9)).requires_grad_(True)
    ensemble = Ensemble(networks)
    logits, features = ensemble.logits_and_features(x)
    torch.testing.assert_close(logits, ensemble.logits(x))
    assert [feature.shape for feature in features] == [(5, 64), (5, 128), (5, 128)]
    for network, feature in zip(networks, features, strict=True):
        torch.testing.assert_close(feature, network.eval().features(x))
        assert torch.autograd.grad(feature.abs().sum(), x, retain_graph=True)[0].abs().sum() > 0


def test_a_network_without_a_head_has_no_features(x):
    class Bare(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean((2, 3))

    with refuses(MethodError, "needs_features"):
        Ensemble([Bare()]).logits_and_features(x)
