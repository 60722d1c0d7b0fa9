from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbicross.data import PARTITIONS, Dataset, Partition, check_partition, client_images, make_partition, test_images
from fedbicross.data.partition import client_names, site_names
from fedbicross.data.patient_groups import PatientGroups

from .helpers import raises, toy

DRAWN = [kind for kind in PARTITIONS if kind != "natural"]


def draw(data, kind, count=5, seed=0, **options) -> Partition:
    return make_partition(data, kind, count, np.random.default_rng(seed), seed, **options)


def counts(data, partition):
    return np.array([np.bincount(data.train.labels[i], minlength=data.num_classes) for i in partition.train_indices])


def labelled(labels, test_labels=None, **names) -> Dataset:
    """A dataset of 1-pixel images with given labels."""
    labels = np.asarray(labels)
    test_labels = labels if test_labels is None else np.asarray(test_labels)
    classes = [str(c) for c in range(max(labels.max(), test_labels.max(), 1) + 1)]
    train, test = (np.zeros((len(x), 1, 1), np.uint8) for x in (labels, test_labels))
    return Dataset.from_arrays("l", train, labels, test, test_labels, classes=classes, **names)


# --- what holds for every kind -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize("patients", [0, 40])
def test_coverage_determinism_and_names(kind, patients):
    data = toy(patients=patients)
    one, same, other = (draw(data, kind, 5, seed) for seed in (1, 1, 2))
    check_partition(one, data)
    assert one.digest() == same.digest() != other.digest()
    assert one.clients == tuple(f"client-{i}" for i in range(5)) and one.kind == kind and one.seed == 1
    assert all(indices.dtype == np.int64 and (np.diff(indices) > 0).all() for indices in one.train_indices)
    assert all(len(indices) for indices in one.train_indices)


@settings(max_examples=300)
@given(st.integers(0, 2**32), st.sampled_from(DRAWN), st.integers(1, 12), st.booleans(), st.floats(0.005, 50))
def test_random_manifests(seed, kind, count, with_patients, alpha):
    """Coverage, no shared patient, nobody empty, and test images only where the class is trained on."""
    rng = np.random.default_rng(seed)
    n, n_test, classes = (int(rng.integers(low, high)) for low, high in ((15, 90), (1, 40), (2, 5)))
    labels, test_labels = rng.integers(classes, size=n), rng.integers(classes, size=n_test)
    names = {}
    if with_patients:
        names = {
            "train_patients": rng.integers(rng.integers(1, n), size=n).astype(str),
            "test_patients": np.char.add("t", rng.integers(5, size=n_test).astype(str)),
        }
    data = labelled(labels, test_labels, **names)
    groups = len(np.unique(names["train_patients"])) if with_patients else n
    options = {"alpha": alpha, "classes_per_client": 1, "min_samples": int(rng.integers(0, 15))}
    if kind == "pathological":  # as many classes as the patients' majority labels leave
        options["classes_per_client"] = len(np.unique(PatientGroups.of(data.train, data.num_classes).label))
    if count > groups:
        with raises("too_many_clients"):
            draw(data, kind, count, **options)
        return
    partition = draw(data, kind, count, seed % 1000, **options)
    check_partition(partition, data)
    assert min(len(indices) for indices in partition.train_indices) >= 1
    held = counts(data, partition)
    if not with_patients:
        owned = partition.test_owner >= 0
        assert (held[partition.test_owner[owned], test_labels[owned]] > 0).all()
        assert (held[:, test_labels[~owned]].sum(0) == 0).all()
        if kind.startswith("dirichlet"):
            assert held.sum(1).min() >= min(options["min_samples"], n // count)


def test_client_names_sort_in_order():
    assert client_names(11)[:2] == ("client-00", "client-01")
    assert list(client_names(101)) == sorted(client_names(101))


# --- each kind -----------------------------------------------------------------------------------------------------


def test_iid_sizes_are_equal_and_mixed():
    data = toy(n=1003)
    held = counts(data, draw(data, "iid", 4))
    assert set(held.sum(1)) <= {250, 251}
    assert (held / held.sum(1, keepdims=True)).std(0).max() < 0.05


def slow_balanced_dirichlet(labels, count, alpha, rng):
    """The routine the papers share, written with lists, without its redraws."""
    clients = [[] for _ in range(count)]
    for c in sorted(set(labels)):
        members = rng.permutation([i for i, label in enumerate(labels) if label == c])
        share = rng.dirichlet([alpha] * count)
        share = [0 if len(has) >= len(labels) / count else p for p, has in zip(share, clients, strict=True)]
        share = [p / sum(share) for p in share]
        edges, reached = [], 0.0
        for p in share:
            reached += p
            edges.append(int(reached * len(members) + 1e-9))
        last = max(i for i, p in enumerate(share) if p > 0)
        edges[last:] = [len(members)] * (count - last)
        for client, (start, stop) in enumerate(zip([0, *edges], edges, strict=False)):
            clients[client] += members[start:stop].tolist()
    return [sorted(has) for has in clients]


@pytest.mark.parametrize("alpha", [0.1, 0.5, 5.0])
@pytest.mark.parametrize("count", [2, 5, 10])
def test_dirichlet_equals_the_slow_reference(alpha, count):
    data = toy(n=400, classes=6, seed=count)
    fast = draw(data, "dirichlet", count, 7, alpha=alpha, min_samples=0)
    slow = slow_balanced_dirichlet(data.train.labels.tolist(), count, alpha, np.random.default_rng(7))
    if all(slow):  # an empty client is filled by the real one
        assert [indices.tolist() for indices in fast.train_indices] == slow


def test_dirichlet_alpha_sets_the_skew_and_balance():
    data = toy(n=4000, classes=8)

    def largest_share(alpha):
        held = counts(data, draw(data, "dirichlet", 5, alpha=alpha))
        return (held.max(1) / held.sum(1)).mean()

    assert largest_share(0.05) > largest_share(1) > largest_share(100)
    balanced = counts(data, draw(data, "dirichlet", 5, alpha=0.1)).sum(1)
    plain = counts(data, draw(data, "dirichlet_plain", 5, alpha=0.1)).sum(1)
    assert balanced.std() < plain.std()


@pytest.mark.parametrize("alpha", [1e-300, 1e-6, 0.01, 100, 1e6])
def test_extreme_alphas_end_and_repair(alpha):
    data = toy(n=300, classes=3)
    for kind in ("dirichlet", "dirichlet_plain", "quantity"):
        partition = draw(data, kind, 20, alpha=alpha)
        check_partition(partition, data)
        sizes = [len(indices) for indices in partition.train_indices]
        assert min(sizes) >= (1 if kind == "quantity" else 10)


def test_min_samples_is_lowered_with_a_warning():
    data = toy(n=30)
    partition = draw(data, "dirichlet", 10)
    assert [len(indices) for indices in partition.train_indices] == [3] * 10
    assert "lowered from 10 to 3" in partition.warnings[0]


def test_repair_keeps_patients_whole_and_says_when_it_cannot():
    labels = np.arange(40) % 2
    patients = ["big"] * 37 + ["a", "b", "c"]
    data = labelled(labels, [0, 1], train_patients=patients, test_patients=["t", "t"])
    partition = draw(data, "dirichlet", 3, min_samples=5)
    check_partition(partition, data)
    assert sorted(len(indices) for indices in partition.train_indices)[0] >= 1
    assert any("kept whole" in warning for warning in partition.warnings)


@pytest.mark.parametrize(("count", "per_client"), [(4, 2), (10, 1), (10, 2), (10, 3), (50, 2), (3, 8)])
def test_pathological(count, per_client):
    data = toy(n=2000, classes=8)
    partition = draw(data, "pathological", count, classes_per_client=per_client)
    held = counts(data, partition)
    assert ((held > 0).sum(1) == per_client).all() and (held.sum(0) == np.bincount(data.train.labels)).all()
    assert partition.warnings == () and held.sum(1).max() <= 3 * held.sum(1).min()


def test_pathological_with_rare_classes():
    data = labelled([0] * 97 + [1] + [2] * 2)
    partition = draw(data, "pathological", 10, classes_per_client=3)
    check_partition(partition, data)
    assert any("fewer units" in warning for warning in partition.warnings)
    crowded = draw(labelled([0, 0, 0, 1, 2]), "pathological", 5, classes_per_client=1)
    assert [len(indices) for indices in crowded.train_indices] == [1] * 5


def test_quantity_is_unequal_but_mixed():
    data = toy(n=4000)
    held = counts(data, draw(data, "quantity", 5, alpha=0.5))
    assert held.sum(1).max() > 2 * held.sum(1).min()
    big = held[held.sum(1) > 300]
    assert (big / big.sum(1, keepdims=True)).std(0).max() < 0.08


def test_natural_follows_sites():
    data = toy(sites=3, patients=20)
    partition = draw(data, "natural", None)
    assert partition.params == {"sites": ["site-0", "site-1", "site-2"]} and partition.warnings == ()
    check_partition(partition, data)
    for client, indices in enumerate(partition.train_indices):
        assert set(data.train.sites[indices]) == {f"site-{client}"}
        assert set(data.test.sites[partition.test_owner == client]) == {f"site-{client}"}
    assert "3 sites" in draw(data, "natural", 7).warnings[0]
    assert partition.clients == ("site-0", "site-1", "site-2"), "reports name the sites"


@pytest.mark.parametrize("sites", [["North", "north "], ["North", "north"], ["a\x00", "b"], ["", "b"], ["x" * 65, "b"]])
def test_sites_that_cannot_be_told_apart_or_printed_are_numbered(sites):
    assert site_names(sites) == ("client-0", "client-1")
    assert site_names(["Süd", "北"]) == ("Süd", "北")


def test_natural_test_images_of_an_unknown_site_or_without_sites():
    unknown = labelled([0, 1, 0], [0, 1], train_sites=["x", "x", "y"], test_sites=["x", "z"])
    assert draw(unknown, "natural", None).test_owner.tolist() == [0, -1]
    without = labelled([0, 0, 1], [0, 1], train_sites=["x", "x", "y"])
    assert draw(without, "natural", None).test_owner.tolist() == [0, 1]


def test_scanner_changes_pixels_of_train_and_test():
    data = toy()
    plain, shifted = draw(data, "iid", 3), draw(data, "scanner", 3, strength=1.0)
    images, labels, patients = client_images(data, plain, 1)
    indices = plain.train_indices[1]
    assert np.array_equal(images, data.train.images[indices]) and np.array_equal(labels, data.train.labels[indices])
    assert patients is None and plain.scanners is None and test_images(data, plain) is data.test.images
    images, _, _ = client_images(data, shifted, 1)
    assert np.abs(images.astype(int) - data.train.images[shifted.train_indices[1]]).mean() > 1
    test = test_images(data, shifted)
    mine = np.flatnonzero(shifted.test_owner == 2)
    assert np.array_equal(test[mine], shifted.scanners[2].apply(data.test.images[mine], mine, "test"))
    assert not np.array_equal(test, data.test.images)
    assert len(set(shifted.scanners)) == 3
    assert np.array_equal(test_images(data, draw(data, "scanner", 3, strength=0.0)), data.test.images)


def test_patients_come_with_the_images():
    data = toy(patients=30)
    partition = draw(data, "iid", 3)
    seen = [set(client_images(data, partition, c)[2]) for c in range(3)]
    assert not (seen[0] & seen[1] or seen[0] & seen[2] or seen[1] & seen[2])
    sizes = [len(indices) for indices in partition.train_indices]
    assert max(sizes) - min(sizes) < 20


# --- the matched test split ----------------------------------------------------------------------------------------


def test_matched_is_in_proportion_to_training():
    data = toy(n=3000, n_test=1000, classes=5)
    partition = draw(data, "dirichlet", 6, alpha=0.3)
    held = counts(data, partition)
    for c in range(5):
        owners = partition.test_owner[data.test.labels == c]
        exact = held[:, c] / held[:, c].sum() * len(owners)
        assert np.abs(np.bincount(owners, minlength=6) - exact).max() < 1


def test_nobody_owns_a_class_nobody_trains_on():
    data = labelled([0, 1] * 20, [0, 1, 2, 2])
    assert draw(data, "iid", 2).test_owner[2:].tolist() == [-1, -1]


# --- storage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PARTITIONS)
def test_round_trip(kind):
    data = toy(patients=40, sites=4)
    one = draw(data, kind, 4)
    two = Partition.loads(one.dumps(), data)
    assert two.digest() == one.digest() and two.dumps() == one.dumps()
    assert two.scanners == one.scanners and two.clients == one.clients and two.params == one.params
    assert json.loads(one.dumps())["sha256"] == one.digest()


def test_an_empty_client_is_allowed():
    data = labelled([0, 1, 0])
    empty = np.empty(0, np.int64)
    partition = Partition("user", 0, {}, ("a", "b"), (np.arange(3), empty), np.array([0, 0, -1]), None, data.digest())
    check_partition(partition, data)
    again = Partition.loads(partition.dumps(), data)
    assert len(client_images(data, again, 1)[0]) == 0


def resigned(partition, **change) -> dict:
    """JSON with changes and a matching hash, as a mistaken tool would write it."""
    return dataclasses.replace(partition, **change).to_json()


def test_refused_json():
    data = toy(patients=40)
    good = draw(data, "iid", 3)
    first, second, third = good.train_indices
    with raises("partition_hash"):
        Partition.from_json(good.to_json() | {"seed": 5}, data)
    with raises("partition_dataset"):
        Partition.from_json(good.to_json(), toy(seed=1))
    broken = [
        ("partition_coverage", {"train_indices": (first[1:], second, third)}),
        ("partition_coverage", {"train_indices": (np.append(first, second[:1]), second, third)}),
        ("partition_coverage", {"train_indices": (np.append(first, 10**6), second, third)}),
        ("partition_coverage", {"test_owner": good.test_owner[1:]}),
        ("partition_coverage", {"test_owner": good.test_owner + 1}),
        ("partition_coverage", {"test_owner": good.test_owner - 2}),
        ("partition_format", {"train_indices": (first, np.append(second, third))}),
        ("partition_format", {"clients": ("a", "a", "b")}),
        ("partition_format", {"scanners": ()}),
        (
            "patient_shared",
            {"train_indices": (np.append(first[1:], second[:1]), np.append(second[1:], first[:1]), third)},
        ),
        ("patient_shared", {"test_owner": np.arange(60) % 3}),
    ]
    for code, change in broken:
        with raises(code):
            Partition.from_json(resigned(good, **change), data)


@pytest.mark.parametrize("text", ["", "[", "[]", "{}", '{"schema":1}', '{"schema":2}', "null", "[" * 100_000])
def test_refused_text(text):
    with raises("partition_format"):
        Partition.loads(text, toy())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("train_indices", [[0.5]]),
        ("train_indices", [[0], [1], [10**30]]),
        ("train_indices", 3),
        ("test_owner", "x"),
        ("test_owner", [[0]]),
        ("clients", None),
    ],
)
def test_malformed_fields(field, value):
    data = toy()
    with raises("partition_format"):
        Partition.from_json(draw(data, "iid", 3).to_json() | {field: value}, data)


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind", "count", "options"),
    [
        ("unknown_partition", "dirichlett", 5, {}),
        ("bad_clients", "iid", 0, {}),
        ("bad_clients", "iid", None, {}),
        ("too_many_clients", "iid", 201, {}),
        ("bad_alpha", "dirichlet", 5, {"alpha": 0}),
        ("bad_alpha", "dirichlet_plain", 5, {"alpha": -1}),
        ("bad_alpha", "quantity", 5, {"alpha": float("nan")}),
        ("bad_min_samples", "dirichlet", 5, {"min_samples": -1}),
        ("bad_classes_per_client", "pathological", 5, {"classes_per_client": 0}),
        ("bad_classes_per_client", "pathological", 5, {"classes_per_client": 5}),
        ("bad_classes_per_client", "pathological", 3, {"classes_per_client": 1}),
        ("bad_strength", "scanner", 5, {"strength": -1}),
        ("no_sites", "natural", 5, {}),
    ],
)
def test_refusals(code, kind, count, options):
    with raises(code):
        draw(toy(), kind, count, **options)


def test_more_clients_than_patients():
    with raises("too_many_clients", "patients"):
        draw(toy(patients=4), "iid", 5)


def test_patient_at_two_sites():
    data = labelled([0, 1], train_patients=["p", "p"], test_patients=["q", "q"], train_sites=["x", "y"])
    with raises("patient_at_two_sites"):
        draw(data, "natural", None)
