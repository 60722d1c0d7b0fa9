"""Features of a frozen encoder: which it is, that everybody has the same, and what an upload of them may hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedbicross.bundle import validate
from fedbicross.context import Context
from fedbicross.engine.predict import describe_encoder
from fedbicross.errors import MethodError, UploadError
from fedbicross.messages import Client, Reply, Upload
from fedbicross.models.encoders import load_encoder
from fedbicross.parts.settings import EncoderConfig

MOST_FEATURES = 1 << 16  # numbers per feature that a server accepts; the largest encoders have some thousands
MOST_IMAGES = validate.MAX_SAMPLES
MOST = validate.MAX_WEIGHT  # magnitude of a feature, or of a weight on features


def tokens(config: EncoderConfig, client: Client, ctx: Context) -> Tensor:
    """Token sequences [n, 1 + L, dim] of a client's images."""
    return ctx.features(client, config.spec(ctx.task.image_size))


def describe(config: EncoderConfig, ctx: Context) -> dict[str, Any]:
    """The encoder as it stands in manifests, with the digest of its weights. Needs the encoder: clients only."""
    return describe_encoder(config.spec(ctx.task.image_size), ctx.device)


def width(config: EncoderConfig, ctx: Context) -> int:
    """How many numbers a feature has. Needs the encoder: clients only."""
    spec = config.spec(ctx.task.image_size)
    return load_encoder(spec.name, ctx.device, spec.size).dim


def same_encoder(uploads: Sequence[Upload]) -> dict[str, Any]:
    """The encoder that all uploads name; features of two encoders cannot be mixed. Needs no encoder: for servers."""
    found = [upload.extra.get("encoder") for upload in uploads]
    for upload, description in zip(uploads, found, strict=True):
        if not isinstance(description, Mapping) or description != found[0]:
            raise UploadError("encoder_mismatch", f"{upload.client!r} used another encoder than {uploads[0].client!r}")
    return dict(found[0] or {})


def check_described(upload: Upload, config: EncoderConfig) -> None:
    """The encoder that was agreed on, with the digest of its weights; whether digests agree is seen between uploads."""
    said, digest = dict(upload.extra.get("encoder", {})), upload.extra.get("encoder", {}).get("digest")
    if said != {**config.spec(upload.task.image_size).as_json(), "digest": digest} or not isinstance(digest, str):
        raise UploadError("encoder_mismatch", f"{upload.client!r} used another encoder than was agreed on")


def check_encoder(reply: object, own: Mapping[str, Any]) -> None:
    """At the client: the reply must be for the encoder that this site has."""
    if not isinstance(reply, Mapping) or dict(reply) != dict(own):
        raise MethodError("encoder_mismatch", "the reply is for another encoder, or another set of windows, than here")


def check_tensors(message: Upload | Reply, expected: Mapping[str, tuple[torch.dtype, Sequence[int | None]]]) -> None:
    """Exactly these tensors, each of this type and shape (None: any size), finite; a stranger's may hold anything."""
    who = "the reply" if isinstance(message, Reply) else repr(message.client)
    if message.tensors.keys() != expected.keys():
        odd = sorted(message.tensors.keys() ^ expected.keys())
        raise UploadError("tensor_names", f"{who}: tensors missing or not asked for: {', '.join(odd[:3])}")
    for name, (dtype, shape) in expected.items():
        tensor = message.tensors[name]
        if tensor.dtype != dtype or tensor.ndim != len(shape):
            found = f"{tensor.dtype} with {tensor.ndim} axes"
            raise UploadError("tensor_type", f"{who}: {name!r} is {found}, not {dtype} with {len(shape)}")
        if any(want not in (None, size) for size, want in zip(tensor.shape, shape, strict=True)):
            raise UploadError(
                "tensor_shape", f"{who}: {name!r} has shape {tuple(tensor.shape)}, expected {tuple(shape)}"
            )
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise UploadError("non_finite", f"{who}: {name!r} holds values that are not finite")


def check_magnitude(upload: Upload, most: float = MOST) -> None:
    """No number that no encoder, and no training on its features, could have left: sums of them would not be finite."""
    for name, tensor in upload.tensors.items():
        if tensor.is_floating_point() and tensor.numel() and float(tensor.abs().max()) > most:
            raise UploadError("magnitude", f"{upload.client!r}: {name!r} holds numbers over the limit of {most:g}")


def check_width(upload: Upload, width: int) -> None:
    """A feature has at least one number and not absurdly many."""
    if not 1 <= width <= MOST_FEATURES:
        raise UploadError("tensor_shape", f"{upload.client!r}: features of {width} numbers are not accepted")


def check_counts(upload: Upload) -> list[int]:
    """One count for each class: whole, not negative, not absurd."""
    counts, classes = upload.class_counts, len(upload.task.classes)
    if not isinstance(counts, Sequence) or len(counts) != classes:
        raise UploadError("bad_counts", f"{upload.client!r} should send one count for each of {classes} classes")
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MOST_IMAGES:
            raise UploadError("bad_counts", f"{upload.client!r}: {str(count)[:40]} is no number of images")
    return list(counts)


def same_width(uploads: Sequence[Upload], name: str) -> int:
    """The width of everybody's features; with one encoder there is only one."""
    widths = {int(upload.tensors[name].shape[-1]) for upload in uploads}
    if len(widths) > 1:
        raise MethodError("feature_width", f"clients sent features of different widths: {sorted(widths)}")
    return widths.pop()


def take_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors below a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
