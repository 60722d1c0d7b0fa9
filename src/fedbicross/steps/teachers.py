"""From uploaded weights to a frozen ensemble of teachers; damaged weights are refused by name before any work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedbicross import models
from fedbicross.engine.ensemble import Ensemble
from fedbicross.errors import MethodError


def load_teachers(
    names: Sequence[str],
    architectures: Sequence[str],
    states: Sequence[Mapping[str, Tensor]],
    shape: tuple[int, int, int],
    device: str = "cpu",
    precision: str = "fp32",
    fast: bool = False,
) -> Ensemble:
    """The clients' networks as an ensemble on ``device``; ``shape`` is (channels, classes, image size)."""
    networks = []
    for name, architecture, state in zip(names, architectures, states, strict=True):
        check_state(name, state)
        network = models.build(architecture, *shape)
        try:
            network.load_state_dict(dict(state))
        except RuntimeError as error:
            first = str(error).splitlines()[1].strip() if len(str(error).splitlines()) > 1 else str(error)
            raise MethodError("wrong_weights", f"{name!r} did not send a {architecture}: {first[:200]}") from None
        networks.append(network)
    return Ensemble([network.to(device) for network in networks], precision, fast)


def check_state(name: str, state: Mapping[str, Tensor]) -> None:
    """Weights must be finite and batch-normalisation variances must not be negative."""
    for key, value in state.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise MethodError("not_finite", f"{name!r} sent NaN or infinite values in {key!r}")
        if key.endswith("running_var") and bool((value < 0).any()):
            raise MethodError("bad_statistics", f"{name!r} sent a negative variance in {key!r}")


def need_batchnorm(ensemble: Ensemble, names: Sequence[str], method: str) -> None:
    """Inversion matches batch-normalisation statistics; a network without them has nothing to match."""
    for name, has in zip(names, ensemble.has_batchnorm, strict=True):
        if not has:
            raise MethodError("needs_bn_stats", f"{method} needs batch-normalisation statistics; {name!r} has none")
