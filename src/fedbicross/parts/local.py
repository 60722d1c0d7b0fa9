"""What a client would use if it trained alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fedbicross.engine.combine import log_prior
from fedbicross.messages import Predictor

if TYPE_CHECKING:
    from fedbicross.context import Context
    from fedbicross.messages import Client


def own_model(client: Client, ctx: Context, loss: str | None) -> Predictor:
    """The network trained alone with this loss (none: the recipe's), or both networks with their answers averaged.

    A network whose training kept the client's class mix out of it has that mix added back: log p(c) + log pi(c).
    """
    classes = len(ctx.task.classes)
    if loss == "both":
        pair = [own_model(client, ctx, which) for which in ("cross_entropy", "balanced")]
        architectures, states = pair[0].architectures + pair[1].architectures, pair[0].states + pair[1].states
        assert pair[1].log_prior is not None
        weights, prior = torch.full((2, classes), 0.5), pair[1].log_prior / 2
        return Predictor(ctx.task, architectures, states, "consensus", weights, log_prior=prior)
    ctx = ctx.openly.with_loss(loss)  # it stays at home
    trained = ctx.local_model(client)
    if not ctx.training.balanced:
        return Predictor(ctx.task, (trained.architecture,), (trained.state,))
    prior = log_prior(torch.tensor(client.class_counts(classes))).float()
    weights = torch.ones(1, classes)
    return Predictor(ctx.task, (trained.architecture,), (trained.state,), "consensus", weights, log_prior=prior)
