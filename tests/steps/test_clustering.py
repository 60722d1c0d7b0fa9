from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from fedbicross.engine.ensemble import Ensemble
from fedbicross.errors import MethodError
from fedbicross.steps import clustering
from fedbicross.steps.clustering.kmeans import fill_empty_clusters

from .tiny import Tiny, noise, randomised, tiny_ensemble


def blobs(sizes, spread=0.1, dim=12, seed=0):
    """Rows around well separated centres."""
    centres = noise(len(sizes), dim, seed=100 + seed) * 2
    rows = torch.cat([centres[k].expand(n, dim) for k, n in enumerate(sizes)])
    return rows + spread * noise(*rows.shape, seed=seed)


def objective(features, labels):
    total = 0.0
    for label in set(labels):
        rows = features[[i for i, other in enumerate(labels) if other == label]]
        total += float(((rows - rows.mean(0)) ** 2).sum())
    return total


def best_objective(features, k):
    """K-means solved exactly: every assignment of N points to exactly K clusters."""
    assignments = itertools.product(range(k), repeat=len(features))
    return min(objective(features, a) for a in assignments if len(set(a)) == k)


def test_prediction_matrix_rows_are_the_clients_outputs_image_by_image():
    ensemble, z = tiny_ensemble(3), noise(5, 3, 6, 6)
    probabilities = clustering.prediction_matrix(ensemble, z)
    assert probabilities.shape == (3, 20) and not probabilities.requires_grad
    torch.testing.assert_close(probabilities[1, 4:8], ensemble.logits(z)[1, 1].softmax(0))
    torch.testing.assert_close(clustering.prediction_matrix(ensemble, z, "logits")[2, :4], ensemble.logits(z)[2, 0])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("k", [2, 3])
def test_kmeans_finds_the_best_of_all_partitions(seed, k):
    features = noise(6, 3, seed=seed)
    found = clustering.cluster(features, k, seed=0)
    assert found.k == k and not found.warnings
    assert objective(features, found.labels) == pytest.approx(best_objective(features, k), rel=1e-9)


def test_labels_are_numbered_by_the_smallest_member_whatever_the_seed():
    features = blobs([2, 3, 2])[[4, 0, 5, 2, 1, 3, 6]]
    results = {clustering.cluster(features, 3, seed).labels for seed in range(5)}
    assert results == {(0, 1, 2, 0, 1, 0, 2)}
    assert clustering.cluster(features, 3, 0).members() == [[0, 3, 5], [1, 4], [2, 6]]
    assert clustering.canonical_labels([7, 7, 2, 0, 2]) == (0, 0, 1, 2, 1)


def test_k_of_one_and_of_n():
    features = noise(4, 3)
    assert clustering.cluster(features, 1, 0).labels == (0, 0, 0, 0)
    assert clustering.cluster(features, 4, 0).labels == (0, 1, 2, 3)


def test_too_many_clusters_are_lowered_with_a_warning():
    found = clustering.cluster(noise(3, 5), 7, 0)
    assert found.k == 3
    assert found.warnings == ("K=7 lowered to 3: there are only 3 clients",)


def test_identical_models_share_a_cluster():
    one, other = randomised(Tiny(), 0), randomised(Tiny(), 1)
    features = clustering.prediction_matrix(Ensemble([one, other, one, one]), noise(5, 3, 6, 6))
    found = clustering.cluster(features, 3, 0)
    assert found.labels == (0, 1, 0, 0)
    assert "only 2 of 4 clients can be told apart" in found.warnings[0]
    alike = clustering.cluster(torch.ones(3, 4), 2, 0)
    assert alike.labels == (0, 0, 0) and alike.warnings


@pytest.mark.parametrize("k", [0, -1])
def test_fewer_than_one_cluster_is_refused(k):
    with pytest.raises(MethodError, match="bad_k"):
        clustering.cluster(noise(3, 4), k, 0)
    with pytest.raises(MethodError, match="bad_k"):
        clustering.choose_k(noise(3, 4), k, 0)


def test_models_that_give_nan_are_named():
    features = noise(3, 4)
    features[1, 2] = float("nan")
    with pytest.raises(MethodError, match=r"non_finite_predictions.*\[1\]"):
        clustering.cluster(features, 2, 0)


def test_an_empty_cluster_takes_the_farthest_point_of_a_cluster_that_can_spare_it():
    points = np.array([[0.0], [1.0], [9.0], [50.0]])
    assert fill_empty_clusters(points, [0, 0, 0, 1], 3) == [0, 0, 2, 1]
    assert fill_empty_clusters(points, [0, 0, 0, 0], 3) == [0, 0, 2, 1]
    assert fill_empty_clusters(points, [0, 1, 1, 2], 3) == [0, 1, 1, 2]


def test_centroids():
    features = noise(4, 3)
    found = clustering.Clustering((0, 1, 0, 1))
    expected = torch.stack([(features[0] + features[2]) / 2, (features[1] + features[3]) / 2])
    torch.testing.assert_close(clustering.centroids(features, found), expected)


def weights_of(rows):
    return [
        {"a": row[:3].reshape(3, 1), "b.running_mean": torch.full((2,), 1e6 * i), "c": row[3:]}
        for i, row in enumerate(rows)
    ]


def test_parameters_are_clustered_without_running_statistics():
    rows = blobs([3, 2], dim=8)
    assert clustering.kmeans_parameters(weights_of(rows), 2, 0).labels == (0, 0, 0, 1, 1)
    features = noise(6, 8, seed=3)
    found = clustering.kmeans_parameters(weights_of(features), 3, 0)
    assert objective(features, found.labels) == pytest.approx(best_objective(features, 3), rel=1e-6)
    twins = weights_of(features[[0, 1, 0, 0]])
    assert clustering.kmeans_parameters(twins, 3, 0).labels == (0, 1, 0, 0)


def test_parameters_of_different_architectures_are_refused():
    with pytest.raises(MethodError, match="architectures_differ"):
        clustering.kmeans_parameters([{"a": noise(3)}, {"a": noise(4)}], 2, 0)


def slow_average_linkage(distances, k):
    groups = [[i] for i in range(len(distances))]
    while len(groups) > k:
        mean = {
            (a, b): np.mean([distances[i][j] for i in groups[a] for j in groups[b]])
            for a, b in itertools.combinations(range(len(groups)), 2)
        }
        a, b = min(mean, key=mean.get)
        groups[a] += groups.pop(b)
    return clustering.canonical_labels([next(g for g, m in enumerate(groups) if i in m) for i in range(len(distances))])


def test_hierarchical_clustering_of_updates_equals_loops():
    rows = noise(6, 8, seed=2)
    updates = [row - rows.mean(0) for row in rows]
    distances = [
        [1 - float(a @ b) / math.sqrt(float(a @ a) * float(b @ b)) if a is not b else 0.0 for b in updates]
        for a in updates
    ]
    for k in (2, 3, 4):
        assert clustering.hierarchical_updates(weights_of(rows), k).labels == slow_average_linkage(distances, k)


def test_agglomeration_of_three_clients_and_of_one():
    distances = np.array([[0, 1, 8.0], [1, 0, 8], [8, 8, 0]])
    assert clustering.agglomerate(distances, 2).labels == (0, 0, 1)
    assert clustering.agglomerate(np.zeros((1, 1)), 1).labels == (0,)


def test_identical_updates_are_defined():
    assert clustering.hierarchical_updates([{"a": torch.ones(4)}] * 3, 2).labels == (0, 0, 0)


def test_signatures_span_each_class():
    images, labels = noise(9, 2, 4, 4), torch.tensor([0, 0, 0, 0, 2, 2, 2, 2, 5])
    signature = clustering.subspace_signature(images, labels, p=3)
    assert signature.shape == (32, 3 + 3 + 1)
    first = signature[:, :3]
    torch.testing.assert_close(first.T @ first, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-10)
    lone = images[8].flatten() / images[8].norm()
    assert abs(float(signature[:, 6] @ lone)) == pytest.approx(1)
    rotated = signature.gather(0, signature.abs().argmax(0, keepdim=True))
    assert (rotated > 0).all()


def test_smallest_principal_angle():
    e = torch.eye(4, dtype=torch.float64)
    angle = math.radians(30)
    tilted = torch.stack([math.cos(angle) * e[0] + math.sin(angle) * e[2], e[3]], dim=1)
    flat = torch.stack([e[0], e[1]], dim=1)
    angles = clustering.principal_angles([flat, tilted, flat])
    assert angles[0, 1] == pytest.approx(30) and angles[0, 2] == pytest.approx(0, abs=1e-5)
    a, b = noise(20, 3, seed=1), noise(20, 3, seed=2)
    best = 0.0
    grid = noise(40000, 3, seed=3)
    for _ in range(60):  # alternate projections: the pair of directions of the smallest angle
        direction = b @ torch.linalg.lstsq(b, a @ grid[0]).solution
        grid[0] = torch.linalg.lstsq(a, direction).solution
        u = a @ grid[0]
        best = float(u @ direction / u.norm() / direction.norm())
    assert clustering.principal_angles([a, b])[0, 1] == pytest.approx(math.degrees(math.acos(best)), abs=1e-3)


def test_pacfl_separates_clients_of_different_subspaces():
    # Nothing shared: each group draws from its own ten of forty dimensions.
    def client(group, seed):
        images = torch.zeros(30, 40, dtype=torch.float64)
        mixing = noise(3, 10, seed=group)
        images[:, 10 * group : 10 * group + 10] = noise(30, 3, seed=seed) @ mixing
        return clustering.subspace_signature(images, torch.arange(30) % 2, p=3)

    signatures = [client(g, s) for s, g in enumerate([0, 1, 0, 2, 1])]
    assert clustering.pacfl(signatures, 3).labels == (0, 1, 0, 2, 1)


@pytest.mark.parametrize("sizes", [[3, 3], [3, 3, 4], [2, 2, 2, 2]])
def test_k_is_found_from_clear_groups(sizes):
    chosen = clustering.choose_k(blobs(sizes, dim=24), k_max=8, rng_seed=0, block=4, resamples=4)
    assert chosen.k == len(sizes)
    assert [row["k"] for row in chosen.evidence if row["chosen"]] == [len(sizes)]
    assert [row["k"] for row in chosen.evidence] == list(range(2, min(8, sum(sizes) - 1) + 1))


def test_one_cluster_where_there_are_no_groups():
    chosen = clustering.choose_k(noise(8, 400), k_max=7, rng_seed=0, resamples=4)
    assert chosen.k == 1 and not any(row["chosen"] for row in chosen.evidence)
    alike = clustering.choose_k(torch.ones(5, 6), k_max=4, rng_seed=0)
    assert alike.k == 1 and "told apart" in alike.reason


def test_choosing_k_is_reproducible_and_respects_the_maximum():
    features = blobs([2, 2, 2], dim=12)
    again = [clustering.choose_k(features, 4, 3, resamples=3) for _ in range(2)]
    assert again[0] == again[1]
    assert clustering.choose_k(features, 1, 0).k == 1


def test_choosing_k_for_one_and_two_clients():
    assert clustering.choose_k(noise(1, 4), 3, 0).k == 1
    apart = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0]])
    alike = torch.tensor([[0.9, 0.1, 0.9, 0.1], [0.8, 0.2, 0.7, 0.3]])
    assert clustering.choose_k(apart, 3, 0).k == 2
    assert clustering.choose_k(apart, 1, 0).k == 1
    assert clustering.choose_k(alike, 3, 0).k == 1


def test_entropy_of_soft_labels():
    assert clustering.soft_label_entropy(torch.full((3, 4), 0.25)).item() == pytest.approx(1)
    assert clustering.soft_label_entropy(torch.eye(4)).item() == 0
    mixed = torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    assert clustering.soft_label_entropy(mixed).item() == pytest.approx(0.5)


def test_pairwise_kl_within_and_between_clusters_equals_loops():
    p = noise(4, 5, 3).softmax(-1)
    slow = [
        [
            sum(float(p[i, b, c] * (p[i, b, c] / p[j, b, c]).log()) for b in range(5) for c in range(3)) / 5
            for j in range(4)
        ]
        for i in range(4)
    ]
    np.testing.assert_allclose(clustering.pairwise_kl(p).numpy(), slow, atol=1e-12)
    agreement = clustering.cluster_agreement(p, clustering.Clustering((0, 0, 1, 1)))
    assert agreement.within.item() == pytest.approx(np.mean([slow[0][1], slow[1][0], slow[2][3], slow[3][2]]))
    pairs = [(i, j) for i in range(4) for j in range(4) if (i < 2) != (j < 2)]
    assert agreement.between.item() == pytest.approx(np.mean([slow[i][j] for i, j in pairs]))
    lonely = clustering.cluster_agreement(p, clustering.Clustering((0, 1, 2, 3)))
    assert lonely.within.isnan() and lonely.between.isfinite()
    assert clustering.pairwise_kl(torch.eye(2).unsqueeze(1)).isfinite().all()
