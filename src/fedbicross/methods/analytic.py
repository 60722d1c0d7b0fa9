"""Analytic: the ridge regression that pooling would have given, from sums, with differential privacy where wanted.

Each client sends counts, class sums and the sum of products of a frozen encoder's features, each feature shortened to a
longest norm. The server adds them up and solves one linear system. Without noise the result is that of the pooled
images, however they were dealt out. The sums are as FedCGS's; what differs is the head. docs/methods/analytic.md.
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


class AnalyticConfig(MomentsConfig):
    """The head, and how far it is held back."""

    clip: float | None = Field(
        1.0,
        gt=0,
        le=1e6,
        description="longest feature; a longer one is shortened to it (encoders give longer ones: all become as long)",
    )
    head: Literal["ridge", "lda"] = Field(
        "ridge", description="least squares of one-hot labels, or linear discriminant analysis"
    )


class Analytic(Method[AnalyticConfig]):
    """One linear head for everyone, solved for."""

    name = "analytic"
    summary = "ours: ridge regression solved from added-up feature statistics, private where wanted"
    Config = AnalyticConfig
    needs = frozenset({"weights", "class_counts"})  # sums, and what to divide them by
    others_receive = "one_model"
    extra_keys = frozenset({"encoder"})
    uses_local_models = False
    mixed_models_error = None  # features of a frozen encoder depend on nobody's network
    variants = {
        "lda": {"head": "lda"},
        "private": {"epsilon": 1.0, "projection": 256},
        "local_prior": {"head": "lda", "prior": "local"},
    }
    variant_notes = {
        "lda": "linear discriminant analysis: one Gaussian a class, one covariance within classes",
        "private": "ε = 1 for every image of a client, on 256 random directions of the features",
        "local_prior": "linear discriminant analysis under the client's own class frequencies",
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
        """Sums that some images could have."""
        self.check_extra(upload)
        parts.moments.check_upload(self.config, upload)

    def must_agree(self, upload: Upload) -> dict[str, Any]:
        """The encoder, and how many numbers a feature has."""
        return {"encoder_mismatch": upload.extra["encoder"], "feature_width": upload.tensors["class_sums"].shape[1]}

    def fuse(self, uploads: Sequence[Upload], ctx: Context) -> list[Reply]:
        """Add up, and solve."""
        config, encoder = self.config, parts.features.same_encoder(uploads)
        head, total = parts.moments.head(config, uploads, ctx, self._solve)
        reply = parts.pooled.reply(config, head.weight, head.bias, total.counts, encoder, self.gated)
        return [reply for _ in uploads]

    def _solve(self, total: Statistics) -> LinearHead:
        if self.config.head == "ridge":
            return steps.sufficient_statistics.ridge_head(total, ridge=self.config.ridge)
        return steps.sufficient_statistics.gaussian_head(total, kind="within", ridge=self.config.ridge, prior="counts")

    def personalize(self, client: Client, reply: Reply, ctx: Context) -> Predictor:
        """The head as it is, or under the client's own class frequencies."""
        return parts.pooled.predictor(self.config, client, reply, ctx, self.gated)
