"""From uploaded weights to a frozen ensemble of teachers; damaged weights are refused by name before any work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fedbicross import models
from fedbicross.engine.ensemble import Ensemble
from fedbicross.engine.norm import BNDistance
from fedbicross.errors import MethodError


def load_teachers(
    names: Sequence[str],
    architectures: Sequence[str],
    states: Sequence[Mapping[str, Tensor]],
    shape: tuple[int, int, int],
    device: str = "cpu",
    precision: str = "fp32",
    fast: bool = False,
    bn_distance: BNDistance = "absolute",
) -> Ensemble:
    """The clients' networks as an ensemble on ``device``; ``shape`` is (channels, classes, image size)."""
    for name, state in zip(names, states, strict=True):
        check_state(name, state)
    each = zip(names, architectures, states, strict=True)
    # One at a time: the ensemble keeps copies of its own, and a hundred large networks should not be there twice.
    networks = (_network(name, architecture, state, shape).to(device) for name, architecture, state in each)
    return Ensemble(networks, precision, fast, bn_distance)


def _network(name: str, architecture: str, state: Mapping[str, Tensor], shape: tuple[int, int, int]) -> nn.Module:
    network = models.build(architecture, *shape)
    try:
        network.load_state_dict(dict(state))
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip() if len(str(error).splitlines()) > 1 else str(error)
        raise MethodError("wrong_weights", f"{name!r} did not send a {architecture}: {first[:200]}") from None
    return network


def check_state(name: str, state: Mapping[str, Tensor]) -> None:
    """Weights must be finite and batch-normalisation variances must not be negative."""
    for key, value in state.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise MethodError("non_finite", f"{name!r} sent NaN or infinite values in {key!r}")
        if key.endswith("running_var") and bool((value < 0).any()):
            raise MethodError("bad_statistics", f"{name!r} sent a negative variance in {key!r}")


def need_batchnorm(ensemble: Ensemble, names: Sequence[str], method: str) -> None:
    """Inversion matches batch-normalisation statistics; a network without them has nothing to match."""
    for name, has in zip(names, ensemble.has_batchnorm, strict=True):
        if not has:
            raise MethodError("needs_bn_stats", f"{method} needs batch-normalisation statistics; {name!r} has none")


def logits_of(ensemble: Ensemble, x: Tensor) -> Tensor:
    """`Ensemble.logits` [N,B,C] for a backward pass, with a group's activations in memory at a time."""
    return torch.cat([part[0] for part in _by_groups(ensemble, x, lambda group, x: (group.logits(x),))])


def logits_and_bn_loss_of(ensemble: Ensemble, x: Tensor) -> tuple[Tensor, Tensor]:
    """`Ensemble.logits_and_bn_loss` for a backward pass, with a group's activations in memory at a time."""
    parts = _by_groups(ensemble, x, lambda group, x: group.logits_and_bn_loss(x))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def logits_and_features_of(ensemble: Ensemble, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """`Ensemble.logits_and_features` for a backward pass, with a group's activations in memory at a time."""

    def call(group: Ensemble, x: Tensor) -> tuple[Tensor, ...]:
        logits, features = group.logits_and_features(x)
        return (logits, *features)

    parts = _by_groups(ensemble, x, call)
    return torch.cat([part[0] for part in parts]), [feature for part in parts for feature in part[1:]]


def _by_groups(
    ensemble: Ensemble, x: Tensor, call: Callable[[Ensemble, Tensor], tuple[Tensor, ...]]
) -> list[tuple[Tensor, ...]]:
    """``call`` for each group of ``ensemble.at_once`` clients; with several groups, activations are made twice."""
    groups = ensemble.groups()
    if len(groups) == 1:
        return [call(ensemble, x)]
    return [checkpoint(call, group, x, use_reentrant=False, preserve_rng_state=False) for group in groups]
