"""Centralised head: one classifier on the frozen features of everybody's images. An upper bound, not a federation."""

from __future__ import annotations

from collections.abc import Sequence

from fedbicross import parts
from fedbicross.context import Context
from fedbicross.errors import MethodError
from fedbicross.messages import Client, Predictor, Reply, Upload
from fedbicross.methods.base import Method
from fedbicross.parts.settings import HeadConfig


class CentralisedHead(Method[HeadConfig]):
    """``simulate`` hands ``personalize`` one imaginary client that holds all images; no server is involved."""

    name = "centralised_head"
    summary = "upper bound for methods on features: one classifier on the pooled features, not federated"
    others_receive = "every_upload"
    role = "upper_bound"
    pools_data = True
    Config = HeadConfig
    quick_settings = {"encoder": "tiny", "batch": 64, "epochs_classifier": 30, "lr_classifier": 1e-3}
    upload_summary = "Every image and label: not federated, shown only as an upper bound."
    uses_local_models = False
    mixed_models_error = None  # features of a frozen encoder depend on nobody's network

    def upload(self, client: Client, ctx: Context, previous: Reply | None = None) -> Upload:
        """Refused: pooling images is what a federation exists to avoid."""
        raise MethodError("not_federated", "centralised_head pools the images and exists only inside a simulation")

    def fuse(self, uploads: Sequence[Upload], ctx: Context) -> list[Reply]:
        """Refused, as above."""
        raise MethodError("not_federated", "centralised_head pools the images and exists only inside a simulation")

    def personalize(self, client: Client, reply: Reply, ctx: Context) -> Predictor:
        """The classifier on the pooled features by the same recipe."""
        return parts.heads.local_predictor(self.config, client, ctx)
