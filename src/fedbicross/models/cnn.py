"""A small convolutional network without batch normalisation."""

from __future__ import annotations

from torch import nn

from fedbicross.models.base import Classifier, sequence


def cnn(channels: int, classes: int, image_size: int) -> Classifier:
    """Convolution-pool twice (widths 32/64), then linear layers of 128 and ``classes``."""
    size = image_size // 4
    # A fixed average pool keeps at most 7×7 positions, so large images do not blow up the linear layer.
    # Not an adaptive pool: its backward pass is not deterministic on CUDA.
    window = max(1, size // 4)
    positions = (size // window) ** 2
    trunk = sequence(
        conv1=nn.Conv2d(channels, 32, 3, padding=1),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(32, 64, 3, padding=1),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        pool3=nn.AvgPool2d(window),
        flatten=nn.Flatten(),
        linear=nn.Linear(64 * positions, 128),
        relu3=nn.ReLU(),
    )
    return Classifier(trunk, 128, classes)
