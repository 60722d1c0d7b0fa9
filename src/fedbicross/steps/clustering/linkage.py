"""Agglomerative clustering with average linkage: of local updates ("HC" of FedBiCross's Fig. 2), and for `pacfl`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from sklearn.cluster import AgglomerativeClustering

from fedbicross.steps.clustering.kmeans import centred_gram, flatten_weights
from fedbicross.steps.clustering.partition import Clustering, Matrix, canonical_labels, feasible_k

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor


def agglomerate(distances: Matrix, k: int) -> Clustering:
    """Average linkage on a distance matrix to K clusters."""
    k, warnings = feasible_k(k, distances)
    if len(distances) == 1:
        return Clustering((0,), warnings)
    model = AgglomerativeClustering(n_clusters=k, metric="precomputed", linkage="average")
    return Clustering(canonical_labels(model.fit(distances).labels_), warnings)


def hierarchical_updates(weights: Sequence[Mapping[str, Tensor]], k: int) -> Clustering:
    """Cluster the clients' weights by cosine distance, each less the mean of all."""
    return agglomerate(cosine_distances(centred_gram(flatten_weights(weights))), k)


def cosine_distances(gram: Matrix) -> Matrix:
    """1 − cos from inner products; two zero vectors are at 0, and a zero vector is at 1 from any other."""
    norms = np.sqrt(np.clip(np.diag(gram), 0, None))
    zero = norms <= 1e-12 * norms.max()
    safe = np.where(zero, 1.0, norms)
    cosine = np.where(zero[:, None] | zero[None, :], 0.0, gram / np.outer(safe, safe))
    cosine[np.ix_(zero, zero)] = 1.0
    distances = np.clip(1 - cosine, 0, 2)
    np.fill_diagonal(distances, 0)
    return np.asarray(distances)
