"""Costs in words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedbicross.evaluate import costs
from fedbicross.evaluate.costs import format_bytes, format_flops, format_seconds


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


MIB = 1 << 20


def test_the_papers_numbers() -> None:
    assert costs.sequence_bytes(1, 5, 768) == 15 * 1024
    limit = costs.break_even(round(144.33 * MIB), 5, 768)
    assert 9_840 < limit < 9_860  # "about 9,850"
    assert costs.upload_size(limit, 5, 768, round(144.33 * MIB)).cheaper == "sequences"
    assert costs.upload_size(limit + 1, 5, 768, round(144.33 * MIB)).cheaper == "generator"


def test_the_cheaper_one_bounds_the_cost() -> None:
    for count in (0, 1, 50, 100, 1000):
        size = costs.upload_size(count, 2, 4, 2000)
        assert size.sequences == count * 32
        assert getattr(size, size.cheaper) == min(size.sequences, size.generator)


def test_bytes_of_a_module_are_those_of_its_tensors() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    assert costs.module_bytes(module) == 4 * (6 + 2 + 2 + 2 + 2 + 2) + 8  # and an int64 counter
