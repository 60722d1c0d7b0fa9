"""The benchmark of an audit measures one, smaller here."""

from __future__ import annotations

from benchmarks import audit

SMALL = {"shadows": 4, "images": 20, "epochs": 1, "canaries": 20, "inverted": 2, "steps": 1}


def test_it_takes_time() -> None:
    assert audit.seconds("cnn", 12, 60, 60, 1, SMALL) > 0
