from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbicross.data import Dataset, Split
from fedbicross.data.dataset import as_labels, default_classes, stratified_subset

from .helpers import raises, toy

U8 = np.uint8


def split(images=None, labels=None, **names) -> Split:
    return Split(
        np.zeros((3, 4, 4, 1), U8) if images is None else images,
        np.zeros(3, np.int64) if labels is None else labels,
        **names,
    )


def test_properties_and_empty_split():
    data = toy()
    assert (data.channels, data.image_size, data.num_classes, len(data.train)) == (3, 4, 4, 200)
    assert len(Split(np.zeros((0, 4, 4, 1), U8), np.zeros(0, np.int64))) == 0


@pytest.mark.parametrize(
    ("code", "images", "labels", "names"),
    [
        ("bad_images", np.zeros((3, 4, 4), U8), None, {}),
        ("bad_images", np.zeros((3, 4, 4, 1), np.float32), None, {}),
        ("not_square", np.zeros((3, 4, 5, 1), U8), None, {}),
        ("not_square", np.zeros((3, 0, 0, 1), U8), None, {}),
        ("bad_channels", np.zeros((3, 4, 4, 2), U8), None, {}),
        ("bad_labels", None, np.zeros(3, np.int32), {}),
        ("bad_labels", None, np.zeros((3, 1), np.int64), {}),
        ("length_mismatch", None, np.zeros(2, np.int64), {}),
        ("length_mismatch", None, None, {"patients": np.array(["a"])}),
        ("length_mismatch", None, None, {"sites": np.array(["a"])}),
        ("bad_names", None, None, {"patients": np.zeros(3)}),
    ],
)
def test_split_refuses(code, images, labels, names):
    with raises(code):
        split(images, labels, **names)


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("one_class", {"classes": ["a"]}),
        ("duplicate_class", {"classes": ["a", "a"]}),
        ("label_range", {"train_labels": [0, 2]}),
        ("label_range", {"test_labels": [-1, 0]}),
        ("shape_mismatch", {"test_images": np.zeros((2, 5, 5), U8)}),
        ("empty", {"test_images": np.zeros((0, 4, 4), U8), "test_labels": np.zeros(0, int)}),
        ("float_labels", {"train_labels": [0.0, 1.0]}),
        ("bad_labels", {"train_labels": ["a", "b"]}),
        ("multi_label", {"train_labels": [[0, 1], [1, 0]]}),
        ("label_range", {"train_labels": np.array([0, 2**63], np.uint64)}),
        ("bad_images", {"train_images": np.zeros((2, 4, 4))}),
        ("patient_in_both_splits", {"train_patients": ["p", "q"], "test_patients": ["r", "q"]}),
    ],
)
def test_dataset_refuses(code, change):
    good = {
        "train_images": np.zeros((2, 4, 4), U8),
        "train_labels": [0, 1],
        "test_images": np.zeros((2, 4, 4), U8),
        "test_labels": [[0], [1]],
        "classes": ["a", "b"],
    }
    assert Dataset.from_arrays("x", **good).channels == 1
    with raises(code):
        Dataset.from_arrays("x", **(good | change))


def test_digest_is_of_the_content():
    assert toy().digest() == toy().digest()
    assert toy().digest() != toy(seed=1).digest()
    a, b = toy(patients=5), toy(patients=5, sites=2)
    assert len({toy().digest(), a.digest(), b.digest()}) == 3
    renamed = Dataset("other", a.classes, a.train, a.test, "note")
    assert renamed.digest() == a.digest()
    # Padding of fixed-width strings does not count, contents do.
    wide = Split(a.train.images, a.train.labels, a.train.patients.astype("<U99"))
    assert Dataset("x", a.classes, wide, a.test).digest() == a.digest()
    swapped = Split(a.train.images, a.train.labels, a.train.patients[::-1].copy())
    assert Dataset("x", a.classes, swapped, a.test).digest() != a.digest()


def test_digest_survives_non_contiguous_arrays():
    a = toy()
    strided = np.repeat(a.train.images, 2, axis=0)[::2]
    assert Dataset("x", a.classes, Split(strided, a.train.labels), a.test).digest() == a.digest()


def test_default_classes_sort_in_order():
    assert list(default_classes(11)) == sorted(default_classes(11))
    data = Dataset.from_arrays("x", np.zeros((2, 4, 4), U8), [0, 2], np.zeros((1, 4, 4), U8), [1])
    assert data.classes == ("class-0", "class-1", "class-2")


@settings(max_examples=100)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=80), st.data())
def test_stratified_subset_keeps_shares(labels, data):
    labels = as_labels(labels)
    size = data.draw(st.integers(1, len(labels)))
    chosen = stratified_subset(labels, size, np.random.default_rng(0))
    assert len(np.unique(chosen)) == size and (np.diff(chosen) > 0).all()
    for c in range(5):
        exact = size * (labels == c).sum() / len(labels)
        assert abs((labels[chosen] == c).sum() - exact) <= 1.0 + 1e-9


@pytest.mark.parametrize("size", [0, -1, 201])
def test_stratified_subset_refuses(size):
    with raises("bad_subset_size"):
        stratified_subset(toy().train.labels, size, np.random.default_rng(0))
