from __future__ import annotations

from argparse import Namespace

import numpy as np
import pytest
from benchmarks.membership import pairs, private_row, rows_of

from fedbicross.data.cells import load_cells
from fedbicross.disclosure.shadows import Shadows
from small import TINY_METHODS


def _given() -> Namespace:
    private = {"8": {"epochs": 1, "batch_size": 16, "lr": 0.1}}
    small = {"sites": 2, "images": 40, "controls": 30, "epochs": 1, "shadows": 4, "model": "resnet8", "device": "cpu"}
    return Namespace(**small, no_augment=False, settings=TINY_METHODS, private=private)


@pytest.mark.slow
def test_a_network_with_noise_beside_one_without() -> None:
    pytest.importorskip("opacus")
    data = load_cells(8, 0, 120, 60)
    rows = [private_row(_given(), 0, epsilon, data) for epsilon in (None, 8.0)]
    assert [row["model"] for row in rows] == [
        "plain network with group normalisation",
        "the same, DP-SGD with ε = 8",
    ]
    assert all(row["shadows"] == 4 and row["canaries"] is not None for row in rows)
    assert rows[0]["likelihood_ratio"] != rows[1]["likelihood_ratio"], "shadows and network have the noise in them"


@pytest.mark.slow
def test_rows_of_all_four_models() -> None:
    data = load_cells(8, 0, 120, 60)
    rows = rows_of(_given(), 0, data)
    assert [row["canaries"] is not None for row in rows] == [True, True, False, False]
    for row in rows:
        assert 0 <= row["accuracy"] <= 1
        assert row["controls"] == 30
        assert "roc" not in row["confidence"]


def test_pairs_average_logarithms_under_the_class_mix() -> None:
    rng = np.random.default_rng(0)
    plain, balanced = (rng.dirichlet(np.ones(3), (2, 4)) for _ in range(2))
    prior = np.array([0.2, 0.3, 0.5])
    inside = np.ones((2, 4), bool)
    found = pairs(Shadows(plain, inside), Shadows(balanced, inside), prior).probabilities
    for k in range(2):
        for n in range(4):
            slow = [np.exp(0.5 * np.log(plain[k, n, c]) + 0.5 * np.log(balanced[k, n, c] * prior[c])) for c in range(3)]
            assert np.allclose(found[k, n], np.array(slow) / sum(slow))
