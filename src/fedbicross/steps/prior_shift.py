"""One head, another hospital's class mix: Bayes' rule moves the logits by the log ratio of the priors."""

from __future__ import annotations

import torch
from torch import Tensor


def shift_prior(bias: Tensor, trained_on: Tensor, own: Tensor, smoothing: float = 1.0) -> Tensor:
    """b_c + log(π_own,c / π_trained,c): the same p(x|c) under the client's own class frequencies.

    ``trained_on`` and ``own`` are counts [C]. ``smoothing`` images are added to every class of the client, so that a
    class which it has not met yet stays possible. A class that the head was not trained on keeps its bias.
    """
    given, mine = trained_on.double(), own.double() + smoothing
    known = given > 0
    ratio = (mine / mine.sum()).log() - (given / given.sum()).clamp_min(1e-300).log()
    return torch.where(known, bias.double() + ratio, bias.double()).to(bias.dtype)
