"""FedCGS (Guan et al., AAAI 2025): sums of features add up to the classifier that pooling would have given.

Each client sends the class sums and the second moments of a frozen encoder's features. The server adds them and writes
down a Gaussian classifier; nothing is trained, and how the images were dealt out cannot matter. Differences to the
paper: docs/methods/fedcgs.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from fedbicross import steps
from fedbicross.methods.families import MomentsMethod
from fedbicross.parts.settings import MomentsConfig

if TYPE_CHECKING:
    from fedbicross.steps.sufficient_statistics import LinearHead, Statistics


class FedCGSConfig(MomentsConfig):
    """The covariance of the Gaussian classifier."""

    covariance: Literal["total", "within"] = Field(
        "total", description="Σ about the mean of all images (authors' code), or about the class means (as in LDA)"
    )


class FedCGS(MomentsMethod[FedCGSConfig]):
    """One Gaussian classifier for everyone, from additive statistics."""

    name = "fedcgs"
    summary = "Gaussian classifier from added-up feature statistics of a frozen encoder (AAAI 2025)"
    Config = FedCGSConfig
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

    def solve(self, total: Statistics) -> LinearHead:
        """Mean and covariance, and the classifier that they write down."""
        config = self.config
        return steps.sufficient_statistics.gaussian_head(
            total, kind=config.covariance, ridge=config.ridge, prior="counts"
        )
