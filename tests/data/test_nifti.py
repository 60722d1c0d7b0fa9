from __future__ import annotations

import gzip
import os
import tracemalloc

import nibabel
import numpy as np
import pytest

from fedbicross.data import load_dataset
from fedbicross.data.folder import find_images
from fedbicross.data.nifti import EVERY, Volume

from .helpers import raises
from .scans import nifti


def body(depth=20, seed=0, size=16):
    """Bright tissue in the middle slices, nothing in the outer ones."""
    values = np.zeros((size, size, depth), np.int16)
    inner = slice(depth // 4, depth - depth // 4)
    values[2:-2, 2:-2, inner] = np.random.default_rng(seed).integers(200, 1000, (size - 4, size - 4, depth))[..., inner]
    return values


def test_every_fourth_slice_that_is_not_empty(tmp_path):
    volume = Volume(nifti(tmp_path / "x.nii.gz", body()), 10**6)
    assert EVERY == 4 and volume.slices == [5, 9, 13]  # of 1, 5, 9, 13, 17
    assert volume.size == (16, 16)


@pytest.mark.parametrize(("depth", "slices"), [(1, [0]), (4, [1]), (9, [0, 4, 8])])
def test_slices_are_centred(tmp_path, depth, slices):
    values = np.random.default_rng(0).integers(1000, size=(8, 8, depth)).astype(np.int16)
    assert Volume(nifti(tmp_path / "x.nii", values), 10**6).slices == slices


def test_percentiles_of_the_volume_and_the_front_at_the_top(tmp_path):
    values = np.zeros((10, 12, 1), np.float32)
    values[:, 6:] = 100  # the front half
    values[:5, 6:] = 50  # its left side
    values[0, 0, 0] = np.nan
    image = np.asarray(Volume(nifti(tmp_path / "x.nii", values), 10**6).decode(0))
    assert image.shape == (12, 10)
    assert image[0, 0] == 128 and image[0, -1] == 255 and image[-1, -1] == 0 and image[-1, 0] == 0


def test_volumes_are_turned_by_their_header(tmp_path):
    values = np.random.default_rng(0).integers(1000, size=(6, 7, 8)).astype(np.int16)
    turned = nibabel.as_closest_canonical(nibabel.Nifti1Image(values, np.eye(4)))
    straight = Volume(nifti(tmp_path / "a.nii", np.asarray(turned.dataobj)), 10**6)
    affine = np.array([[0, 0, -1, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1.0]])
    other = Volume(nifti(tmp_path / "b.nii", np.transpose(values, (1, 2, 0))[:, :, ::-1], affine), 10**6)
    assert straight.slices == other.slices
    assert np.array_equal(np.asarray(straight.decode(3)), np.asarray(other.decode(3)))


def test_scaling_is_applied_in_the_header_of_either_version(tmp_path):
    values = np.random.default_rng(0).random((8, 8, 4)).astype(np.float32) * 3 - 1
    image = nibabel.Nifti2Image(values, np.eye(4))
    image.set_data_dtype(np.int16)
    image.to_filename(tmp_path / "x.nii")
    volume = Volume(tmp_path / "x.nii", 10**6)
    assert volume.slope != 1 and abs(volume.high - np.percentile(values, 99.5)) < 1e-3


def test_a_volume_is_a_patient(tmp_path):
    for number in range(10):
        nifti(tmp_path / "ab"[number % 2] / f"{number}.nii.gz", body(seed=number))
    data = load_dataset(tmp_path, image_size=8)
    assert len(data.train) + len(data.test) == 30 and data.channels == 1
    assert not set(data.train.patients) & set(data.test.patients) and len(set(data.train.patients)) == 8
    assert [entry.slice for entry in find_images(tmp_path)[0].entries[:3]] == [5, 9, 13]


# --- refusals ------------------------------------------------------------------------------------------------------


def changed(path, place, dtype, *values):
    data = bytearray(path.read_bytes())
    new = np.array(values, dtype).tobytes()
    data[place : place + len(new)] = new
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_a_huge_declared_size_allocates_nothing(tmp_path, suffix):
    path = changed(nifti(tmp_path / "x.nii", body()), 40, "<i2", 3, 30000, 30000, 30000)
    if suffix == ".nii.gz":
        path = tmp_path / "x.nii.gz"
        path.write_bytes(gzip.compress((tmp_path / "x.nii").read_bytes()))
    with raises("too_many_pixels", "30000 x 30000 x 30000"):
        Volume(path, 10**6)


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_volume_is_in_memory_once(tmp_path, monkeypatch, suffix, turned):
    values = np.random.default_rng(0).integers(1000, size=(128, 128, 256)).astype(np.int16)
    affine = np.array([[0, 0, -1, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1.0]]) if turned else np.eye(4)
    path = nifti(tmp_path / f"x{suffix}", values, affine)
    monkeypatch.setattr("fedbicross.data.nifti._SAMPLE", 1000)
    tracemalloc.start()
    try:
        volume = Volume(path, 10**6)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert volume.voxels.size == values.size and peak < 1.5 * values.nbytes


def test_a_header_that_wants_gigabytes_of_notes(tmp_path):
    path = changed(nifti(tmp_path / "x.nii", body()), 108, "<f4", 2e9)
    with raises("unreadable_nifti"):
        Volume(path, 10**6)


@pytest.mark.parametrize("size", [0, 3, 100, 347, 352, 4000])
def test_truncated(tmp_path, size):
    path = nifti(tmp_path / "x.nii", body())
    os.truncate(path, size)
    with raises("unreadable_nifti", "x.nii"):
        Volume(path, 10**6)
    packed = tmp_path / "y.nii.gz"
    packed.write_bytes(gzip.compress(nifti(tmp_path / "z.nii", body()).read_bytes())[: size // 2])
    with raises("unreadable_nifti", "y.nii.gz"):
        Volume(packed, 10**6)


def test_other_content(tmp_path):
    nifti(tmp_path / "four.nii", np.zeros((4, 4, 4, 2), np.int16))
    nifti(tmp_path / "complex.nii", np.zeros((4, 4, 4), np.complex64))
    nifti(tmp_path / "dark.nii", np.zeros((4, 4, 4), np.int16))
    nifti(tmp_path / "nan.nii", np.full((4, 4, 4), np.nan, np.float32))
    (tmp_path / "text.nii").write_text("hello " * 200)
    (tmp_path / "text.nii.gz").write_text("hello " * 200)
    for name, code in (
        ("four.nii", "unsupported_nifti"),
        ("complex.nii", "unsupported_nifti"),
        ("dark.nii", "empty_volume"),
        ("nan.nii", "unreadable_nifti"),
        ("text.nii", "unreadable_nifti"),
        ("text.nii.gz", "unreadable_nifti"),
    ):
        with raises(code, name):
            assert Volume(tmp_path / name, 10**6).slices


def test_the_extra_is_named(tmp_path, monkeypatch):
    nifti(tmp_path / "a" / "x.nii", body())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises("needs_nifti", "fedbicross[nifti]"):
        find_images(tmp_path)
