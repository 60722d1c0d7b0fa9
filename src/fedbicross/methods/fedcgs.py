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
from fedbicross.messages import Client, Predictor, Reply, Upload
from fedbicross.methods.base import Method
from fedbicross.parts.settings import MomentsConfig

if TYPE_CHECKING:
    from fedbicross.steps.sufficient_statistics import LinearHead, Statistics


class FedCGSConfig(MomentsConfig):
    """The covariance of the Gaussian classifier."""

    covariance: Literal["total", "within"] = Field(
        "total", description="Σ about the mean of all images (authors' code), or about the class means (as in LDA)"
    )


class FedCGS(Method[FedCGSConfig]):
    """One Gaussian classifier for everyone, from additive statistics."""

    name = "fedcgs"
    summary = "Gaussian classifier from added-up feature statistics of a frozen encoder (AAAI 2025)"
    others_receive = "one_model"
    Config = FedCGSConfig
    needs = frozenset({"weights", "class_counts"})  # sums, and what to divide them by
    extra_keys = frozenset({"encoder"})
    uses_local_models = False
    mixed_models_error = None  # features of a frozen encoder depend on nobody's network
    variants = {
        "within": {"covariance": "within"},
        "local_prior": {"prior": "local"},
        "hierarchy": {"hierarchy": True},
        "private": {"epsilon": 1.0, "clip": 1.0, "projection": 256},
    }
    variant_notes = {
        "within": "covariance within classes, as in linear discriminant analysis",
        "local_prior": "ours: the same Gaussians under the client's own class frequencies",
        "hierarchy": "ours: mean over the whole image and its windows, FALCON's views without its generator",
        "private": "ours: ε = 1 for every image of a client, by noise on all sums",
    }
    quick_settings = {"encoder": "tiny"}

    @property
    def upload_summary(self) -> str:
        """What leaves the hospital."""
        return self.config.upload_summary

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
        return parts.moments.upload(self.config, client, ctx)

    def check_upload(self, upload: Upload) -> None:
        """Sums that some images could have: the right shapes, finite, and within the bounds that squares obey."""
        self.check_extra(upload)
        parts.moments.check_upload(self.config, upload)

    def must_agree(self, upload: Upload) -> dict[str, Any]:
        """The encoder, and how many numbers a feature has."""
        return {"encoder_mismatch": upload.extra["encoder"], "feature_width": upload.tensors["class_sums"].shape[1]}

    def fuse(self, uploads: Sequence[Upload], ctx: Context) -> list[Reply]:
        """Add up, estimate mean and covariance, write down the classifier."""
        config, encoder = self.config, parts.features.same_encoder(uploads)
        head, total = parts.moments.head(config, uploads, ctx, self._solve)
        reply = parts.pooled.reply(self.config, head.weight, head.bias, total.counts, encoder, self.gated)
        return [reply for _ in uploads]

    def _solve(self, total: Statistics) -> LinearHead:
        config = self.config
        return steps.sufficient_statistics.gaussian_head(
            total, kind=config.covariance, ridge=config.ridge, prior="counts"
        )

    def personalize(self, client: Client, reply: Reply, ctx: Context) -> Predictor:
        """The head as it is, or under the client's own class frequencies."""
        return parts.pooled.predictor(self.config, client, reply, ctx, self.gated)
