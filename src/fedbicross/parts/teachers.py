"""The clients' networks as teachers: how they are sent, and how the server loads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedbicross.context import Context
from fedbicross.engine import combine
from fedbicross.engine.ensemble import Ensemble
from fedbicross.engine.norm import BNDistance
from fedbicross.messages import Client, Upload
from fedbicross.parts.settings import InversionConfig, SynthesisConfig
from fedbicross.steps.head_counts import counts_from_head
from fedbicross.steps.inversion import InversionSettings, clients_that_fit
from fedbicross.steps.teachers import load_teachers, need_batchnorm
from fedbicross.steps.trajectory import Teacher

LEARNT_NOTHING = 1e-6  # of an image: such a network counts only for classes that no other client has


def send_network(client: Client, ctx: Context, class_counts: bool = False) -> Upload:
    """What leaves the hospital: the network that it trained, and class counts only where the method needs them."""
    counts = client.class_counts(len(ctx.task.classes)) if class_counts else None
    return Upload(client.name, ctx.task_of(client), ctx.local_model(client).state, class_counts=counts)


def load_ensemble(
    uploads: Sequence[Upload],
    ctx: Context,
    *,
    batch: int,
    at_once: int | None,
    passes: Mapping[str, int],
    bn_distance: BNDistance = "absolute",
    batchnorm_for: str = "",
) -> Ensemble:
    """All clients, frozen; damaged uploads are refused here, before any work.

    ``passes`` says how many of each kind there will be; ``batchnorm_for`` names the method that cannot do without
    batch-normalisation statistics.
    """
    names, architectures = [upload.client for upload in uploads], [upload.task.model for upload in uploads]
    states, shape = [upload.tensors for upload in uploads], ctx.architecture[1:]
    ensemble = load_teachers(names, architectures, states, shape, ctx.device, ctx.precision, ctx.fast, bn_distance)
    if batchnorm_for:
        need_batchnorm(ensemble, names, batchnorm_for)
    ensemble.at_once = at_once or clients_that_fit(architectures, shape, batch, ctx.device)
    ensemble.expect(architectures, passes)
    return ensemble


def load_teacher(config: SynthesisConfig, method: str, uploads: Sequence[Upload], ctx: Context) -> Teacher:
    """All clients as one frozen teacher that can be inverted."""
    asked = config.distillation_steps
    ensemble = load_ensemble(
        uploads,
        ctx,
        batch=config.batch,
        at_once=config.teachers_at_once,
        passes={"match": config.synthesis_steps, "batch": asked, "stored": asked},
        bn_distance=config.bn_distance,
        batchnorm_for=method,
    )
    weights = None
    if config.weighted:
        weights = class_weights(class_counts(uploads, len(ctx.task.classes)), "counts").to(ctx.device)
    how = (config.temperature, config.teacher, weights, config.adaptation, config.momentum_adaptation)
    return Teacher(ensemble, *how)


def inversion_settings(config: InversionConfig, image_size: int) -> InversionSettings:
    """The settings of the synthesis at this image size."""
    jitter = config.jitter if config.jitter is not None else (30 if image_size > 128 else 2)
    settings = InversionSettings(
        steps=config.steps,
        batch=config.batch,
        lr=config.lr_synthesis,
        alpha_tv=config.alpha_tv,
        alpha_bn=config.alpha_bn,
        jitter=min(jitter, image_size - 1),
    )
    if isinstance(config, SynthesisConfig):  # of several networks at once
        return replace(settings, bn_reduction=config.bn_reduction, ce=config.ce)
    return settings


def class_counts(uploads: Sequence[Upload], classes: int) -> Tensor:
    """n(i,c) as float64 [N,C]; ones for a client that keeps its counts to itself."""
    given = [upload.class_counts if upload.class_counts is not None else [1] * classes for upload in uploads]
    return torch.tensor([list(counts) for counts in given], dtype=torch.float64)


def read_counts(uploads: Sequence[Upload], ctx: Context) -> Tensor:
    """What the networks show of their clients' class counts, up to a factor for all, as float64 [N,C].

    A network that was not moved at all learnt nothing: next to no images, all classes alike.
    """
    found = []
    for upload in uploads:
        first = ctx.models.first_model(upload.client, upload.task.model).state_dict()
        shown = counts_from_head(upload.tensors["head.weight"], first["head.weight"])
        found.append(shown if bool(shown.any()) else torch.full_like(shown, LEARNT_NOTHING))
    return torch.stack(found)


def class_weights(counts: Tensor, by: combine.Weighting) -> Tensor:
    """a(i,c) as float32 [N,C], by one of the rules of `combine.weighting_counts`."""
    return combine.class_weights(combine.weighting_counts(counts, by)).float()


def best_start(uploads: Sequence[Upload], counts: Tensor, model: str) -> dict[str, Tensor] | None:
    """The network of the client that could tell most images from others, of those with the student's architecture."""
    told = combine.contrast_counts(counts).sum(1).tolist()
    fitting = [i for i, upload in enumerate(uploads) if upload.task.model == model]
    return dict(uploads[max(fitting, key=lambda i: told[i])].tensors) if fitting else None
