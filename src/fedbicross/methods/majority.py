"""Majority: always answer the class that this hospital sees most. The floor that any model must beat."""

from __future__ import annotations

from fedbicross.context import Context
from fedbicross.lazy_torch import torch
from fedbicross.messages import Client, Predictor, Reply
from fedbicross.methods.base import MethodConfig
from fedbicross.methods.families import AloneMethod


class Majority(AloneMethod[MethodConfig]):
    """A constant answer; nothing is trained and nothing is sent."""

    name = "majority"
    summary = "always the client's most frequent class (floor)"

    def personalize(self, client: Client, reply: Reply, ctx: Context) -> Predictor:
        """The client's class shares, as probabilities."""
        counts = torch.tensor(client.class_counts(len(ctx.task.classes)), dtype=torch.float32)
        return Predictor(ctx.task, constant=counts / counts.sum())
