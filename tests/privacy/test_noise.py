from __future__ import annotations

import numpy as np
from scipy import stats

from fedbicross.privacy.noise import Secret, Stream


def test_a_stream_is_repeated_and_a_secret_is_not() -> None:
    first, second = (Stream(np.random.default_rng(3)) for _ in range(2))
    assert np.array_equal(first.normal(4, 5), second.normal(4, 5))
    assert not np.array_equal(Secret().normal(4, 5), Secret().normal(4, 5))


def test_both_are_standard_normal_and_uniform() -> None:
    # p-values of a right source are uniform: below 1e-9 once in a thousand million runs
    for source in (Stream(np.random.default_rng(0)), Secret()):
        drawn = source.normal(200, 100)
        assert drawn.shape == (200, 100) and drawn.dtype == np.float64
        assert stats.kstest(drawn.ravel(), "norm").pvalue > 1e-9
        assert stats.kstest(source.uniform(20_000), "uniform").pvalue > 1e-9


def test_no_number_is_infinite(monkeypatch) -> None:
    """The ends of what the system can give."""
    for byte in (b"\x00", b"\xff"):
        monkeypatch.setattr("os.urandom", lambda count, byte=byte: byte * count)
        assert np.isfinite(Secret().normal(3)).all()
        assert ((Secret().uniform(3) > 0) & (Secret().uniform(3) < 1)).all()


def test_no_numbers_at_all() -> None:
    assert Secret().normal(0, 3).shape == (0, 3)
    assert Secret().normal().shape == ()
