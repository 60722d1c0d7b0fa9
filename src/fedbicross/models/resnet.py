"""ResNets of basic blocks (He et al. 2016): 8, 18 and 34 layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from fedbicross.models.base import Classifier, convolution, global_pool, sequence

LARGEST_SMALL_IMAGE = 64  # up to here a stem that halves the image twice would leave too few positions


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut, which is a 1×1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = convolution(inputs, outputs, stride=stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = convolution(outputs, outputs)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = (
            nn.Identity()
            if stride == 1 and inputs == outputs
            else sequence(conv=convolution(inputs, outputs, 1, stride), bn=nn.BatchNorm2d(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] to [B, outputs, H / stride, W / stride]."""
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


def _stem(channels: int, width: int, image_size: int) -> nn.Sequential:
    if image_size <= LARGEST_SMALL_IMAGE:
        return sequence(conv=convolution(channels, width), bn=nn.BatchNorm2d(width), relu=nn.ReLU())
    return sequence(
        conv=convolution(channels, width, 7, stride=2),
        bn=nn.BatchNorm2d(width),
        relu=nn.ReLU(),
        pool=nn.MaxPool2d(3, stride=2, padding=1),
    )


def _stage(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
    widths = [inputs] + [outputs] * blocks
    strides = [stride] + [1] * (blocks - 1)
    return nn.Sequential(*(BasicBlock(a, b, s) for (a, b), s in zip(pairwise(widths), strides, strict=True)))


def _resnet(widths: Sequence[int], blocks: Sequence[int], channels: int, classes: int, image_size: int) -> Classifier:
    stages = {
        f"stage{i + 1}": _stage(widths[max(i - 1, 0)], widths[i], blocks[i], stride=1 if i == 0 else 2)
        for i in range(len(widths))
    }
    trunk = sequence(stem=_stem(channels, widths[0], image_size), **stages, pool=global_pool())
    return Classifier(trunk, widths[-1], classes)


def resnet8(channels: int, classes: int, image_size: int) -> Classifier:
    """Three stages of one block, widths 16/32/64."""
    return _resnet((16, 32, 64), (1, 1, 1), channels, classes, image_size)


def resnet18(channels: int, classes: int, image_size: int) -> Classifier:
    """Four stages of two blocks, widths 64/128/256/512."""
    return _resnet((64, 128, 256, 512), (2, 2, 2, 2), channels, classes, image_size)


def resnet34(channels: int, classes: int, image_size: int) -> Classifier:
    """Four stages of three, four, six and three blocks, widths 64/128/256/512."""
    return _resnet((64, 128, 256, 512), (3, 4, 6, 3), channels, classes, image_size)
