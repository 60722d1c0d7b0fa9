"""Majority: always answer the class that this hospital sees most. The floor that any model must beat."""

from __future__ import annotations

from collections.abc import Sequence

from fedbicross.context import Context
from fedbicross.lazy_torch import torch
from fedbicross.messages import Client, Predictor, Reply, Upload
from fedbicross.methods.base import Method, MethodConfig


class Majority(Method[MethodConfig]):
    """A constant answer; nothing is trained and nothing is sent."""

    name = "majority"
    summary = "always the client's most frequent class (floor)"
    others_receive = "nothing"
    role = "baseline"
    upload_summary = "Nothing."
    mixed_models_error = None  # there is no network

    def upload(self, client: Client, ctx: Context, previous: Reply | None = None) -> Upload:
        """Nothing leaves."""
        return Upload(client.name, ctx.task)

    def fuse(self, uploads: Sequence[Upload], ctx: Context) -> list[Reply]:
        """Nothing comes back."""
        return [Reply() for _ in uploads]

    def personalize(self, client: Client, reply: Reply, ctx: Context) -> Predictor:
        """The client's class shares, as probabilities."""
        counts = torch.tensor(client.class_counts(len(ctx.task.classes)), dtype=torch.float32)
        return Predictor(ctx.task, constant=counts / counts.sum())
