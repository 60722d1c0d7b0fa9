"""VGG (Simonyan and Zisserman 2015) with batch normalisation and, as usual for small images, one linear head."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fedbicross.models.base import Classifier, convolution, global_pool, sequence

WIDTHS = (64, 128, 256, 512, 512)


def _vgg(convolutions: Sequence[int], channels: int, classes: int, image_size: int) -> Classifier:
    """``convolutions`` counts the layers of each stage; a 2×2 pool ends a stage while there are two pixels to pool."""
    stages: dict[str, nn.Module] = {}
    inputs, size = channels, image_size
    for number, (width, layers) in enumerate(zip(WIDTHS, convolutions, strict=True), start=1):
        stage: list[nn.Module] = []
        for _ in range(layers):
            stage += [convolution(inputs, width), nn.BatchNorm2d(width), nn.ReLU()]
            inputs = width
        if size >= 2:
            stage.append(nn.MaxPool2d(2))
            size //= 2
        stages[f"stage{number}"] = nn.Sequential(*stage)
    return Classifier(sequence(**stages, pool=global_pool()), WIDTHS[-1], classes)


def vgg8(channels: int, classes: int, image_size: int) -> Classifier:
    """One convolution a stage."""
    return _vgg((1, 1, 1, 1, 1), channels, classes, image_size)


def vgg11(channels: int, classes: int, image_size: int) -> Classifier:
    """Configuration A of the paper: eight convolutions."""
    return _vgg((1, 1, 2, 2, 2), channels, classes, image_size)


def vgg16(channels: int, classes: int, image_size: int) -> Classifier:
    """Configuration D of the paper: thirteen convolutions."""
    return _vgg((2, 2, 3, 3, 3), channels, classes, image_size)
