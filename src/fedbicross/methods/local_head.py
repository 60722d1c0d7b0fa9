"""Local head: a classifier on frozen features, trained alone. The bar for every method on features."""

from __future__ import annotations

from fedbicross import parts
from fedbicross.context import Context
from fedbicross.messages import Client, Predictor, Reply
from fedbicross.methods.families import AloneMethod
from fedbicross.parts.settings import HeadConfig


class LocalHead(AloneMethod[HeadConfig]):
    """Each hospital keeps the classifier that it trained on the features of its own images."""

    name = "local_head"
    summary = "each client's own classifier on frozen features, no federation (the bar for methods on features)"
    Config = HeadConfig
    quick_settings = {"encoder": "tiny", "batch": 64, "epochs_classifier": 30, "lr_classifier": 1e-3}
    uses_local_models = False

    def personalize(self, client: Client, reply: Reply, ctx: Context) -> Predictor:
        """The client's own classifier: the very one that FALCON sends."""
        return parts.heads.local_predictor(self.config, client, ctx)
