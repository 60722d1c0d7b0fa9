"""Centralised: one network trained on everybody's images. An upper bound that no federation could run."""

from __future__ import annotations

from fedbicross.context import Context
from fedbicross.messages import Client, Predictor, Reply
from fedbicross.methods.base import MethodConfig
from fedbicross.methods.families import PooledDataMethod


class Centralised(PooledDataMethod[MethodConfig]):
    """One network for all images."""

    name = "centralised"
    summary = "upper bound: one network on the pooled images, not federated"
    mixed_models_error = None  # the pooled network has the server's architecture

    def personalize(self, client: Client, reply: Reply, ctx: Context) -> Predictor:
        """The network trained on the pooled images by the same recipe."""
        trained = ctx.openly.local_model(client)  # no upload, no noise
        return Predictor(ctx.task, (trained.architecture,), (trained.state,))
