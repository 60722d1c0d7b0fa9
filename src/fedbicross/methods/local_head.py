"""Local head: a classifier on frozen features, trained alone. The bar for every method on features."""

from __future__ import annotations

from collections.abc import Sequence

from fedbicross import parts
from fedbicross.context import Context
from fedbicross.messages import Client, Predictor, Reply, Upload
from fedbicross.methods.base import Method
from fedbicross.parts.settings import HeadConfig


class LocalHead(Method[HeadConfig]):
    """Each hospital keeps the classifier that it trained on the features of its own images."""

    name = "local_head"
    summary = "each client's own classifier on frozen features, no federation (the bar for methods on features)"
    others_receive = "nothing"
    role = "baseline"
    Config = HeadConfig
    quick_settings = {"encoder": "tiny", "batch": 64, "epochs_classifier": 30, "lr_classifier": 1e-3}
    upload_summary = "Nothing."
    uses_local_models = False
    mixed_models_error = None  # features of a frozen encoder depend on nobody's network

    def upload(self, client: Client, ctx: Context, previous: Reply | None = None) -> Upload:
        """Nothing leaves."""
        return Upload(client.name, ctx.task_of(client))

    def fuse(self, uploads: Sequence[Upload], ctx: Context) -> list[Reply]:
        """Nothing comes back."""
        return [Reply() for _ in uploads]

    def personalize(self, client: Client, reply: Reply, ctx: Context) -> Predictor:
        """The client's own classifier: the very one that FALCON sends."""
        return parts.heads.local_predictor(self.config, client, ctx)
