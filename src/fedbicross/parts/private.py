"""The Gaussian mechanism on what a client is about to send: scale of the noise, the noise itself, and the statement."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbicross.context import Context
from fedbicross.engine.private import counts_release, training_release
from fedbicross.engine.recipe import PrivateTraining
from fedbicross.errors import MethodError, UploadError
from fedbicross.messages import Client, Upload
from fedbicross.parts.settings import PooledConfig
from fedbicross.privacy.gaussian import noise_for
from fedbicross.privacy.noise import Noise
from fedbicross.privacy.statement import Release, Statement

TOLD_FROM_NOISE = 3.0  # standard deviations of its noise that a count needs to be believed


class Sum(NamedTuple):
    """A sum over images that is to be released."""

    value: Tensor
    sensitivity: float  # how far one image, or patient, moves it at most, in L2 norm
    share: float  # of the budget; the shares of one release add up to 1
    scales: Tensor | None = None  # by how much smaller the noise of single entries may be


def scale(noise: float, sensitivity: float, share: float) -> float:
    """σ for one of several sums: all of them together then have the noise multiplier ``noise``."""
    return noise * sensitivity / math.sqrt(share)


def weights(config: PooledConfig, client: Client) -> Tensor | None:
    """What each image counts as in a private sum, [n]: where the unit is a patient, all of his together as one.

    All that a patient has then moves a sum by no more than one image would.
    """
    if config.epsilon is None or config.unit == "image":
        return None
    if client.patients is None:
        raise MethodError("no_patients", f"{client.label}: unit = 'patient', but its data do not name patients")
    _, which, images = np.unique(client.patients, return_inverse=True, return_counts=True)
    return torch.from_numpy(1 / images[which])


def release(
    sums: Mapping[str, Sum], what: str, config: PooledConfig, client: Client, ctx: Context
) -> tuple[dict[str, Tensor], Statement | None]:
    """The sums as they may leave: with noise where the settings ask for it, and what can be said of it then."""
    if config.epsilon is None:
        return {name: entry.value for name, entry in sums.items()}, None
    noise, source = noise_for(config.epsilon, config.delta), ctx.noise("private release", client.name)
    noisy = {
        name: entry.value.double() + _drawn(entry, source) * scale(noise, entry.sensitivity, entry.share)
        for name, entry in sums.items()
    }
    made = Release(what=what, mechanism="gaussian", noise_multiplier=noise)
    return noisy, Statement(epsilon=config.epsilon, delta=config.delta, unit=config.unit, releases=[made])


def _drawn(entry: Sum, source: Noise) -> Tensor:
    drawn = torch.from_numpy(np.asarray(source.normal(*entry.value.shape)))
    return drawn if entry.scales is None else drawn * entry.scales


def told_from_noise(noisy: Tensor, share: float, config: PooledConfig, sites: int = 1) -> Tensor:
    """Noisy counts, with 0 for a class whose count may be nothing but noise: what else is known of it would be, too."""
    assert config.epsilon is not None
    noise = noise_for(config.epsilon, config.delta) * math.sqrt(sites)  # of independent sites: squares add up
    return torch.where(noisy > TOLD_FROM_NOISE * scale(noise, 1.0, share), noisy, 0)


def as_counts(noisy: Tensor) -> list[int]:
    """Noisy counts as numbers of images: whole, none below 0."""
    return [max(round(float(value)), 0) for value in noisy]


def of_training(upload: Upload, client: Client, ctx: Context) -> Upload:
    """An upload that holds a network of private training: its numbers of images behind noise, and the statement."""
    settings = ctx.training.dp
    if settings is None:
        return upload
    images = len(client.labels) - len(ctx.validation_rows(client))
    releases, beside = [training_release(ctx.training, images)], counts_release(settings)
    counts, total = upload.class_counts, upload.num_samples
    source = ctx.noise("private counts", client.name)
    if counts is not None:
        counts = as_counts(
            torch.tensor(counts) + beside.noise_multiplier * torch.from_numpy(source.normal(len(counts)))
        )
        if not any(counts):  # noise took all of them, but the client has images
            counts = [1 for _ in counts]
        total = None if total is None else sum(counts)
    elif total is not None:
        total = max(round(total + beside.noise_multiplier * float(source.normal())), 1)
    if counts is not None or total is not None:
        releases.append(beside)
    statement = Statement(epsilon=settings.epsilon, delta=settings.delta, releases=releases)
    return replace(upload, class_counts=counts, num_samples=total, privacy=statement)


def check(upload: Upload, agreed: PooledConfig | PrivateTraining) -> None:
    """The upload states at least the privacy that was agreed on; whether it is so, only its sender can know."""
    if agreed.epsilon is None:
        return
    stated = upload.privacy
    if stated is None:
        raise UploadError("not_private", f"{upload.client!r} states no privacy, but epsilon was agreed on")
    if stated.epsilon > agreed.epsilon or stated.delta > agreed.delta:
        found = f"epsilon {stated.epsilon:g}, delta {stated.delta:g}"
        raise UploadError("not_private", f"{upload.client!r} states {found}; less privacy than was agreed on")
    unit = agreed.unit if isinstance(agreed, PooledConfig) else "image"
    if stated.unit != unit:
        raise UploadError("not_private", f"{upload.client!r} states privacy of each {stated.unit}, not {unit}")
