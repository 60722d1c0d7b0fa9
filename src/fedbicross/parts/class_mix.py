"""A model under the class mix of the patients it is asked about, which unlabelled images of them tell."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fedbicross.bundle import validate
from fedbicross.engine.combine import log_prior
from fedbicross.errors import MethodError
from fedbicross.messages import Predictor
from fedbicross.parts.gate import log_probabilities
from fedbicross.steps.gate import estimate_prior
from fedbicross.steps.prior_shift import fit_temperature

if TYPE_CHECKING:
    import numpy as np

    from fedbicross.context import Context, Store
    from fedbicross.messages import Client

FLATNESS = 0.3  # e of the mix (1-e) pi + e/C that a calibrated model answers under at first


def calibrated(client: Client, shared: Predictor, ctx: Context) -> Predictor:
    """A network without a class mix in it, as sure as the client's validation images allow, under the client's mix.

    ``adapt_prior`` can exchange that mix. Until it does, no class is impossible in it.
    """
    validate.check_predictor(shared)  # it came from elsewhere, and is asked here before anybody else looks at it
    rows, classes = ctx.validation_rows(client), len(ctx.task.classes)
    counts = torch.tensor(client.class_counts(classes))
    temperature = 1.0
    if len(rows):
        scores = log_probabilities(shared, client.images[rows], ctx)
        temperature = fit_temperature(scores, torch.from_numpy(client.labels[rows]), log_prior(counts))
    else:
        ctx.record.warn(
            f"{client.label}: no validation images to calibrate the shared model on; it stays as sure as it is"
        )
    table = {"columns": ["validation images", "temperature"], "rows": [[len(rows), round(temperature, 4)]]}
    ctx.record.add("tables", f"{client.label}: how sure the shared model may be", table)
    weights = torch.full((1, classes), 1 / temperature)
    mix = log_prior(counts, FLATNESS).float()
    return Predictor(ctx.task, shared.architectures, shared.states, "consensus", weights, log_prior=mix)


def adapt_prior(predictor: Predictor, images: np.ndarray, device: str = "cpu", store: Store | None = None) -> Predictor:
    """The same model under the class mix of these unlabelled images, by expectation maximisation.

    One image is added to every class: so few images cannot show that a class does not exist. Only a model whose whole
    class mix is its ``log_prior`` can be given another one: a single network with such a table, and no referral.
    """
    if predictor.log_prior is None or len(predictor.states) != 1 or predictor.referral is not None:
        text = (
            "only one network with its class mix beside it can be given another mix, such as that of primum:estimated"
        )
        raise MethodError("no_class_mix", text)
    if not len(images):
        raise MethodError("no_images", "a class mix cannot be estimated from no images")
    # A temperature belongs to the answers under the mix that it was fitted with.
    uniform = replace(predictor, log_prior=None, temperature=1.0)
    answers = torch.from_numpy(uniform.probabilities(images, device, store=store))
    mix = estimate_prior(answers, torch.full((answers.shape[1],), 1 / answers.shape[1]))
    return replace(uniform, log_prior=log_prior(len(images) * mix + 1).float())
