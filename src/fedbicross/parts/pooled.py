"""One feature per image and one linear head for everyone, perhaps with a local prior: FedPFT, FedCGS, analytic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedbicross.context import Context
from fedbicross.errors import UploadError
from fedbicross.messages import Client, Predictor, Reply
from fedbicross.parts.features import MOST_IMAGES, check_encoder, check_tensors, describe, tokens, width
from fedbicross.parts.settings import PooledConfig
from fedbicross.steps.prior_shift import shift_prior
from fedbicross.steps.sufficient_statistics import shortened, signs


def features(config: PooledConfig, client: Client, ctx: Context) -> Tensor:
    """One feature per image, [n,D], projected and shortened as the settings say."""
    found = tokens(config, client, ctx).mean(1)  # without windows there is one token
    matrix = _projection(config, found.shape[1])
    found = found if matrix is None else found.double() @ matrix.T
    return found if config.clip is None else shortened(found, config.clip)


def _projection(config: PooledConfig, wide: int) -> Tensor | None:
    """The matrix to fewer features; none where there are no more than that."""
    return signs(config.projection, wide) if config.projection is not None and config.projection < wide else None


def gate_problem(config: PooledConfig) -> str:
    """Why its head cannot be put before the client's own by a gate; empty where it can."""
    return (
        "" if config.prior == "global" else "its head has the client's class mix in it, which the gate would add again"
    )


def reply(
    config: PooledConfig, weight: Tensor, bias: Tensor, counts: Tensor, encoder: Mapping[str, Any], gated: bool
) -> Reply:
    """The head, and the class counts behind it only where the client has to move the prior."""
    tensors = {"weight": weight.float(), "bias": bias.float()}
    if gated or config.prior == "local":
        tensors["class_counts"] = counts.long()
    return Reply(tensors, {"encoder": dict(encoder)})


def predictor(config: PooledConfig, client: Client, reply: Reply, ctx: Context, gated: bool) -> Predictor:
    """At the client: the head as it is, under the client's own class frequencies, or for a gate under none."""
    encoder = describe(config, ctx)
    check_encoder(reply.info.get("encoder"), encoder)
    wide = width(config, ctx)
    matrix = _projection(config, wide)
    _check_reply(config, reply, len(ctx.task.classes), wide if matrix is None else len(matrix), gated)
    weight, bias = reply.tensors["weight"], reply.tensors["bias"]
    if config.prior == "local":
        own = torch.tensor(client.class_counts(len(ctx.task.classes)))
        bias = shift_prior(bias, reply.tensors["class_counts"], own)
    elif gated:
        behind = reply.tensors["class_counts"]
        bias = shift_prior(bias, behind, torch.ones_like(behind), smoothing=0.0)
    if matrix is not None and config.clip is None:  # linear in linear
        weight = (weight.double() @ matrix).to(weight.dtype)
    elif config.clip is not None:  # what the head was not fitted to, it must not see
        state = {"head.weight": weight, "head.bias": bias, "longest": torch.tensor(config.clip)}
        state |= {} if matrix is None else {"project.weight": matrix.to(weight.dtype)}
        return Predictor(ctx.task, ("clipped" if matrix is None else "projected",), (state,), encoder=encoder)
    if not config.hierarchy:
        return Predictor(ctx.task, ("linear",), ({"head.weight": weight, "head.bias": bias},), encoder=encoder)
    # A query of zeros weighs all tokens alike: attention pooling is then their mean.
    mean = {"query.vector": torch.zeros(wide), "key.weight": torch.zeros(wide, wide)}
    state = {**mean, "value.weight": torch.eye(wide), "head.weight": weight, "head.bias": bias}
    return Predictor(ctx.task, ("attention",), (state,), encoder=encoder)


def _check_reply(config: PooledConfig, reply: Reply, classes: int, wide: int, gated: bool) -> None:
    """A head on features of the encoder here; where the prior is moved, counts that images can have."""
    expected = {"weight": (torch.float32, (classes, wide)), "bias": (torch.float32, (classes,))}
    counted = gated or config.prior == "local"
    if counted:
        expected["class_counts"] = (torch.int64, (classes,))
    check_tensors(reply, expected)
    if counted:
        counts = reply.tensors["class_counts"].tolist()
        if min(counts) < 0 or not 1 <= sum(counts) <= MOST_IMAGES:
            raise UploadError("bad_counts", "the reply: 'class_counts' are no numbers of images")
