"""Which device, which precision, and how stored images become network inputs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from fedbicross.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


def resolve_device(name: str) -> str:
    """``auto`` becomes cuda, mps or cpu; a device that is not there is an error."""
    if name == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not present.get(name, False):
        raise ConfigError("no_device", f"device {name!r} is not available on this machine; use --device auto or cpu")
    return name


def resolve_precision(name: str, device: str) -> str:
    """``auto`` is bf16 on a GPU and fp32 elsewhere."""
    if name == "auto":
        return "bf16" if device == "cuda" else "fp32"
    return name


def set_precision(precision: str, reproducible: bool = False) -> None:
    """fp32 means fp32: without this, convolutions on a recent GPU would silently round their inputs to TF32.

    Some of its convolutions also add up in whatever order threads finish; `reproducible` does without those.
    """
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    torch.backends.cudnn.deterministic = reproducible


def out_of_memory(error: BaseException) -> bool:
    """Whether the machine's memory, or its GPU's, is full; for the former torch has no type of error, only words."""
    full = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return full or isinstance(error, MemoryError | torch.OutOfMemoryError)


def autocast(device: str, precision: str) -> AbstractContextManager[object]:
    """bf16 autocast, or nothing."""
    return torch.autocast(device, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


def to_device(images: np.ndarray, device: str) -> Tensor:
    """Images [n,H,W,C] uint8 as a device-resident uint8 tensor [n,C,H,W]."""
    return torch.from_numpy(images).to(device).permute(0, 3, 1, 2).contiguous()


def normalise(images: Tensor) -> Tensor:
    """uint8 [0, 255] to float [-1, 1]: one scalar for all channels, as in FedISCA."""
    return images.float().div_(127.5).sub_(1.0)
