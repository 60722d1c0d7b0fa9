"""Wide residual network (Zagoruyko and Komodakis 2016), pre-activation."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from fedbicross.models.base import Classifier, convolution, global_pool, sequence


class PreActivationBlock(nn.Module):
    """BN-ReLU-convolution twice; where the shape changes, the shortcut also starts from the activated input."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = convolution(inputs, outputs, stride=stride)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = convolution(outputs, outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = None if same else convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] to [B, outputs, H / stride, W / stride]."""
        active = F.relu(self.bn1(x))
        out: Tensor = self.conv2(F.relu(self.bn2(self.conv1(active))))
        return out + (x if self.shortcut is None else self.shortcut(active))


def _stage(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
    rest = (PreActivationBlock(outputs, outputs, 1) for _ in range(blocks - 1))
    return nn.Sequential(PreActivationBlock(inputs, outputs, stride), *rest)


def wrn16_2(channels: int, classes: int, image_size: int) -> Classifier:
    """Depth 16 = 4 + 6 × 2 blocks a stage, widening factor 2: widths 32/64/128 after a stem of 16."""
    trunk = sequence(
        stem=convolution(channels, 16),
        stage1=_stage(16, 32, blocks=2, stride=1),
        stage2=_stage(32, 64, blocks=2, stride=2),
        stage3=_stage(64, 128, blocks=2, stride=2),
        bn=nn.BatchNorm2d(128),
        relu=nn.ReLU(),
        pool=global_pool(),
    )
    return Classifier(trunk, 128, classes)
