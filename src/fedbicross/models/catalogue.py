"""Which classifiers there are. No torch, so that listing and checking names stays instant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedbicross.errors import ConfigError, nearest

InitScheme = Literal["torch", "he"]


@dataclass(frozen=True)
class ModelInfo:
    """What a user needs to know of an architecture before it is built."""

    description: str
    has_batchnorm: bool
    min_image_size: int


GROUP_NORM = "_gn"  # ending of a name whose network has group instead of batch normalisation: for DP-SGD

_PLAIN: dict[str, ModelInfo] = {
    "cnn": ModelInfo("two convolutions and two linear layers, no batch normalisation", False, 8),
    "resnet8": ModelInfo("three stages of one basic block, widths 16/32/64: quick runs on a CPU", True, 8),
    "resnet18": ModelInfo("ResNet-18; 3×3 stem without pooling up to 64 px (the papers' backbone)", True, 8),
    "resnet34": ModelInfo("ResNet-34; 3×3 stem without pooling up to 64 px", True, 8),
    "wrn16_2": ModelInfo("Wide ResNet 16-2, pre-activation", True, 8),
    "vgg8": ModelInfo("VGG with one convolution a stage, batch normalisation, one linear head", True, 8),
    "vgg11": ModelInfo("VGG-11 with batch normalisation, one linear head", True, 8),
    "vgg16": ModelInfo("VGG-16 with batch normalisation, one linear head", True, 8),
}

MODELS: dict[str, ModelInfo] = _PLAIN | {
    f"{name}{GROUP_NORM}": ModelInfo(f"{name} with group normalisation, as DP-SGD needs", False, plain.min_image_size)
    for name, plain in _PLAIN.items()
    if plain.has_batchnorm
}

ALIASES: dict[str, str] = {  # what papers and other libraries call them; every VGG here has batch normalisation
    "vgg8_bn": "vgg8",
    "vgg11_bn": "vgg11",
    "vgg16_bn": "vgg16",
    "wrn_16_2": "wrn16_2",
}


def canonical(name: str) -> str:
    """The name in ``MODELS`` of a model or of its alias; else a ConfigError that suggests the nearest one."""
    if name not in MODELS and name not in ALIASES:
        raise ConfigError("unknown_model", f"unknown model {name!r}{nearest(name, MODELS)}")
    return ALIASES.get(name, name)


def info(name: str) -> ModelInfo:
    """The entry of ``MODELS``, by name or alias."""
    return MODELS[canonical(name)]


def group_norm_advice(name: str) -> str:
    """Why a network with batch normalisation cannot be trained privately, and which one can."""
    return f"{name!r} has batch normalisation, which mixes images; choose the model {canonical(name)}{GROUP_NORM}"


def check(name: str, channels: int, classes: int, image_size: int) -> None:
    """Refuse what ``build`` would refuse, without importing torch."""
    smallest = info(name).min_image_size
    if image_size < smallest:
        raise ConfigError("image_too_small", f"model {name!r} needs images of at least {smallest} px, got {image_size}")
    if channels not in (1, 3):
        raise ConfigError("bad_channels", f"model {name!r} takes 1 or 3 channels, got {channels}")
    if classes < 2:
        raise ConfigError("bad_classes", f"model {name!r} needs at least 2 classes, got {classes}")
