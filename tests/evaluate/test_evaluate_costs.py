"""Costs in words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbicross.evaluate.costs import format_bytes, format_flops, format_seconds, training_flops


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "n/a"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (44_700_000, "44.7 MB"),
        (3 * 10**12, "3.00 TB"),
        (5 * 10**21, "5000 EB"),
        (-2_500, "-2.50 kB"),
    ],
)
def test_bytes(count, text):
    assert format_bytes(count) == text


def test_flops():
    assert format_flops(913_408_000) == "913 MFLOP"
    assert format_flops(0.5) == "0.5 FLOP"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "n/a"),
        (0, "0 ms"),
        (0.25, "250 ms"),
        (0.9996, "1.0 s"),
        (4.23, "4.2 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.6, "1 h 00 min"),
        (7_800, "2 h 10 min"),
        (-4.2, "-4.2 s"),
    ],
)
def test_seconds(seconds, text):
    assert format_seconds(seconds) == text


@given(st.floats(0, 1e18))
def test_no_number_is_printed_with_a_prefix_too_small(value):
    number, unit = format_bytes(value).split()
    assert float(number) < 1000
    factor = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15, "EB": 1e18}[unit]
    assert float(number) * factor == pytest.approx(value, rel=0.006)


def test_training_is_three_forward_passes_an_image():
    assert training_flops(10, samples=7, epochs=2) == 420
