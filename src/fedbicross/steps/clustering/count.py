"""K="auto": the number of clusters chosen from the uploads alone, without test data or labels.

The rule. For each K from 2 to min(k_max, N−1), and no more than there are distinguishable clients, K-means gives a
partition and two numbers: its silhouette, and its stability, the mean adjusted Rand index between the partitions found
on two disjoint random halves of the noise images. Of the K whose silhouette and stability both reach their thresholds,
the one of largest silhouette is chosen; if there is none, K = 1. A silhouette below 0.25 is commonly read as "no
substantial structure".

Small N. One client: K = 1. Two clients: a silhouette does not exist, so K = 2 if ‖p_1−p_2‖² exceeds half of
‖p_1‖²+‖p_2‖² (for probabilities: 0 if they agree, 1 if they never share a class), else 1. K = N is never chosen
otherwise: a singleton has silhouette 0, so the rule favours clusters with company.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from sklearn.metrics import adjusted_rand_score, silhouette_score

from fedbicross.errors import MethodError
from fedbicross.steps.clustering.kmeans import cluster
from fedbicross.steps.clustering.partition import distinct_points, euclidean_distances

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ChosenK:
    """The K, the sentence that says why, and a row for each K tried (k, silhouette, stability, sizes, chosen)."""

    k: int
    reason: str
    evidence: list[dict[str, object]]


def choose_k(
    features: Tensor,
    k_max: int,
    rng_seed: int,
    *,
    block: int = 1,
    silhouette_threshold: float = 0.25,
    stability_threshold: float = 0.6,
    resamples: int = 20,
) -> ChosenK:
    """Choose K for the rows of `features` [N,F] by the rule above.

    `block` neighbouring columns (the C outputs for one noise image) are resampled together.
    """
    if k_max < 1:
        raise MethodError("bad_k", f"the largest number of clusters must be at least 1, not {k_max}")
    points = features.detach().double().cpu().numpy()
    clients = len(points)
    if clients == 1:
        return ChosenK(1, "one client", [])
    if clients == 2:
        share = float(np.square(points[0] - points[1]).sum() / max(np.square(points).sum(), np.finfo(np.float64).tiny))
        k = 2 if share > 0.5 and k_max >= 2 else 1
        return ChosenK(k, f"two clients whose outputs differ by {share:.2f} (two clusters above 0.50)", [])
    largest = min(k_max, clients - 1, distinct_points(euclidean_distances(points)))
    evidence: list[dict[str, object]] = []
    best, best_silhouette = 1, -np.inf
    for k in range(2, largest + 1):
        found = cluster(features, k, rng_seed)
        silhouette = float(silhouette_score(points, found.labels))
        stability = _stability(features, k, rng_seed, block, resamples)
        sizes = [len(members) for members in found.members()]
        evidence.append({"k": k, "silhouette": silhouette, "stability": stability, "sizes": sizes, "chosen": False})
        fit = silhouette >= silhouette_threshold and stability >= stability_threshold
        if fit and silhouette > best_silhouette:
            best, best_silhouette = k, silhouette
    for row in evidence:
        row["chosen"] = row["k"] == best
    if not evidence:
        reason = "at most one cluster allowed" if k_max == 1 else "the clients cannot be told apart"
    elif best == 1:
        reason = f"no K has silhouette ≥ {silhouette_threshold} and stability ≥ {stability_threshold}"
    else:
        reason = f"K={best} has the largest silhouette ({best_silhouette:.2f}) of the stable partitions"
    return ChosenK(best, reason, evidence)


def _stability(features: Tensor, k: int, seed: int, block: int, resamples: int) -> float:
    blocks = features.shape[1] // block
    if blocks < 2:
        return 1.0  # nothing to resample: one noise image cannot contradict itself
    images = features[:, : blocks * block].reshape(len(features), blocks, block)
    rng = np.random.default_rng([seed, k])
    scores = []
    for _ in range(resamples):
        order = rng.permutation(blocks)
        halves = (order[: blocks // 2], order[blocks // 2 :])
        labels = [cluster(images[:, np.sort(half)].flatten(1), k, seed).labels for half in halves]
        scores.append(adjusted_rand_score(*labels))
    return float(np.mean(scores))
