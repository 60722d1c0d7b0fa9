"""From uploads to teachers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch

from fedbicross.engine import combine
from fedbicross.steps.teachers import load_teachers, need_batchnorm

if TYPE_CHECKING:
    from torch import Tensor

    from fedbicross.context import Context
    from fedbicross.engine.ensemble import Ensemble
    from fedbicross.engine.norm import BNDistance
    from fedbicross.exchange import Upload


def load(method: str, uploads: Sequence[Upload], ctx: Context, bn_distance: BNDistance = "absolute") -> Ensemble:
    """All networks, frozen; damaged ones, and ones without batch-normalisation statistics, are refused by name."""
    names, architectures = [upload.client for upload in uploads], [upload.task.model for upload in uploads]
    states = [upload.tensors for upload in uploads]
    shape = ctx.architecture[1:]
    networks = load_teachers(names, architectures, states, shape, ctx.device, ctx.precision, ctx.fast, bn_distance)
    need_batchnorm(networks, names, method)
    networks.expect(architectures, {})  # one network's passes are never enough to pay for a compilation
    return networks


def class_counts(uploads: Sequence[Upload], classes: int) -> Tensor:
    """n(i,c) as float64 [N,C]; ones for a client that keeps its counts to itself."""
    given = [upload.class_counts if upload.class_counts is not None else [1] * classes for upload in uploads]
    return torch.tensor([list(counts) for counts in given], dtype=torch.float64)


def class_weights(counts: Tensor, by: Literal["counts", "contrast"]) -> Tensor:
    """a(i,c) as float32 [N,C]: by images of the class, or by those that a client could tell from other classes."""
    return combine.class_weights(combine.contrast_counts(counts) if by == "contrast" else counts).float()
