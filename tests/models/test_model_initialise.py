"""Placeholder weights, filling from a generator, and the untouched global random state."""

import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from fedbicross import models

ALL = sorted(models.MODELS)


def initialised(name, seed, scheme="torch"):
    model = models.build(name, 1, 3, 28)
    models.initialise(model, torch.Generator().manual_seed(seed), scheme)
    return model


def assert_same(a, b):
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), key


def assert_fresh_batchnorm(model):
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            assert (layer.weight == 1).all() and (layer.bias == 0).all()
            assert (layer.running_mean == 0).all() and (layer.running_var == 1).all()
            assert layer.num_batches_tracked.item() == 0 and layer.num_batches_tracked.dtype == torch.int64


@pytest.mark.parametrize("name", ALL)
def test_build_gives_the_same_placeholders_every_time(name):
    model = models.build(name, 1, 3, 28)
    assert_same(model.state_dict(), models.build(name, 1, 3, 28).state_dict())
    assert_fresh_batchnorm(model)
    assert model.training
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            assert (module.weight == 0).all()
    for tensor in (*model.parameters(), *model.buffers()):
        assert tensor.device.type == "cpu"
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("name", ALL)
def test_the_seed_decides_the_weights(name):
    first, again, other = initialised(name, 7), initialised(name, 7), initialised(name, 8)
    assert_same(first.state_dict(), again.state_dict())
    assert not torch.equal(first.head.weight, other.head.weight)
    assert_fresh_batchnorm(first)


def test_initialise_forgets_everything_before_it():
    model = initialised("resnet8", 1)
    for _ in range(2):
        model(torch.ones(2, 1, 28, 28))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    models.initialise(model, torch.Generator().manual_seed(7))
    assert_same(model.state_dict(), initialised("resnet8", 7).state_dict())


def test_initialise_draws_the_same_weights_into_other_precisions():
    model = models.build("cnn", 1, 3, 28).to(torch.bfloat16)
    models.initialise(model, torch.Generator().manual_seed(7))
    expected = initialised("cnn", 7).to(torch.bfloat16)
    assert_same(model.state_dict(), expected.state_dict())


def test_weights_have_the_spread_of_torch_s_own_layers():
    model, cnn = initialised("resnet18", 0), initialised("cnn", 0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        conv = nn.Conv2d(512, 512, 3, bias=False)
    weight = model.trunk.stage4[1].conv1.weight
    assert weight.std().item() == pytest.approx(conv.weight.std().item(), rel=0.01)
    assert weight.mean().item() == pytest.approx(0, abs=1e-4)
    layers = [(weight, 512 * 9), (model.head.weight, 512), (cnn.trunk.conv2.bias, 32 * 9)]
    for values, fan_in in layers:
        bound = 1 / math.sqrt(fan_in)
        assert 0.9 * bound < values.abs().max().item() <= bound
    assert model.head.bias.abs().max().item() <= 1 / math.sqrt(512)


def test_he_draws_normal_convolutions_and_the_same_heads_as_before():
    model = initialised("resnet18", 0, "he")
    weight = model.trunk.stage4[1].conv1.weight
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (512 * 9)), rel=0.01)
    assert weight.abs().max() > 4 * weight.std()  # no uniform one reaches so far
    assert 0.98 / math.sqrt(512) < model.head.weight.abs().max().item() <= 1 / math.sqrt(512)
    assert (initialised("cnn", 0, "he").trunk.conv1.bias == 0).all()


@pytest.mark.parametrize("name", ALL)
def test_global_random_state_is_untouched(name):
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    initialised(name, 3)
    models.forward_flops(name, 1, 3, 28)
    models.num_parameters(name, 1, 3, 28)
    assert torch.equal(torch_state, torch.get_rng_state())
    after = np.random.get_state()  # noqa: NPY002
    assert (numpy_state[1] == after[1]).all() and numpy_state[2:] == after[2:]
    assert random.getstate() == python_state


def test_global_seed_has_no_influence():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        first = initialised("vgg8", 5)
        torch.manual_seed(2)
        second = initialised("vgg8", 5)
    assert_same(first.state_dict(), second.state_dict())


def test_a_layer_without_a_rule_is_refused():
    with pytest.raises(TypeError, match=r"PReLU at '1'"):
        models.initialise(nn.Sequential(nn.Linear(2, 2), nn.PReLU()), torch.Generator())


def test_layer_normalisation_and_modules_with_a_rule_of_their_own():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.vector = nn.Parameter(torch.zeros(3))

        def fill(self, generator):
            self.vector.copy_(torch.rand(3, generator=generator))

    model = nn.Sequential(nn.LayerNorm(2), Own())
    with torch.no_grad():
        model[0].weight.fill_(7)
    models.initialise(model, torch.Generator().manual_seed(0))
    assert model[0].weight.tolist() == [1, 1] and model[0].bias.tolist() == [0, 0]
    assert torch.equal(model[1].vector, torch.rand(3, generator=torch.Generator().manual_seed(0)))
