"""A client's own network as the model that it would use alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fedbicross.engine.combine import log_prior
from fedbicross.exchange import Predictor

if TYPE_CHECKING:
    from fedbicross.context import Context
    from fedbicross.exchange import Client


def own_model(client: Client, ctx: Context) -> Predictor:
    """The network trained alone; where its training kept the class mix out, that mix is added back."""
    trained = ctx.local_model(client)
    if not ctx.training.balanced:
        return Predictor(ctx.task, (trained.architecture,), (trained.state,))
    counts = torch.tensor(client.class_counts(len(ctx.task.classes)))
    weights = torch.ones(1, len(ctx.task.classes))
    prior = log_prior(counts).float()
    return Predictor(ctx.task, (trained.architecture,), (trained.state,), "consensus", weights, log_prior=prior)
