"""Analytic: the ridge regression that pooling would have given, from sums, with differential privacy where wanted.

Each client sends counts, class sums and the sum of products of a frozen encoder's features, each feature shortened to a
longest norm. The server adds them up and solves one linear system. Without noise the result is that of the pooled
images, however they were dealt out. The sums are as FedCGS's; what differs is the head. docs/methods/analytic.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from fedbicross import steps
from fedbicross.methods.families import MomentsMethod
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


class Analytic(MomentsMethod[AnalyticConfig]):
    """One linear head for everyone, solved for."""

    name = "analytic"
    summary = "ours: ridge regression solved from added-up feature statistics, private where wanted"
    Config = AnalyticConfig
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

    def solve(self, total: Statistics) -> LinearHead:
        """Least squares, or Gaussians with one covariance."""
        if self.config.head == "ridge":
            return steps.sufficient_statistics.ridge_head(total, ridge=self.config.ridge)
        return steps.sufficient_statistics.gaussian_head(total, kind="within", ridge=self.config.ridge, prior="counts")
