"""Own model or shared model? What a client may change of its own answers, and what must be shown before it does.

Two rules, each with a statement about the client's own patients that does not rest on any setting:

**Mixture**, for the classes that the client sees:
``log p(c|x) = w log p_own(c|x) + (1-w) log p_shared(c|x) + log pi_e(c)``, pi_e = (1-e) pi + e/C, pi the client's class
mix. From the own model (w = 1, e = 0) the client moves to the next mixture with a smaller share w only if that one is
right where the last is wrong more often than the reverse on its validation images, by an exact one-sided sign test at
5 %. So a shared model that is no better is not let in with more than 5 % probability at each of four tests.

**Referral**, for the classes that it seldom or never sees: an image is answered by the shared model if this is surer
that it shows such a class than it is on any of the client's own images of other classes. Own images and the next
patient of the same kind are exchangeable for the shared model, which was trained on neither, so of n such images and
one more the last is the highest with probability 1/(n+1): no more of the client's own patients are referred on average.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy.stats import binom
from torch import Tensor

from fedbicross.engine.combine import log_prior, referral_odds

SHARES = (0.7, 0.5, 0.3, 0.0)  # w, in the order in which they are tried
FLATNESS = 0.3  # e of every mixture
LEVEL = 0.05  # of each sign test
SELDOM = 0.01  # share of a client's images below which it hardly knows a class


@dataclass(frozen=True)
class Mixture:
    """How both models are mixed: the own model's share, and how flat the class mix is."""

    share: float = 1.0
    flatness: float = 0.0


OWN = Mixture()


@dataclass(frozen=True)
class Choice:
    """The mixture, and how it compares with the own model on the validation images."""

    mixture: Mixture
    images: int
    won: int = 0  # right where the own model is wrong
    lost: int = 0  # the reverse


def mixed(own: Tensor, shared: Tensor, counts: Tensor, mixture: Mixture, own_has_prior: bool = False) -> Tensor:
    """The mixture's log-probabilities [n,C], up to a number for each image, from those of both models.

    ``own_has_prior``: the own model was trained by plain cross-entropy and has the client's class mix in it already;
    only the shared model's part is then given it.
    """
    w = mixture.share
    prior = log_prior(counts, mixture.flatness).to(own)
    return w * own + (1 - w) * shared + (1 - w if own_has_prior else 1.0) * prior


def choose(own: Tensor, shared: Tensor, labels: Tensor, counts: Tensor, own_has_prior: bool = False) -> Choice:
    """The mixture by the rule above, from log-probabilities [n,C] on validation images."""
    chosen = OWN
    right = own_right = mixed(own, shared, counts, OWN, own_has_prior).argmax(1) == labels
    for share in SHARES:
        mixture = Mixture(share, FLATNESS)
        found = mixed(own, shared, counts, mixture, own_has_prior).argmax(1) == labels
        if better_beyond_chance(int((found & ~right).sum()), int((right & ~found).sum())):
            chosen, right = mixture, found
    return Choice(chosen, len(labels), int((right & ~own_right).sum()), int((own_right & ~right).sum()))


def better_beyond_chance(won: int, lost: int) -> bool:
    """Exact one-sided sign test: would a fair coin win at least ``won`` of all throws with less than 5 %?"""
    return won > lost and float(binom.sf(won - 1, won + lost, 0.5)) < LEVEL


def referral(shared: Tensor, labels: Tensor, counts: Tensor) -> Tensor | None:
    """Which classes are referred [C], as 0 and 1, and from which odds on [1], in one tensor; none if there are none.

    ``shared`` are the shared model's log-probabilities [n,C] on all of the client's own images.
    """
    seldom = counts < SELDOM * counts.sum()
    common = ~seldom[labels]
    if not bool(seldom.any()) or not bool(common.any()):
        return None
    highest = referral_odds(shared[common], seldom).max()
    return torch.cat([seldom.to(highest), highest.view(1)])


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
