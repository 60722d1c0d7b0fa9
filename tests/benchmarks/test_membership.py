from __future__ import annotations

from argparse import Namespace

import numpy as np
import pytest
from benchmarks.membership import pairs, rows_of

from fedbicross.data.cells import load_cells
from fedbicross.disclosure.shadows import Shadows
from small import TINY_METHODS


@pytest.mark.slow
def test_rows_of_all_four_models() -> None:
    data = load_cells(8, 0, 120, 60)
    given = Namespace(sites=2, images=40, controls=30, epochs=1, shadows=4, model="resnet8", settings=TINY_METHODS)
    rows = rows_of(given, 0, data)
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
