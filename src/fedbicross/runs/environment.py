"""Which versions really ran."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("fedbicross", "torch", "numpy", "scikit-learn", "safetensors", "pydantic")


def versions(device: str) -> dict[str, Any]:
    """Packages, interpreter, processor and device of this process: what the last bits of a result hang on."""
    out: dict[str, Any] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            out[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            out[package] = "not installed as a package"
    out["machine"] = f"{platform.system()} {platform.machine()}"
    out["cpu"] = processor()
    out["cpu_capability"] = torch.backends.cpu.get_cpu_capability()  # which of torch's kernels it uses
    out["threads"] = torch.get_num_threads()
    out["device"] = torch.cuda.get_device_name() if device == "cuda" else device
    return out


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, or its kind where the system does not tell."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    return " ".join((names[0] if names else platform.processor() or platform.machine()).split())
