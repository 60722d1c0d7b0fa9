"""Counts, class sums and Σ f fᵀ of a client's features: made, checked, and added up. For FedCGS and analytic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fedbicross.context import Context
from fedbicross.errors import MethodError, UploadError
from fedbicross.messages import Client, Upload
from fedbicross.parts import features as check
from fedbicross.parts import pooled, private
from fedbicross.parts.settings import MomentsConfig, PooledConfig
from fedbicross.privacy.gaussian import noise_for
from fedbicross.steps import sufficient_statistics as steps
from fedbicross.steps.sufficient_statistics import LinearHead, Statistics

Solve = Callable[[Statistics], LinearHead]

# Shares of a private release. Class means tell classes apart even where little is left of the gram matrix in the noise.
COUNTS, SUMS, GRAM = 0.04, 0.64, 0.32
FAR = 10.0  # standard deviations of its noise that no honest sum is off by


def upload(config: PooledConfig, client: Client, ctx: Context) -> Upload:
    """Counts, class sums and Σ f fᵀ in float64, with noise where the settings ask for it."""
    classes = ctx.task.classes
    x = pooled.features(config, client, ctx)
    found = steps.statistics(x, torch.from_numpy(client.labels), len(classes), private.weights(config, client))
    counts = client.class_counts(len(classes))
    alone = [name for name, count in zip(classes, counts, strict=True) if count == 1]
    if alone and config.epsilon is None:
        names = ", ".join(alone)
        ctx.record.warn(f"{client.label} has one image of {names}: its class sum is that image's feature")
    ctx.record.flops += 2 * len(x) * x.shape[1] * (x.shape[1] + len(classes))
    longest = config.clip or math.inf
    sums = {
        "counts": private.Sum(found.counts, 1.0, COUNTS),
        "class_sums": private.Sum(found.class_sums, longest, SUMS),
        "gram": private.Sum(
            steps.pack_triangle(found.gram), longest**2, GRAM, steps.triangle_scales(found.gram.shape[0])
        ),
    }
    tensors, statement = private.release(sums, "counts, class sums and products of features", config, client, ctx)
    noisy = tensors.pop("counts")
    extra = {"encoder": check.describe(config, ctx)}
    sent = counts if statement is None else private.as_counts(noisy)
    return Upload(client.name, ctx.task_of(client), tensors, class_counts=sent, extra=extra, privacy=statement)


def check_upload(config: PooledConfig, upload: Upload) -> None:
    """Sums that some images could have: the right shapes, finite, and within the bounds that squares obey.

    Behind noise these bounds are as much wider as noise hardly ever is.
    """
    wide = torch.float64
    check.check_tensors(upload, {"class_sums": (wide, (None, None)), "gram": (wide, (None,))})
    counts = torch.tensor(check.check_counts(upload), dtype=wide)
    sums = upload.tensors["class_sums"]
    width = sums.shape[1]
    check.check_width(upload, width)
    sizes = {"class_sums": (wide, (len(counts), width)), "gram": (wide, (width * (width + 1) // 2,))}
    check.check_tensors(upload, sizes)
    private.check(upload, config)
    if config.epsilon is None:
        _check_squares(upload, counts)
    check.check_described(upload, config)
    check.check_magnitude(upload, float(counts.sum().clamp_min(1)) * check.MOST**2)
    if config.clip is not None:
        _check_lengths(config, upload, counts, config.clip)
    given = statistics(upload)
    if config.epsilon is None:
        # What float64 rounds off in sums of so many numbers is below this, and what passes is far below any ridge.
        rounding = torch.finfo(wide).eps * (50 * width + min(float(counts.sum()), 1e6))
        scatter, slack = steps.scatter_within(given), rounding * float(_squares(upload).max())
    else:
        scatter = given.gram
        slack = _noise(config, config.clip or math.inf, GRAM, 2) * (math.sqrt(2 * width) + FAR)
    if float(torch.linalg.eigvalsh(scatter)[0]) < -slack:
        raise UploadError("bad_statistics", f"{upload.client!r}: no images have second moments like its own")


def _check_lengths(config: PooledConfig, upload: Upload, counts: torch.Tensor, longest: float) -> None:
    """No feature is longer than was agreed on; of each class one image more is allowed for, since counts are whole."""
    width = upload.tensors["class_sums"].shape[1]
    images = counts + 1 + FAR * _noise(config, 1.0, COUNTS)
    sums = images * longest + _noise(config, longest, SUMS) * (math.sqrt(width) + FAR)
    squares = float(images.sum()) * longest**2 + _noise(config, longest, GRAM, 2) * FAR * math.sqrt(width)
    too_long = bool((upload.tensors["class_sums"].norm(dim=1) > sums).any())
    if too_long or float(_squares(upload).sum()) > squares:
        raise UploadError("bad_statistics", f"{upload.client!r}: its sums are of features longer than {longest:g}")


def _noise(config: PooledConfig, longest: float, share: float, power: int = 1) -> float:
    """σ of the noise that was agreed on, in a sum that one image moves by ``longest`` to this power; 0 for none."""
    if config.epsilon is None:
        return 0.0
    return private.scale(noise_for(config.epsilon, config.delta), longest**power, share)


def _squares(upload: Upload) -> torch.Tensor:
    """Σ f² by feature: the diagonal of a packed lower triangle."""
    index = torch.arange(1, upload.tensors["class_sums"].shape[1] + 1)
    return upload.tensors["gram"][index * (index + 1) // 2 - 1]


def _check_squares(upload: Upload, counts: torch.Tensor) -> None:
    sums = upload.tensors["class_sums"]
    if bool((sums[counts == 0] != 0).any()):
        raise UploadError("bad_statistics", f"{upload.client!r} sent a sum for a class of which it has no image")
    least = (sums.square() / counts.clamp_min(1)[:, None]).sum(0)  # Cauchy-Schwarz: (Σ_c f)² ≤ n_c Σ_c f²
    if bool((_squares(upload) < least - 1e-6 * least.abs() - 1e-9).any()):
        raise UploadError("bad_statistics", f"{upload.client!r}: its second moments contradict its class sums")


def feature_length(upload: Upload) -> float:
    """Root mean square length of the features behind the sums."""
    return math.sqrt(float(_squares(upload).sum()) / max(1, sum(upload.class_counts or ())))


def statistics(upload: Upload) -> Statistics:
    """The sums of one client."""
    sums = upload.tensors["class_sums"]
    counts = torch.tensor(list(upload.class_counts or ()), dtype=torch.float64)
    return Statistics(counts, sums, steps.unpack_triangle(upload.tensors["gram"], sums.shape[1]))


def counted_less(upload: Upload, counted: Upload, share: float) -> Upload:
    """The sums for the counts of ``counted``: class means stay, and the scatter within classes has its share."""
    given, fewer = statistics(upload), statistics(counted)
    scaled = steps.scaled(given, fewer.counts, share)
    tensors = {"class_sums": scaled.class_sums, "gram": steps.pack_triangle(scaled.gram)}
    return replace(counted, tensors=tensors)


def head(config: MomentsConfig, uploads: Sequence[Upload], ctx: Context, exact: Solve) -> tuple[LinearHead, Statistics]:
    """The head and the sums behind it: by ``exact``, or where the sums are noisy by `steps.noisy_head`."""
    found, noise = total(config, uploads, ctx)
    width = found.class_sums.shape[1]
    ctx.record.flops += round(width**3 / 3) + 2 * width**2 * len(found.counts)
    if noise:
        return steps.noisy_head(found, ridge=config.ridge, noise=noise), found
    return exact(found), found


def total(config: PooledConfig, uploads: Sequence[Upload], ctx: Context) -> tuple[Statistics, float]:
    """The sums over all clients, and how large the noise in Σ f fᵀ is (`noise_size`; 0 without any)."""
    width = check.same_width(uploads, "class_sums")
    found, noise = steps.add([statistics(upload) for upload in uploads]), 0.0
    if config.epsilon is not None:
        multiplier = noise_for(config.epsilon, config.delta) * math.sqrt(len(uploads))
        noise = steps.noise_size(private.scale(multiplier, (config.clip or math.inf) ** 2, GRAM), width)
        counts = private.told_from_noise(found.counts, COUNTS, config, len(uploads))
        found = replace(found, counts=counts, class_sums=found.class_sums * (counts > 0)[:, None])
    if not float(found.counts.sum()):
        few = "no client has an image" if config.epsilon is None else "no class has enough images to be told from noise"
        raise MethodError("no_images", few)
    absent = [name for name, n in zip(ctx.task.classes, found.counts, strict=True) if not n]
    if absent:
        ctx.record.warn(f"nobody has images of {', '.join(absent)}: never predicted")
    ctx.record.add("scalars", "images behind the statistics", int(found.counts.sum()))
    return found, noise
