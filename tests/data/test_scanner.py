from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from fedbicross.data.scanner import ScannerShift, draw_scanner

from .helpers import raises

UNIT = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
NEUTRAL = ScannerShift(UNIT, 0.0, 0.0, 0.0, 0.0, 0)


def images(n=6, channels=3):
    return np.random.default_rng(0).integers(256, size=(n, 8, 8, channels), dtype=np.uint8)


@pytest.mark.parametrize("channels", [1, 3])
def test_neutral_and_zero_strength_change_nothing(channels):
    x = images(channels=channels)
    assert np.array_equal(NEUTRAL.apply(x, np.arange(6), "train"), x)
    none = draw_scanner(np.random.default_rng(0), 0.0)
    assert np.array_equal(none.apply(x, np.arange(6), "train"), x)


@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_does_not_depend_on_its_companions(channels):
    x, shift = images(channels=channels), draw_scanner(np.random.default_rng(3), 1.0)
    assert shift.noise > 0
    together = shift.apply(x, np.arange(6), "train")
    assert np.array_equal(shift.apply(x[4:5], np.array([4]), "train"), together[4:5])
    assert not np.array_equal(shift.apply(x, np.arange(6), "test"), together)
    assert together.dtype == np.uint8 and together.shape == x.shape
    assert np.abs(together.astype(int) - x).mean() > 2


def test_brightness_contrast_and_blur_by_hand():
    x = np.full((1, 4, 4, 1), 100, np.uint8)
    shifted = dataclasses.replace(NEUTRAL, contrast=0.5, brightness=10.0).apply(x, np.arange(1), "train")
    assert (shifted == 96).all()  # (100 - 128) * 1.5 + 128 + 10
    spot = np.zeros((1, 5, 5, 1), np.uint8)
    spot[0, 2, 2] = 200
    blurred = dataclasses.replace(NEUTRAL, blur=0.25).apply(spot, np.arange(1), "train")[0, ..., 0]
    assert blurred[2].tolist() == [0, 25, 50, 25, 0] and blurred[0].max() == 0


def test_stain_matrix_by_hand():
    x = np.array([[[[63, 127, 255]]]], np.uint8)
    swap = ((0.0, 1.0, 0.0), (1.0, 0.0, 0.0), (0.0, 0.0, 2.0))
    assert dataclasses.replace(NEUTRAL, matrix=swap).apply(x, np.arange(1), "train").tolist() == [[[[127, 63, 255]]]]


def test_larger_than_a_chunk():
    x = np.repeat(images(1), 1100, axis=0)
    out = dataclasses.replace(NEUTRAL, brightness=7.0).apply(x, np.arange(1100), "train")
    assert (out == out[0]).all()


def test_json_round_trip():
    shift = draw_scanner(np.random.default_rng(1), 1.5)
    assert ScannerShift.from_json(json.loads(json.dumps(shift.to_json()))) == shift


@pytest.mark.parametrize(
    "change",
    [
        {"matrix": [[1, 0], [0, 1]]},
        {"matrix": 3},
        {"blur": 2.0},
        {"noise": float("nan")},
        {"seed": -1},
        {"contrast": "x"},
    ],
)
def test_malformed_json(change):
    with raises("partition_format"):
        ScannerShift.from_json(NEUTRAL.to_json() | change)
    with raises("partition_format"):
        ScannerShift.from_json(None)
