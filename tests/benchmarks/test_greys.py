from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.greys import cell, in_colour

from fedbicross.data import load_dataset
from small import TINY_METHODS


def test_three_channels_show_the_same() -> None:
    data = load_dataset("cells", image_size=8, train_size=20, test_size=10)
    train, test = (replace(split, images=split.images[..., :1]) for split in (data.train, data.test))
    shown = in_colour(replace(data, train=train, test=test)).test.images
    assert shown.shape == (10, 8, 8, 3) and (shown == test.images).all()


@pytest.mark.slow
def test_a_cell_has_teacher_and_student() -> None:
    row = cell("cells", 8, False, 0, 1, TINY_METHODS["primum"])
    assert row["channels"] == 3 and len(row["class_counts"]) == 5
    assert all(0 <= row[spec]["balanced"] <= 1 for spec in ("ensemble:consensus", "primum:student"))
