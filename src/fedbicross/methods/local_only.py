"""Local only: train alone. The bar that taking part in a federation has to clear."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fedbicross import parts
from fedbicross.context import Context
from fedbicross.messages import Client, Predictor, Reply
from fedbicross.methods.base import MethodConfig
from fedbicross.methods.families import AloneMethod


class LocalOnlyConfig(MethodConfig):
    """How the network is trained."""

    loss: Literal["cross_entropy", "balanced", "both"] | None = Field(
        None,
        description="of the training; balanced: the client's class mix is added back when it predicts; both: two "
        "networks, averaged; none: the run's recipe",
    )


class LocalOnly(AloneMethod[LocalOnlyConfig]):
    """Each hospital keeps the network that it trained on its own images."""

    name = "local_only"
    summary = "each client's own network, no federation (the bar)"
    Config = LocalOnlyConfig
    variants = {"balanced": {"loss": "balanced"}, "both": {"loss": "both"}}
    variant_notes = {
        "balanced": "trained with all classes weighing alike, own class mix added back (what primum uploads)",
        "both": "that network and the one of plain cross-entropy, averaged (what primum starts from at home)",
    }

    @property
    def loss(self) -> str | None:
        """As the settings say; of two, the one that needs saying."""
        return "balanced" if self.config.loss == "both" else self.config.loss

    @property
    def uses_local_models(self) -> bool:
        """That is all it does."""
        return True

    def personalize(self, client: Client, reply: Reply, ctx: Context) -> Predictor:
        """The client's own network."""
        return parts.local.own_model(client, ctx, self.config.loss)
