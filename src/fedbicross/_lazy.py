"""Packages whose submodules are imported on first use, so that no command pays for torch before it needs it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType


def lazy_submodules(package: str, names: Sequence[str]) -> Callable[[str], ModuleType]:
    """A module-level ``__getattr__`` (PEP 562) that imports ``package.name`` when it is first asked for."""

    def __getattr__(name: str) -> ModuleType:
        if name in names:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return __getattr__
