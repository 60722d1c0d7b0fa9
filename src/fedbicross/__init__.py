"""One-shot, personalised federated learning for medical images: one file out of each hospital, one file back.

Importing this package is instant: torch is loaded when something is run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["METHODS", "Dataset", "__version__", "load_dataset", "load_model", "resume", "run", "simulate"]

if TYPE_CHECKING:
    from fedbicross.api import resume, run
    from fedbicross.data import Dataset, load_dataset
    from fedbicross.federation import simulate
    from fedbicross.methods import METHODS
    from fedbicross.transport.model_folder import load_model

_HOMES = {
    "METHODS": "fedbicross.methods",
    "Dataset": "fedbicross.data",
    "load_dataset": "fedbicross.data",
    "load_model": "fedbicross.transport.model_folder",
    "resume": "fedbicross.api",
    "run": "fedbicross.api",
    "simulate": "fedbicross.federation",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'fedbicross' has no attribute {name!r}")
