"""Diffusion models for FedLMG by name; checking costs no torch. `steps.diffusion_prior.load_prior` loads them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from fedbicross.errors import ConfigError, nearest

PRIORS = {
    "gaussian": "smooth random fields, no weights: a stand-in for tests and dry runs, not the paper's",
    "stable_diffusion": "a latent diffusion model in the folder layout of diffusers, from a local folder (the paper's)",
}


def folder(name: str) -> Path:
    """Where a prior's weights are looked for: ``$FEDBICROSS_PRIORS/NAME``, or under ``~/.cache/fedbicross``."""
    root = os.environ.get("FEDBICROSS_PRIORS") or Path.home() / ".cache" / "fedbicross" / "priors"
    return Path(root) / name


def check(name: str) -> None:
    """Refuse a prior that is unknown, or that this machine cannot load."""
    if name not in PRIORS:
        raise ConfigError("unknown_prior", f"unknown diffusion prior {name!r}{nearest(name, PRIORS)}")
    if name == "gaussian":
        return
    for package in ("diffusers", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError("prior_package", f"prior {name!r} needs {package!r}: pip install 'fedbicross[diffusion]'")
    if not (folder(name) / "model_index.json").is_file():
        raise ConfigError(
            "prior_folder",
            f"prior {name!r} needs a diffusers model (model_index.json, unet/, vae/, ...) in a folder {name!r} of "
            '$FEDBICROSS_PRIORS; prior = "gaussian" runs without',
        )
