"""Numbers and names as they are shown."""

from __future__ import annotations

import pytest

from fedbicross.report import text
from fedbicross.report.svg import spaced, ticks


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), True, "3", [], 10**400, 1e101])
def test_not_a_number(value):
    assert text.number(value) is None
    for show in (text.percent, text.points, text.size, text.flops, text.duration, text.fixed):
        assert show(value) == "n/a"


def test_percent_and_points():
    assert text.percent(0.9614) == "96.1"
    assert text.points(0.0123) == "+1.2"
    assert text.points(-0.0123) == "−1.2"
    assert text.points(-0.0001) == "0.0"
    assert text.percent_sd(text.stat([0.5, 0.7])) == "60.0 ± 14.1"
    assert text.percent_sd(text.stat([0.5, None])) == "50.0"


def test_units():
    assert [text.size(value) for value in (0, 999, 1000, 44_700_000, 999_999, 2e15)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "44.7 MB",
        "1.00 MB",
        "2,000 TB",
    ]
    assert [text.duration(value) for value in (0.123, 12.34, 311, 7300)] == [
        "0.12 s",
        "12.3 s",
        "5 min 11 s",
        "2 h 02 min",
    ]
    assert text.flops(3.4e15) == "3.40 PFLOP"


def test_names():
    assert text.short("x" * 10_000, 10) == "x" * 9 + "…"
    assert text.short("病院" * 20, 10) == "病院病院" + "…"
    assert text.clean("a\u202eb\x00c\nd") == "a\ufffdb\ufffdc d"
    assert text.short("fine") == "fine"


def test_ticks_and_labels():
    assert ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert ticks(3, 3) == [3]
    assert ticks(1, 12, whole=True) == [5, 10] and ticks(1, 3, whole=True) == [1, 2, 3], "there is no epoch 2.5"
    placed = spaced([10, 10, 11], 14, 0, 100)
    assert sorted(placed) == placed and placed[1] - placed[0] >= 14
