"""Building, filling and counting: the part of ``models`` that needs torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fedbicross.models.catalogue import GROUP_NORM, MODELS, InitScheme, canonical, check
from fedbicross.models.cnn import cnn
from fedbicross.models.resnet import resnet8, resnet18, resnet34
from fedbicross.models.vgg import vgg8, vgg11, vgg16
from fedbicross.models.wrn import wrn16_2

if TYPE_CHECKING:
    from fedbicross.models.base import Classifier

GROUPS = 8  # of channels, where so many divide them

_PLAIN: dict[str, Callable[[int, int, int], Classifier]] = {
    "cnn": cnn,
    "resnet8": resnet8,
    "resnet18": resnet18,
    "resnet34": resnet34,
    "wrn16_2": wrn16_2,
    "vgg8": vgg8,
    "vgg11": vgg11,
    "vgg16": vgg16,
}


def _group_normalised(build: Callable[[int, int, int], Classifier]) -> Callable[[int, int, int], Classifier]:
    """The same network with each batch normalisation replaced: groups of channels of one image, no statistics kept."""

    def build_it(channels: int, classes: int, image_size: int) -> Classifier:
        model = build(channels, classes, image_size)
        for module in list(model.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.BatchNorm2d):
                    setattr(module, name, nn.GroupNorm(math.gcd(GROUPS, child.num_features), child.num_features))
        return model

    return build_it


BUILDERS: dict[str, Callable[[int, int, int], Classifier]] = _PLAIN | {
    f"{name}{GROUP_NORM}": _group_normalised(build) for name, build in _PLAIN.items() if MODELS[name].has_batchnorm
}


def _skeleton(name: str, channels: int, classes: int, image_size: int) -> Classifier:
    """A model without weights: on the meta device torch's constructors draw no random numbers and take no memory."""
    check(name, channels, classes, image_size)
    with torch.device("meta"):
        return BUILDERS[canonical(name)](channels, classes, image_size)


def build(name: str, channels: int, classes: int, image_size: int) -> Classifier:
    """A model on the CPU with placeholder weights (zeros; BN scale one): call ``initialise`` or load weights next."""
    model = _skeleton(name, channels, classes, image_size).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                _reset_batchnorm(module)
            elif isinstance(module, nn.GroupNorm):
                module.weight.fill_(1)
    return model


@torch.no_grad()
def initialise(model: nn.Module, generator: torch.Generator, scheme: InitScheme = "torch") -> None:
    """Fill the model in place, module by module in the order of construction.

    Convolution and linear: weight and bias uniform in ±1/√fan_in, PyTorch's default, which the papers' released code
    keeps. With ``he``, convolutions are normal with variance 2 / fan_out (He et al. 2015), their bias zero. Batch
    normalisation: γ = 1, β = 0, statistics 0 and 1, counter 0. Layer and group normalisation: 1 and 0. A module with a
    method ``fill(generator)`` fills its own parameters.
    """
    # Drawn in float32 on the CPU and then copied, so that a seed means the same weights on every device.
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d) and scheme == "he":
            fan_out = module.out_channels * math.prod(module.kernel_size) // module.groups
            module.weight.copy_(torch.randn(module.weight.shape, generator=generator) * math.sqrt(2 / fan_out))
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Conv2d | nn.Linear):
            bound = 1 / math.sqrt(math.prod(module.weight.shape[1:]))
            for tensor in (module.weight, module.bias):
                if tensor is not None:
                    tensor.copy_((2 * torch.rand(tensor.shape, generator=generator) - 1) * bound)
        elif isinstance(module, nn.BatchNorm2d):
            _reset_batchnorm(module)
        elif isinstance(module, nn.LayerNorm | nn.GroupNorm):
            module.weight.fill_(1)
            module.bias.zero_()
        elif hasattr(module, "fill"):  # a module with a rule of its own
            module.fill(generator)
        elif next(module.parameters(recurse=False), None) is not None:
            # Silence here would leave a layer at its placeholder and training would look merely bad.
            raise TypeError(f"no initialisation rule for {type(module).__name__} at {name!r}")


@cache
def forward_flops(name: str, channels: int, classes: int, image_size: int) -> int:
    """Floating-point operations (2 × multiply-adds) of one forward pass of one image: convolutions and linears.

    Counted on meta tensors, so that nothing is computed.
    """
    model = _skeleton(name, channels, classes, image_size).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.empty(1, channels, image_size, image_size, device="meta"))
    return int(counter.get_total_flops())


@cache
def normalised_values(name: str, channels: int, classes: int, image_size: int) -> int:
    """Numbers that pass through batch normalisation for one image: what dominates the memory of an inversion."""
    model = _skeleton(name, channels, classes, image_size).eval()
    counts: list[int] = []
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_pre_hook(lambda _, inputs: counts.append(inputs[0].numel()))
    with torch.no_grad():
        model(torch.empty(1, channels, image_size, image_size, device="meta"))
    return sum(counts)


@cache
def num_parameters(name: str, channels: int, classes: int, image_size: int) -> int:
    """Number of trainable scalars; the running statistics of batch normalisation are not among them."""
    return sum(p.numel() for p in _skeleton(name, channels, classes, image_size).parameters())


def _reset_batchnorm(module: nn.BatchNorm2d) -> None:
    module.weight.fill_(1)
    module.bias.zero_()
    module.reset_running_stats()
