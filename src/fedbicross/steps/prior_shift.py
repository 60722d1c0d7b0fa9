"""One head, another hospital's class mix: Bayes' rule moves the logits by the log ratio of the priors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from torch import Tensor

SHARPEST = 2.0  # 1/τ, and τ: images that are all named rightly, as those of one class, would have it grow without end


def shift_prior(bias: Tensor, trained_on: Tensor, own: Tensor, smoothing: float = 1.0) -> Tensor:
    """b_c + log(π_own,c / π_trained,c): the same p(x|c) under the client's own class frequencies.

    ``trained_on`` and ``own`` are counts [C]. ``smoothing`` images are added to every class of the client, so that a
    class which it has not met yet stays possible. A class that the head was not trained on keeps its bias.
    """
    given, mine = trained_on.double(), own.double() + smoothing
    known = given > 0
    ratio = (mine / mine.sum()).log() - (given / given.sum()).clamp_min(1e-300).log()
    return torch.where(known, bias.double() + ratio, bias.double()).to(bias.dtype)


def fit_temperature(log_probabilities: Tensor, labels: Tensor, log_prior: Tensor, flattest: float = SHARPEST) -> float:
    """τ for which p(c|x)^(1/τ) π(c), renormalised, is least surprised by the labels: Σ -log p(y|x) is lowest.

    ``log_probabilities`` [n,C] are those of a model without a class mix in it, ``log_prior`` [C] is the mix of the
    labelled images. The sum is convex in 1/τ, so that a search along a line finds the one minimum, from 1/2 to
    ``flattest``.
    """
    scores, prior = log_probabilities.double(), log_prior.double()

    def surprise(sharpness: float) -> float:
        return float(F.cross_entropy(sharpness * scores + prior, labels))

    found = minimize_scalar(surprise, bounds=(1 / flattest, SHARPEST), method="bounded", options={"xatol": 1e-6})
    return 1 / float(found.x)
