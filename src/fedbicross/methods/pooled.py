"""What FedPFT and FedCGS share: one feature per image, one linear head for everyone, perhaps with a local prior."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field

from fedbicross import steps
from fedbicross.context import Context
from fedbicross.errors import MethodError, UploadError
from fedbicross.exchange import Client, Predictor, Reply, Upload
from fedbicross.methods.features import EncoderConfig, FeatureMethod, check_encoder

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MOST_FEATURES = 1 << 16  # numbers per feature that a server accepts; the largest encoders have some thousands
MOST_IMAGES = 1 << 40


class PooledConfig(EncoderConfig):
    """The encoder, and whose class frequencies the head assumes."""

    hierarchy: bool = Field(
        False, description="false: the feature of the whole image (papers); true: the mean over it and its windows"
    )
    prior: Literal["global", "local"] = Field(
        "global", description="class frequencies behind the head: all clients' (papers), or moved to the client's own"
    )

    def features(self, client: Client, ctx: Context) -> Tensor:
        """One feature per image, [n,D]."""
        return self.tokens(client, ctx).mean(1)  # without windows there is one token


PooledT = TypeVar("PooledT", bound=PooledConfig)


class PooledMethod(FeatureMethod[PooledT]):
    """A method whose reply is one linear head on pooled features."""

    def _reply(self, weight: Tensor, bias: Tensor, counts: Tensor, encoder: Mapping[str, Any]) -> Reply:
        """The head, and the class counts behind it only where the client has to move the prior."""
        tensors = {"weight": weight.float(), "bias": bias.float()}
        if self.config.prior == "local":
            tensors["class_counts"] = counts.long()
        return Reply(tensors, {"encoder": dict(encoder)})

    def personalize(self, client: Client, reply: Reply, ctx: Context) -> Predictor:
        """The head as it is, or under the client's own class frequencies."""
        import torch

        encoder = self.config.description(ctx)
        check_encoder(reply.info["encoder"], encoder)
        weight, bias = reply.tensors["weight"], reply.tensors["bias"]
        if self.config.prior == "local":
            own = torch.tensor(client.class_counts(len(ctx.task.classes)))
            bias = steps.prior_shift.shift_prior(bias, reply.tensors["class_counts"], own)
        if not self.config.hierarchy:
            return Predictor(ctx.task, ("linear",), ({"head.weight": weight, "head.bias": bias},), encoder=encoder)
        # A query of zeros weighs all tokens alike: attention pooling is then their mean.
        width = weight.shape[1]
        mean = {"query.vector": torch.zeros(width), "key.weight": torch.zeros(width, width)}
        state = {**mean, "value.weight": torch.eye(width), "head.weight": weight, "head.bias": bias}
        return Predictor(ctx.task, ("attention",), (state,), encoder=encoder)


def check_tensors(upload: Upload, expected: Mapping[str, tuple[torch.dtype, int]]) -> None:
    """Exactly these tensors, each of this type and number of axes, finite; a stranger's file may hold anything."""
    import torch

    if set(upload.tensors) != set(expected):
        wanted, found = ", ".join(sorted(expected)), ", ".join(sorted(upload.tensors))[:200]
        raise UploadError("tensor_names", f"{upload.client!r} should send {wanted}; it sent {found or 'nothing'}")
    for name, (dtype, axes) in expected.items():
        tensor = upload.tensors[name]
        if tensor.dtype != dtype or tensor.ndim != axes:
            found = f"{tensor.dtype} with {tensor.ndim} axes"
            raise UploadError("tensor_type", f"{upload.client!r}: {name} is {found}, not {dtype} with {axes}")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise UploadError("non_finite", f"{upload.client!r} sent NaN or infinite values in {name!r}")


def check_shape(upload: Upload, name: str, shape: tuple[int, ...]) -> None:
    """The one shape that fits the other tensors."""
    if tuple(upload.tensors[name].shape) != shape:
        found = tuple(upload.tensors[name].shape)
        raise UploadError("tensor_shape", f"{upload.client!r}: {name} has shape {found}, expected {shape}")


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
