"""Own model or shared model? What a client may change of its own answers, and what must be shown before it does.

Two rules, each with a statement about the client's own patients that does not rest on any setting:

**Mixture**, for the classes that the client sees:
``log p(c|x) = w log p_own(c|x) + (1-w) [log p_shared(c|x) + log pi_e(c)]``, pi_e = (1-e) pi + e/C, pi the client's
class mix, which the own model has in it already. From the own model (w = 1) the client moves to the next smaller share
w only if that mixture is right where the last is wrong more often than the reverse on its validation images, by an
exact one-sided sign test at 5 %. So a shared model that is no better gets in with at most 5 % probability at each of
four tests.

**Referral**, for the classes that it seldom or never sees: an image is answered by the shared model if this is surer
that it shows such a class than it is of that class on any of the client's own images of other classes, by a margin. If
own images and the next patient of the same kind were exchangeable for the shared model, the last of n + 1 of them would
be the highest with probability 1/(n+1), for each seldom class. They nearly are: the shared model was trained on
neither, but learnt from a network that was trained on the own ones; the margin makes up for it. `benchmarks/gates.py`
counts lost answers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy.stats import binom
from torch import Tensor

from fedbicross.engine.combine import NEVER, NOT_REFERRED, log_prior, referral_odds

SHARES = (0.7, 0.5, 0.3, 0.0)  # w, in the order in which they are tried
FLATNESS = 0.3  # e of every mixture
LEVEL = 0.05  # of each sign test
MARGIN = 0.2  # beyond the highest odds of a class on own images, as a share of their distance to the median
SELDOM = 0.01  # share of a client's images below which it hardly knows a class


@dataclass(frozen=True)
class Choice:
    """The own model's share w, and how that mixture compares with the own model on the validation images."""

    share: float
    images: int
    won: int = 0  # right where the own model is wrong
    lost: int = 0  # the reverse


def mixed(own: Tensor, shared: Tensor, counts: Tensor, share: float) -> Tensor:
    """The mixture's log-probabilities [n,C], up to a number for each image, from those of both models."""
    return share * own + (1 - share) * (shared + log_prior(counts, FLATNESS).to(shared))


def choose(own: Tensor, shared: Tensor, labels: Tensor, counts: Tensor) -> Choice:
    """The mixture by the rule above, from log-probabilities [n,C] on validation images."""
    chosen = 1.0
    right = own_right = own.argmax(1) == labels
    for share in SHARES:
        found = mixed(own, shared, counts, share).argmax(1) == labels
        if better_beyond_chance(int((found & ~right).sum()), int((right & ~found).sum())):
            chosen, right = share, found
    return Choice(chosen, len(labels), int((right & ~own_right).sum()), int((own_right & ~right).sum()))


def better_beyond_chance(won: int, lost: int) -> bool:
    """Exact one-sided sign test: would a fair coin win at least ``won`` of all throws with less than 5 %?"""
    return won > lost and float(binom.sf(won - 1, won + lost, 0.5)) < LEVEL


def referral(shared: Tensor, labels: Tensor, counts: Tensor) -> Tensor | None:
    """For each class the odds from which on an image is referred [C], `NOT_REFERRED` for a class that is not seldom.

    ``shared`` are the shared model's log-probabilities [n,C] on all of the client's own images. None where no class is
    seldom, or none that the shared model ever names.
    """
    seldom = (counts < SELDOM * counts.sum()) & (shared > NEVER / 2).any(0)
    common = ~seldom[labels]
    if not bool(seldom.any()) or not bool(common.any()):
        return None
    odds = referral_odds(shared[common], seldom)
    highest, middle = odds.amax(0), odds.median(0).values
    return torch.where(seldom, highest + MARGIN * (highest - middle), NOT_REFERRED)


def estimate_prior(probabilities: Tensor, assumed: Tensor, rounds: int = 1000, tolerance: float = 1e-9) -> Tensor:
    """The class mix [C] of unlabelled images, by expectation maximisation (Saerens et al., 2002), in float64.

    ``probabilities`` [n,C] are a model's under the class mix ``assumed`` [C].
    """
    posterior, assumed = probabilities.double(), assumed.double()
    prior = assumed.clone()
    for _ in range(rounds):
        moved = posterior * (prior / assumed.clamp_min(1e-300))
        new = (moved / moved.sum(1, keepdim=True).clamp_min(1e-300)).mean(0)
        done = float((new - prior).abs().max()) < tolerance
        prior = new
        if done:
            break
    return prior
