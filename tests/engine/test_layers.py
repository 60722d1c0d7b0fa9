"""Convolutions fitted to fast kernels give the numbers of plain ones, with their gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fedbicross import models
from fedbicross.engine.layers import FastConv2d, use_fast_convolutions
from steps.tiny import noise, randomised


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(1, 6, 3, padding=1),
        nn.Conv2d(3, 6, 7, stride=2, padding=3, bias=False),
        nn.Conv2d(3, 6, 1, stride=2),
        nn.Conv2d(16, 6, 1, stride=2, bias=False),
        nn.Conv2d(9, 6, 1, stride=(1, 3)),
    ],
)
def test_a_fitted_convolution_gives_the_same_numbers_and_gradients(conv: nn.Conv2d) -> None:
    plain = randomised(conv, 0)
    fitted = use_fast_convolutions(copy.deepcopy(plain))
    assert isinstance(fitted, FastConv2d)
    found = []
    for layer in (plain, fitted):
        x = noise(4, conv.in_channels, 9, 8).requires_grad_(True)
        out = layer(x)
        found.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_the_gradient_keeps_the_layout_of_the_kernels() -> None:
    layer = use_fast_convolutions(randomised(nn.Conv2d(16, 6, 1, stride=2), 0))
    x = noise(4, 16, 9, 8).contiguous(memory_format=torch.channels_last).requires_grad_(True)
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x)
    assert gradient.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(16, 6, 3, padding=1),
        nn.Conv2d(16, 6, 1),
        nn.Conv2d(16, 6, 1, stride=2, padding=1),
        nn.Conv2d(4, 4, 3, groups=4),
        nn.Conv2d(3, 6, 3, dilation=2),
        nn.Conv2d(3, 6, 3, padding=1, padding_mode="circular"),
    ],
)
def test_other_convolutions_are_left_alone(conv: nn.Conv2d) -> None:
    assert type(use_fast_convolutions(conv)) is nn.Conv2d


def test_names_and_weights_stay() -> None:
    network = models.build("resnet18", 3, 8, 28)
    before = {name: value.data_ptr() for name, value in network.state_dict().items()}
    changed = [module for module in use_fast_convolutions(network).modules() if isinstance(module, FastConv2d)]
    assert len(changed) == 4  # the stem and three shortcuts
    assert {name: value.data_ptr() for name, value in network.state_dict().items()} == before
