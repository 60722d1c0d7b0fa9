"""Centralised: one network trained on everybody's images. An upper bound that no federation could run."""

from __future__ import annotations

from collections.abc import Sequence

from fedbicross.context import Context
from fedbicross.errors import MethodError
from fedbicross.messages import Client, Predictor, Reply, Upload
from fedbicross.methods.base import Method, MethodConfig


class Centralised(Method[MethodConfig]):
    """``simulate`` hands ``personalize`` one imaginary client that holds all images; no server is involved."""

    name = "centralised"
    summary = "upper bound: one network on the pooled images, not federated"
    others_receive = "every_upload"
    role = "upper_bound"
    pools_data = True
    upload_summary = "Every image and label: not federated, shown only as an upper bound."
    mixed_models_error = None  # the pooled network has the server's architecture

    def upload(self, client: Client, ctx: Context, previous: Reply | None = None) -> Upload:
        """Refused: pooling images is what a federation exists to avoid."""
        raise MethodError("not_federated", "centralised pools the images and exists only inside a simulation")

    def fuse(self, uploads: Sequence[Upload], ctx: Context) -> list[Reply]:
        """Refused, as above."""
        raise MethodError("not_federated", "centralised pools the images and exists only inside a simulation")

    def personalize(self, client: Client, reply: Reply, ctx: Context) -> Predictor:
        """The network trained on the pooled images by the same recipe."""
        trained = ctx.openly.local_model(client)  # no upload, no noise
        return Predictor(ctx.task, (trained.architecture,), (trained.state,))
