"""How sure a finished model may be: one temperature, fitted on labelled images that it was not trained on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fedbicross.messages import Predictor
from fedbicross.steps.prior_shift import fit_temperature

if TYPE_CHECKING:
    import numpy as np

    from fedbicross.context import Store

FLATTEST = 10.0
LEAST_IMAGES = 10  # fewer say nothing about how sure a model may be


def calibrate(
    predictor: Predictor, images: np.ndarray, labels: np.ndarray, device: str = "cpu", store: Store | None = None
) -> Predictor:
    """The same model with the temperature that these images ask for (Guo et al. 2017); its classes stay the same.

    A constant answer, and a model for which there are too few images, stay as they are.
    """
    if predictor.constant is not None or len(labels) < LEAST_IMAGES:
        return predictor
    plain = replace(predictor, temperature=1.0)
    answers = torch.from_numpy(plain.probabilities(images, device, store=store)).double()
    scores = answers.clamp_min(torch.finfo(torch.float32).tiny).log()
    found = fit_temperature(scores, torch.from_numpy(labels), torch.zeros(scores.shape[1]), FLATTEST)
    return replace(plain, temperature=round(found, 4))
