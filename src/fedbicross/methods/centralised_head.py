"""Centralised head: one classifier on the frozen features of everybody's images. An upper bound, not a federation."""

from __future__ import annotations

from fedbicross import parts
from fedbicross.context import Context
from fedbicross.messages import Client, Predictor, Reply
from fedbicross.methods.families import PooledDataMethod
from fedbicross.parts.settings import HeadConfig


class CentralisedHead(PooledDataMethod[HeadConfig]):
    """One classifier for the features of all images."""

    name = "centralised_head"
    summary = "upper bound for methods on features: one classifier on the pooled features, not federated"
    Config = HeadConfig
    quick_settings = {"encoder": "tiny", "batch": 64, "epochs_classifier": 30, "lr_classifier": 1e-3}
    uses_local_models = False
    mixed_models_error = None  # features of a frozen encoder depend on nobody's network

    def personalize(self, client: Client, reply: Reply, ctx: Context) -> Predictor:
        """The classifier on the pooled features by the same recipe."""
        return parts.heads.local_predictor(self.config, client, ctx)
