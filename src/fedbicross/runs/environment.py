"""Which versions really ran."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

import torch

PACKAGES = ("fedbicross", "torch", "numpy", "scikit-learn", "safetensors", "pydantic")


def versions(device: str) -> dict[str, Any]:
    """Packages, interpreter, machine and device of this process."""
    out: dict[str, Any] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            out[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            out[package] = "not installed as a package"
    out["machine"] = f"{platform.system()} {platform.machine()}"
    out["threads"] = torch.get_num_threads()
    out["device"] = torch.cuda.get_device_name() if device == "cuda" else device
    return out
