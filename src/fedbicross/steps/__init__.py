"""The papers' equations as pure functions; each submodule is imported when it is first used, and torch with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedbicross._lazy import lazy_submodules

if TYPE_CHECKING:
    from fedbicross.steps import (
        adaptation,
        adversarial,
        augment,
        autoregression,
        bilevel,
        clustering,
        crosscluster,
        diagnosis,
        diffusion_prior,
        distill,
        gate,
        generators,
        guidance,
        inversion,
        mixtures,
        noise,
        personal,
        pool,
        prior_shift,
        sources,
        sufficient_statistics,
        teachers,
        tokens,
        trajectory,
    )

__all__ = [
    "adaptation",
    "adversarial",
    "augment",
    "autoregression",
    "bilevel",
    "clustering",
    "crosscluster",
    "diagnosis",
    "diffusion_prior",
    "distill",
    "gate",
    "generators",
    "guidance",
    "inversion",
    "mixtures",
    "noise",
    "personal",
    "pool",
    "prior_shift",
    "sources",
    "sufficient_statistics",
    "teachers",
    "tokens",
    "trajectory",
]

__getattr__ = lazy_submodules(__name__, __all__)
