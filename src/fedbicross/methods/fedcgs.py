"""FedCGS (Guan et al., AAAI 2025): sums of features add up to the classifier that pooling would have given.

Each client sends the class sums and the second moments of a frozen encoder's features. The server adds them and writes
down a Gaussian classifier; nothing is trained, and how the images were dealt out cannot matter. Differences to the
paper: docs/methods/fedcgs.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from fedbicross import parts, steps
from fedbicross.context import Context
from fedbicross.errors import MethodError, UploadError
from fedbicross.lazy_torch import torch
from fedbicross.messages import Client, Predictor, Reply, Upload
from fedbicross.methods.base import Method
from fedbicross.parts.settings import PooledConfig

if TYPE_CHECKING:
    from fedbicross.steps.sufficient_statistics import Statistics


class FedCGSConfig(PooledConfig):
    """The covariance of the Gaussian classifier."""

    covariance: Literal["total", "within"] = Field(
        "total", description="Σ about the mean of all images (authors' code), or about the class means (as in LDA)"
    )
    ridge: float = Field(
        1e-3, ge=0, le=100, description="γ: share of the mean variance added to Σ's diagonal (authors' code: 0)"
    )


class FedCGS(Method[FedCGSConfig]):
    """One Gaussian classifier for everyone, from additive statistics."""

    name = "fedcgs"
    summary = "Gaussian classifier from added-up feature statistics of a frozen encoder (AAAI 2025)"
    others_receive = "one_model"
    Config = FedCGSConfig
    needs = frozenset({"weights", "class_counts"})  # sums, and what to divide them by
    upload_summary = (
        "For each class the number of images and the sum of their features, and the sum over all images of the "
        "products of features; the sum of a class with one image is that image's feature."
    )
    extra_keys = frozenset({"encoder"})
    uses_local_models = False
    mixed_models_error = None  # features of a frozen encoder depend on nobody's network
    variants = {
        "within": {"covariance": "within"},
        "local_prior": {"prior": "local"},
        "hierarchy": {"hierarchy": True},
    }
    variant_notes = {
        "within": "covariance within classes, as in linear discriminant analysis",
        "local_prior": "ours: the same Gaussians under the client's own class frequencies",
        "hierarchy": "ours: mean over the whole image and its windows, FALCON's views without its generator",
    }
    quick_settings = {"encoder": "tiny"}

    @property
    def gate_problem(self) -> str:
        """Nothing, unless the head is the client's already."""
        return parts.pooled.gate_problem(self.config)

    @property
    def reply_serves_gate(self) -> bool:
        """The class counts behind the head, so that the client can take the prior out of it."""
        return True

    def upload(self, client: Client, ctx: Context, previous: Reply | None = None) -> Upload:
        """Counts, class sums and Σ f fᵀ in float64."""
        classes = ctx.task.classes
        x = parts.pooled.features(self.config, client, ctx)
        found = steps.sufficient_statistics.statistics(x, torch.from_numpy(client.labels), len(classes))
        counts = client.class_counts(len(classes))
        alone = [name for name, count in zip(classes, counts, strict=True) if count == 1]
        if alone:
            names = ", ".join(alone)
            ctx.record.warn(f"{client.label} has one image of {names}: its class sum is that image's feature")
        ctx.record.flops += 2 * len(x) * x.shape[1] * (x.shape[1] + len(classes))
        tensors = {
            "class_sums": found.class_sums,
            "gram": steps.sufficient_statistics.pack_triangle(found.gram),
        }
        extra = {"encoder": parts.features.describe(self.config, ctx)}
        return Upload(client.name, ctx.task_of(client), tensors, class_counts=counts, extra=extra)

    def check_upload(self, upload: Upload) -> None:
        """Sums that some images could have: the right shapes, finite, and within the bounds that squares obey."""
        self.check_extra(upload)
        check, wide = parts.features, torch.float64
        check.check_tensors(upload, {"class_sums": (wide, (None, None)), "gram": (wide, (None,))})
        counts = torch.tensor(check.check_counts(upload), dtype=wide)
        sums = upload.tensors["class_sums"]
        width = sums.shape[1]
        check.check_width(upload, width)
        sizes = {"class_sums": (wide, (len(counts), width)), "gram": (wide, (width * (width + 1) // 2,))}
        check.check_tensors(upload, sizes)
        if bool((sums[counts == 0] != 0).any()):
            raise UploadError("bad_statistics", f"{upload.client!r} sent a sum for a class of which it has no image")
        # The diagonal of a packed lower triangle. Cauchy-Schwarz: (Σ_c f)² ≤ n_c Σ_c f², summed over classes.
        index = torch.arange(1, width + 1)
        squares = upload.tensors["gram"][index * (index + 1) // 2 - 1]
        least = (sums.square() / counts.clamp_min(1)[:, None]).sum(0)
        if bool((squares < least - 1e-6 * least.abs() - 1e-9).any()):
            raise UploadError("bad_statistics", f"{upload.client!r}: its second moments contradict its class sums")
        check.check_described(upload, self.config)
        check.check_magnitude(upload, float(counts.sum().clamp_min(1)) * check.MOST**2)
        within = steps.sufficient_statistics.scatter_within(_statistics(upload, width))
        lowest, highest = (float(value) for value in torch.linalg.eigvalsh(within)[[0, -1]])
        if lowest < -1e-6 * max(highest, float(squares.max())):
            raise UploadError("bad_statistics", f"{upload.client!r}: no images have second moments like its own")

    def must_agree(self, upload: Upload) -> dict[str, Any]:
        """The encoder, and how many numbers a feature has."""
        return {"encoder_mismatch": upload.extra["encoder"], "feature_width": upload.tensors["class_sums"].shape[1]}

    def fuse(self, uploads: Sequence[Upload], ctx: Context) -> list[Reply]:
        """Add up, estimate mean and covariance, write down the classifier."""
        encoder, width = parts.features.same_encoder(uploads), parts.features.same_width(uploads, "class_sums")
        total = steps.sufficient_statistics.add([_statistics(upload, width) for upload in uploads])
        if not float(total.counts.sum()):
            raise MethodError("no_images", "no client has an image")
        head = steps.sufficient_statistics.gaussian_head(
            total, kind=self.config.covariance, ridge=self.config.ridge, prior="counts"
        )
        absent = [name for name, n in zip(ctx.task.classes, total.counts, strict=True) if not n]
        if absent:
            ctx.record.warn(f"nobody has images of {', '.join(absent)}: never predicted")
        ctx.record.add("scalars", "images behind the statistics", int(total.counts.sum()))
        ctx.record.flops += round(width**3 / 3) + 2 * width**2 * len(total.counts)
        reply = parts.pooled.reply(self.config, head.weight, head.bias, total.counts, encoder, self.gated)
        return [reply for _ in uploads]

    def personalize(self, client: Client, reply: Reply, ctx: Context) -> Predictor:
        """The head as it is, or under the client's own class frequencies."""
        return parts.pooled.predictor(self.config, client, reply, ctx, self.gated)


def _statistics(upload: Upload, width: int) -> Statistics:
    return steps.sufficient_statistics.Statistics(
        torch.tensor(list(upload.class_counts or ()), dtype=torch.float64),
        upload.tensors["class_sums"],
        steps.sufficient_statistics.unpack_triangle(upload.tensors["gram"], width),
    )
