"""Own model or shared model? What a client may change of its own answers, and what must be shown before it does.

Two rules, each with a statement about the client's own patients that does not rest on any setting:

**Mixture**, for the classes that the client sees:
``log p(c|x) = w log p_own(c|x) + (1-w) [log p_shared(c|x) + log pi_e(c)]``, pi_e = (1-e) pi + e/C, pi the client's
class mix, which the own model has in it already. Each fifth of the validation images is answered by the mixture (w, e)
with the lowest log-loss on the other four fifths. The own model stays unless these answers have a lower log-loss than
its own by a one-sided paired t-test at 5 %, and are right more often. No image judges a mixture that it has chosen, so
that a shared model which is no better gets in with a probability of about 5 %.

**Referral**, for the classes that it seldom or never sees: an image is answered by the shared model if this is surer
that it shows such a class than it is of that class on any of the client's own images of other classes, by a margin. If
own images and the next patient of the same kind were exchangeable for the shared model, the last of n + 1 of them would
be the highest with probability 1/(n+1), for each seldom class. They nearly are: the shared model was trained on
neither, but learnt from a network that was trained on the own ones; the margin makes up for it. `benchmarks/gates.py`
counts lost answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from scipy.stats import binom, t
from torch import Tensor

from fedbicross.engine.combine import NEVER, NOT_REFERRED, log_prior, referral_odds

SHARES = (0.7, 0.5, 0.3, 0.0)  # w of the mixtures
FLATNESS = (0.01, 0.1, 0.3)  # e of the mixtures
FOLDS = 5
FEWEST = 10  # validation images without which the own model stays
LEVEL = 0.05  # of each test
MARGIN = 0.2  # beyond the highest odds of a class on own images, as a share of their distance to the median
SELDOM = 0.01  # share of a client's images below which it hardly knows a class


@dataclass(frozen=True)
class Choice:
    """The mixture (w, e) that was chosen, and how what the folds chose compares with the own model; w = 1: that stays.

    ``gain`` is in nats of log-loss for each validation image, ``chance`` the p-value of the paired t-test.
    """

    share: float
    images: int
    flatness: float = FLATNESS[-1]
    gain: float = 0.0
    chance: float = 1.0
    won: int = 0  # right where the own model is wrong
    lost: int = 0  # the reverse


def mixed(own: Tensor, shared: Tensor, counts: Tensor, share: float, flatness: float) -> Tensor:
    """The mixture's log-probabilities [n,C] from those of both models."""
    return (share * own + (1 - share) * (shared + log_prior(counts, flatness).to(shared))).log_softmax(1)


def choose(own: Tensor, shared: Tensor, labels: Tensor, counts: Tensor) -> Choice:
    """The mixture by the rule above, from log-probabilities [n,C] on validation images."""
    images = len(labels)
    if images < FEWEST:
        return Choice(1.0, images)
    mixtures = list(product(SHARES, FLATNESS))
    answers = torch.stack([own, *(mixed(own, shared, counts, *mixture) for mixture in mixtures)])
    loss = -answers[:, torch.arange(images), labels]
    right = answers.argmax(2) == labels
    fold = torch.arange(images) % FOLDS
    chosen = torch.stack([1 + loss[1:, fold != left_out].mean(1).argmin() for left_out in range(FOLDS)])[fold]
    gains, found = loss[0] - loss[chosen, torch.arange(images)], right[chosen, torch.arange(images)]
    won, lost = int((found & ~right[0]).sum()), int((right[0] & ~found).sum())
    gain, error = float(gains.mean()), float(gains.std()) / images**0.5
    chance = float(t.sf(gain / error, images - 1)) if error > 0 else 1.0
    share, flatness = mixtures[int(loss[1:].mean(1).argmin())] if chance < LEVEL and won > lost else (1.0, FLATNESS[-1])
    return Choice(share, images, flatness, gain, chance, won, lost)


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
