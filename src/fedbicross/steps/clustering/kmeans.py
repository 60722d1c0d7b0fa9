"""K-means on the clients' predictions (FedBiCross III-A1) or, as in its Fig. 2, on their parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # comes with scikit-learn
from torch import Tensor

from fedbicross.errors import MethodError
from fedbicross.steps.clustering.partition import (
    Clustering,
    Matrix,
    canonical_labels,
    euclidean_distances,
    feasible_k,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fedbicross.engine.ensemble import Ensemble

_CHUNK = 1 << 20


@torch.no_grad()
def prediction_matrix(
    ensemble: Ensemble, noise: Tensor, use: Literal["probabilities", "logits"] = "probabilities"
) -> Tensor:
    """p_i = [f_i(z_1), …, f_i(z_M)] as rows of [N, M·C], each noise image's C entries side by side.

    The paper does not say which outputs it means. Probabilities by default: logits grow with the length of training, so
    their distances would tell how long a client trained.
    """
    outputs = ensemble.logits(noise)
    return (outputs.softmax(-1) if use == "probabilities" else outputs).flatten(1)


def cluster(features: Tensor, k: int, seed: int) -> Clustering:
    """K-means of the rows of `features` [N,F]: k-means++, best of 10 restarts.

    K is lowered, with a warning, to the number of clients and of distinguishable clients (identical models share a
    cluster). A cluster that ends empty takes the client farthest from its own centroid.
    """
    points = _points(features)
    k, warnings = feasible_k(k, euclidean_distances(points))
    return Clustering(canonical_labels(_kmeans(points, k, seed)), warnings)


def kmeans_parameters(weights: Sequence[Mapping[str, Tensor]], k: int, seed: int) -> Clustering:
    """K-means of the flattened parameters (the "K-Means" of Fig. 2), all of one architecture."""
    # K-means sees distances only. N points span at most N dimensions, so N coordinates stand for millions of weights.
    gram = centred_gram(flatten_weights(weights))
    values, vectors = np.linalg.eigh(gram)
    kept = values > 1e-12 * max(values[-1], 0.0)
    return cluster(torch.from_numpy(vectors[:, kept] * np.sqrt(values[kept])), k, seed)


def centroids(features: Tensor, clustering: Clustering) -> Tensor:
    """c_k [K,F]: the mean of each cluster's rows."""
    return torch.stack([features[members].mean(0) for members in clustering.members()])


def flatten_weights(weights: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
    """One vector for each state dict: its floating-point entries by name, without BN's running statistics."""
    statistics = ("running_mean", "running_var")
    vectors, shapes = [], []
    for state in weights:
        kept = {n: t for n, t in sorted(state.items()) if t.is_floating_point() and not n.endswith(statistics)}
        shapes.append({name: tensor.shape for name, tensor in kept.items()})
        vectors.append(torch.cat([tensor.detach().flatten() for tensor in kept.values()]))
    if any(shape != shapes[0] for shape in shapes):
        raise MethodError("architectures_differ", "clustering by weights needs clients of one architecture")
    return vectors


def centred_gram(vectors: Sequence[Tensor]) -> Matrix:
    """⟨v_i − v̄, v_j − v̄⟩ in float64, v̄ the mean of the vectors; in slices, so that no big copy is made."""
    gram = np.zeros((len(vectors), len(vectors)))
    for start in range(0, vectors[0].numel(), _CHUNK):
        rows = torch.stack([vector[start : start + _CHUNK].double() for vector in vectors])
        rows = rows - rows.mean(0)
        gram += (rows @ rows.T).cpu().numpy()
    return gram


def _points(features: Tensor) -> Matrix:
    points = features.detach().double().cpu().numpy()
    if not np.isfinite(points).all():
        clients = sorted(set(np.argwhere(~np.isfinite(points))[:, 0].tolist()))
        raise MethodError("non_finite_predictions", f"the models of clients {clients} give NaN or infinite outputs")
    return np.asarray(points.reshape(len(points), -1))


def _kmeans(points: Matrix, k: int, seed: int) -> list[int]:
    if k == 1:
        return [0] * len(points)
    # A few dozen points: threads only wait for one another, and their number must not decide the last digit.
    with threadpool_limits(1):
        labels = KMeans(n_clusters=k, init="k-means++", n_init=10, random_state=seed).fit(points).labels_
    return fill_empty_clusters(points, [int(label) for label in labels], k)


def fill_empty_clusters(points: Matrix, labels: Sequence[int], k: int) -> list[int]:
    """Give each empty cluster the point farthest from its centroid, of those whose cluster can spare one."""
    filled = np.asarray(labels)
    for empty in range(k):
        if (filled == empty).any():
            continue
        means = np.stack([points[filled == label].mean(0) for label in filled])
        sizes = np.asarray([(filled == label).sum() for label in filled])
        farthest = np.where(sizes > 1, np.square(points - means).sum(1), -1.0).argmax()
        filled[farthest] = empty
    return [int(label) for label in filled]
