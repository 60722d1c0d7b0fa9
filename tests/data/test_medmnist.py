from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest

from fedbicross.data import DATASETS, load_dataset
from fedbicross.data.catalogue import medmnist_info
from fedbicross.data.medmnist import load_medmnist, load_npz

from .helpers import raises, real_file


def arrays(channels=(), n=(6, 2, 4), size=28, classes=2, **change):
    rng = np.random.default_rng(0)
    out = {}
    for split, count in zip(("train", "val", "test"), n, strict=True):
        out[f"{split}_images"] = rng.integers(256, size=(count, size, size, *channels), dtype=np.uint8)
        out[f"{split}_labels"] = (np.arange(count) % classes).astype(np.uint8)[:, None]
    return out | change


def write(path, **content):
    np.savez_compressed(path, **content)
    return path


@pytest.mark.parametrize(("channels", "expected"), [((), 1), ((3,), 3)])
def test_train_and_val_are_merged(tmp_path, channels, expected):
    content = arrays(channels)
    data = load_npz(write(tmp_path / "mine.npz", **content))
    assert (data.name, data.channels, len(data.train), len(data.test)) == ("mine", expected, 8, 4)
    assert np.array_equal(data.train.images[6:, ..., 0], content["val_images"].reshape(2, 28, 28, -1)[..., 0])
    assert data.classes == ("class-0", "class-1")


def test_known_name_gives_class_names_licence_and_a_doubt_about_the_bytes(tmp_path):
    write(tmp_path / "breastmnist.npz", **arrays())
    data = load_medmnist("breastmnist", tmp_path)
    assert data.classes[0] == "malignant"
    assert "CC BY 4.0" in data.note and "not the official" in data.note


def test_other_sizes_have_their_own_file(tmp_path):
    write(tmp_path / "breastmnist_64.npz", **arrays(size=64, n=(2, 2, 2)))
    assert load_medmnist("breastmnist", tmp_path, 64).image_size == 64
    with raises("wrong_size", "64"):
        load_npz(tmp_path / "breastmnist_64.npz", 28)


def test_missing_file_says_where_to_get_it(tmp_path):
    with raises("missing_file", "https://zenodo.org/records/10519652/files/octmnist.npz"):
        load_medmnist("octmnist", tmp_path)
    with raises("missing_file"):
        load_npz(tmp_path / "no.npz")


def test_catalogue_refuses():
    with raises("multi_label", "chestmnist"):
        medmnist_info("chestmnist")
    with raises("unknown_dataset", "did you mean 'bloodmnist'"):
        medmnist_info("bloodmnits")
    with raises("bad_image_size", "28, 64, 128, 224"):
        medmnist_info("bloodmnist", 32)


def test_catalogue_is_consistent():
    assert len(DATASETS) == 13
    for name, info in DATASETS.items():
        assert info.name == name and info.channels in (1, 3) and info.licence
        assert all(len(md5) == 32 and set(md5) <= set("0123456789abcdef") for md5 in info.md5.values())
        assert len(set(info.classes)) == len(info.classes) and (len(info.classes) >= 2 or info.refused)
    every = [md5 for info in DATASETS.values() for md5 in info.md5.values()]
    assert len(set(every)) == len(every) == 44


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("float_labels", {"val_labels": np.zeros((2, 1))}),
        ("multi_label", {"train_labels": np.zeros((6, 14), np.uint8)}),
        ("bad_labels", {"train_labels": np.array(["a"] * 6)}),
        ("length_mismatch", {"train_labels": np.zeros((5, 1), np.uint8)}),
        ("bad_images", {"test_images": np.zeros((4, 28, 28), np.float32)}),
        ("bad_images", {"test_images": np.zeros((4, 28), np.uint8)}),
        ("shape_mismatch", {"test_images": np.zeros((4, 32, 32), np.uint8)}),
        ("not_square", {"test_images": np.zeros((4, 28, 30), np.uint8)}),
        ("label_range", {"test_labels": np.array([[0], [1], [0], [2**40]])}),
        ("label_range", {"test_labels": np.array([[0], [1], [0], [-1]])}),
        ("object_array", {"train_labels": np.array([[0], None, 1, 2, 3, 4], dtype=object)}),
        ("one_class", {k: np.zeros((n, 1), np.uint8) for k, n in zip(
            ("train_labels", "val_labels", "test_labels"), (6, 2, 4), strict=True)}),
    ],
)  # fmt: skip
def test_refuses_content(tmp_path, code, change):
    with raises(code):
        load_npz(write(tmp_path / "mine.npz", **arrays(**change)))


def test_label_out_of_range_of_a_known_set(tmp_path):
    write(tmp_path / "breastmnist.npz", **arrays(classes=3))
    with raises("label_range", "outside 0..1"):
        load_medmnist("breastmnist", tmp_path)


def test_chestmnist_file_is_refused_by_name_too(tmp_path):
    with raises("multi_label", "14 findings"):
        load_npz(write(tmp_path / "chestmnist.npz", **arrays()))


def test_missing_key(tmp_path):
    content = arrays()
    del content["val_labels"]
    with raises("missing_key", "val_labels"):
        load_npz(write(tmp_path / "mine.npz", **content))


def test_size_limit_is_checked_before_unpacking(tmp_path):
    path = write(tmp_path / "mine.npz", **arrays())
    with raises("too_large"):
        load_npz(path, max_bytes=1000)


def forged_header(shape) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return stream.getvalue() + b"\0" * 64


def rewrite(source, target, member, payload):
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, payload if info.filename == member else old.read(info))


@pytest.mark.parametrize("payload", [forged_header((10**6, 28, 28)), b"", b"\x93NUMPY\x01\x00", b"not an array" * 9])
def test_forged_or_broken_member(tmp_path, payload):
    good = write(tmp_path / "good.npz", **arrays())
    rewrite(good, tmp_path / "bad.npz", "train_images.npy", payload)
    with raises("corrupt_file"):
        load_npz(tmp_path / "bad.npz")


def test_damaged_files(tmp_path):
    good = write(tmp_path / "good.npz", **arrays()).read_bytes()
    bad = tmp_path / "bad.npz"
    for content in (b"", b"PK\x03\x04", good[: len(good) // 2], b"x" * 1000):
        bad.write_bytes(content)
        with raises("corrupt_file"):
            load_npz(bad)
    flipped = bytearray(good)
    flipped[200] ^= 0xFF  # inside the first array's compressed pixels
    bad.write_bytes(flipped)
    with raises("corrupt_file"):
        load_npz(bad)


@pytest.mark.parametrize(
    ("name", "train", "test", "channels"),
    [("bloodmnist", 13671, 3421, 3), ("dermamnist", 8010, 2005, 3), ("pneumoniamnist", 5232, 624, 1)],
)
def test_real_files(name, train, test, channels):
    path = real_file(f"{name}.npz")
    data = load_dataset(name, path.parent)
    assert (len(data.train), len(data.test), data.channels, data.image_size) == (train, test, channels, 28)
    assert data.classes == DATASETS[name].classes
    assert set(np.unique(data.train.labels)) == set(range(data.num_classes))
    small = load_dataset(name, path.parent, train_size=500, test_size=100, seed=1)
    assert (len(small.train), len(small.test)) == (500, 100)
    shares = [np.bincount(split.labels, minlength=data.num_classes) / len(split) for split in (small.train, data.train)]
    assert np.abs(shares[0] - shares[1]).max() < 0.005
