from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbicross.data.patient_groups import PatientGroups, split_off_test


def test_images_are_units_without_patients():
    groups = PatientGroups.of_names(None, np.array([2, 0]), 3)
    assert (groups.of_image.tolist(), groups.label.tolist(), groups.size.tolist()) == ([0, 1], [2, 0], [1, 1])
    assert not groups.are_patients


def test_patients_take_their_majority_label():
    groups = PatientGroups.of_names(np.array(["b", "a", "b", "b", "a"]), np.array([1, 2, 0, 1, 0]), 3)
    assert groups.of_image.tolist() == [1, 0, 1, 1, 0]
    assert groups.label.tolist() == [0, 1]  # patient a: a tie, the lower label
    assert groups.size.tolist() == [2, 3] and groups.are_patients


@settings(max_examples=200)
@given(st.integers(0, 10**6), st.integers(2, 60), st.booleans(), st.booleans(), st.floats(0.05, 0.6))
def test_split_off_test(seed, n, with_patients, with_sites, fraction):
    rng = np.random.default_rng(seed)
    labels = rng.integers(3, size=n)
    person = rng.integers(max(n // 3, 1), size=n)
    patients = person.astype(str) if with_patients else None
    sites = (person % 2).astype(str) if with_sites else None
    test = split_off_test(labels, patients, sites, fraction, np.random.default_rng(0))
    if patients is not None:
        assert not set(patients[test]) & set(patients[~test])
    groups = PatientGroups.of_names(patients, labels, 3)
    test_units = test[[np.flatnonzero(groups.of_image == u)[0] for u in range(len(groups))]]
    for c in np.unique(groups.label):  # each class can be learnt
        assert not test_units[groups.label == c].all()
    if max(np.bincount(groups.label)) > 1:
        assert test.any()
    assert test_units.sum() <= np.ceil(fraction * len(groups)) + 1
    assert np.array_equal(test, split_off_test(labels, patients, sites, fraction, np.random.default_rng(0)))


def test_each_stratum_gives_its_share():
    labels = np.repeat([0, 1, 2], [50, 30, 20])
    test = split_off_test(labels, None, None, 0.2, np.random.default_rng(1))
    assert np.bincount(labels[test]).tolist() == [10, 6, 4]
