"""Own model or shared model? A mixture of both, chosen on a client's validation images, that must earn its place.

``log p(c|x) = [w log p_own(c|x) + (1-w) log p_shared(c|x)] / t + log pi_e(c)``, pi_e = (1-e) pi + e/C

w is the own model's share, t a temperature, pi the client's class mix and e how far it is flattened. Mixtures are
compared by their log-loss on validation images, which neither model was trained on. The rule:

1. *Choose*: of all mixtures whose log-loss is within one paired standard error of the lowest, the one with the flattest
   class mix, since it does best for patients unlike the client's own; of equals, the one with the lowest log-loss.
2. *Test*: rule 1 is applied five times to four fifths of the images and scored on the last fifth. The mixture replaces
   the own model only if its log-loss there is lower by a one-sided paired t-test at 5 %, and if it gets no fewer of
   these images right. Else the client keeps what it has.

The own model is given its best temperature first, so that a mixture is not accepted for being better calibrated only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import t as student_t
from torch import Tensor

from fedbicross.engine.combine import log_prior

SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # w
TEMPERATURES = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)  # t
FLATNESS = (0.0, 0.001, 0.01, 0.03, 0.1, 0.3, 1.0)  # e
FOLDS = 5
LEVEL = 0.05  # of the test


@dataclass(frozen=True)
class Mixture:
    """One way to mix: the own model's share, the temperature, and how flat the class mix is."""

    share: float = 1.0
    temperature: float = 1.0
    flatness: float = 0.0


OWN = Mixture()
OWN_CALIBRATED = tuple(Mixture(1.0, t, 0.0) for t in TEMPERATURES)
MIXTURES = tuple(Mixture(*values) for values in product(SHARES, TEMPERATURES, FLATNESS))


@dataclass(frozen=True)
class Choice:
    """What was chosen, and what it was chosen by: means over validation images."""

    mixture: Mixture
    accepted: bool
    images: int
    gain: float = 0.0  # of log-loss, over the own model, on images that the choice did not see
    error: float = 0.0  # its standard error
    right_own: int = 0
    right_mixed: int = 0


def mixed(own: Tensor, shared: Tensor, counts: Tensor, mixture: Mixture, own_has_prior: bool = False) -> Tensor:
    """The scores above [n,C], not normalised, from log-probabilities [n,C] of both models.

    ``own_has_prior``: the own model was trained by plain cross-entropy and has the client's class mix in it already;
    only the shared model's part is then given it.
    """
    w, prior = mixture.share, log_prior(counts, mixture.flatness).to(own)
    share_of_prior = 1 - w if own_has_prior else 1.0
    return (w * own + (1 - w) * shared) / mixture.temperature + share_of_prior * prior


def choose(
    own: Tensor, shared: Tensor, labels: Tensor, counts: Tensor, folds: Sequence[Tensor], own_has_prior: bool = False
) -> Choice:
    """The rule above. ``folds`` are row numbers of the images, each in one of them; with none the own model stays."""
    images = len(labels)
    if images < 2 or len(folds) < 2:
        return Choice(OWN, False, images)
    own, shared = own.double(), shared.double()
    scores = {m: mixed(own, shared, counts, m, own_has_prior) for m in MIXTURES}
    losses = torch.stack([F.cross_entropy(scores[m], labels, reduction="none") for m in MIXTURES])
    of_own = losses[[MIXTURES.index(m) for m in OWN_CALIBRATED]]
    gains, right_own, right_mixed = torch.zeros(images, dtype=torch.float64), 0, 0
    for fold in folds:
        rest = torch.ones(images, dtype=torch.bool)
        rest[fold] = False
        calibrated = int(of_own[:, rest].mean(1).argmin())
        found = flattest(losses[:, rest])
        gains[fold] = of_own[calibrated, fold] - losses[found, fold]
        right_own += int((scores[OWN][fold].argmax(1) == labels[fold]).sum())
        right_mixed += int((scores[MIXTURES[found]][fold].argmax(1) == labels[fold]).sum())
    gain, error = float(gains.mean()), float(gains.std()) / images**0.5
    beyond_chance = gain > float(student_t.ppf(1 - LEVEL, images - 1)) * error
    accepted = beyond_chance and gain > 0 and right_mixed >= right_own
    mixture = MIXTURES[flattest(losses)] if accepted else OWN
    return Choice(mixture, accepted, images, gain, error, right_own, right_mixed)


def flattest(losses: Tensor) -> int:
    """Rule 1 on losses [mixtures, images]: the number of the mixture."""
    means = losses.mean(1)
    best = int(means.argmin())
    behind = losses - losses[best]
    near = behind.mean(1) <= behind.std(1) / losses.shape[1] ** 0.5
    near[best] = True
    return min(np.flatnonzero(near.numpy()).tolist(), key=lambda k: (-MIXTURES[k].flatness, float(means[k]), k))


def make_folds(images: int, patients: np.ndarray | None, rng: np.random.Generator) -> list[Tensor]:
    """Up to `FOLDS` parts of the images at random; all images of a patient are in one."""
    groups = np.arange(images) if patients is None else np.unique(patients, return_inverse=True)[1]
    count = int(groups.max()) + 1 if images else 0
    parts = np.array_split(rng.permutation(count), min(FOLDS, max(count, 1)))
    return [torch.from_numpy(np.flatnonzero(np.isin(groups, part))) for part in parts if len(part)]


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
