from __future__ import annotations

import numpy as np
import pytest

from fedbicross.data import DATASETS
from fedbicross.data.cells import CLASSES, KINDS, draw, draw_labels, load_cells

from .helpers import raises


@pytest.fixture(scope="module")
def cells():
    return load_cells(seed=0, train_size=2000, test_size=600)


def test_shapes_and_names(cells):
    assert cells.train.images.shape == (2000, 28, 28, 3)
    assert cells.classes == CLASSES == DATASETS["cells"].classes == DATASETS["bloodmnist"].classes
    assert "synthetic" in cells.note


def test_shares_are_bloodmnists_in_every_prefix():
    shares = np.array([kind.share for kind in KINDS.values()]) / 100
    for count in (50, 500, 4000):
        counts = np.bincount(draw_labels(count, 3, "train"), minlength=8)
        assert np.abs(counts - shares * count).max() < 3


def test_deterministic_and_a_larger_set_extends_a_smaller():
    few, labels = draw(5, 28, 7, "train")
    many, more_labels = draw(300, 28, 7, "train")  # more than one chunk
    assert np.array_equal(few, many[:5]) and np.array_equal(labels, more_labels[:5])
    assert not np.array_equal(few, draw(5, 28, 8, "train")[0])
    assert not np.array_equal(few, draw(5, 28, 7, "test")[0])


def test_global_random_state_is_untouched():
    before = np.random.get_state()[1].copy()  # noqa: NPY002 - this is what must not change
    draw(3, 28, 0, "train")
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002


@pytest.mark.parametrize("size", [16, 32, 64])
def test_other_sizes_show_the_same_cells(size):
    images, labels = draw(40, size, 0, "train")
    small, small_labels = draw(40, 16, 0, "train")
    assert images.shape == (40, size, size, 3) and np.array_equal(labels, small_labels)
    block = size // 16
    pooled = images.reshape(40, 16, block, 16, block, 3).mean((2, 4)) if block * 16 == size else small
    assert np.abs(pooled - small).mean() < 12


def test_every_image_has_contrast(cells):
    assert (cells.train.images.std((1, 2)).max(1) > 5).all()


def test_difficulty(cells):
    """Far from random, yet too hard for linear models; a small ResNet reaches 93 to 94 % (measured by hand)."""

    def pooled(split):
        blocks = split.images.reshape(len(split), 14, 2, 14, 2, 3).mean((2, 4))
        return blocks.reshape(len(split), -1) / 255 - 0.5

    train, test = pooled(cells.train), pooled(cells.test)
    centroids = np.stack([train[cells.train.labels == c].mean(0) for c in range(8)])
    nearest = ((test[:, None] - centroids) ** 2).sum(-1).argmin(1)
    assert 0.40 < (nearest == cells.test.labels).mean() < 0.70
    mean, targets = train.mean(0), np.eye(8)[cells.train.labels]
    centred = train - mean
    ridge = np.linalg.solve(
        centred.T @ centred + 10 * np.eye(centred.shape[1]), centred.T @ (targets - targets.mean(0))
    )
    linear = ((test - mean) @ ridge + targets.mean(0)).argmax(1)
    assert 0.50 < (linear == cells.test.labels).mean() < 0.82


@pytest.mark.parametrize("size", [7, 513])
def test_bad_image_size(size):
    with raises("bad_image_size"):
        load_cells(size)


@pytest.mark.parametrize("sizes", [(0, 10), (10, 0), (2_000_000, 10)])
def test_bad_sizes(sizes):
    with raises("bad_subset_size"):
        load_cells(28, 0, *sizes)
