from __future__ import annotations

import subprocess
import sys

import numpy as np

from fedbicross.data import default_data_dir, load_dataset

from .helpers import raises
from .test_folder import class_folders, manifest, picture
from .test_medmnist import arrays, write


def test_cells_by_name():
    data = load_dataset("cells", image_size=16, seed=3, train_size=30, test_size=10)
    assert (len(data.train), len(data.test), data.image_size) == (30, 10, 16)
    assert data.digest() == load_dataset("cells", None, 16, 3, 30, 10).digest()
    assert np.array_equal(
        load_dataset("cells", image_size=16, seed=3, train_size=9).train.images, data.train.images[:9]
    )


def test_every_kind_of_path(tmp_path):
    folder = class_folders(tmp_path / "pets", 10)
    assert load_dataset(folder, image_size=8).name == "pets"
    assert load_dataset(str(folder), image_size=8, test_fraction=0.5).test.labels.size == 10
    for i in range(10):
        picture(tmp_path / f"{i}.png", i)
    path = manifest(tmp_path, [(f"{i}.png", "ab"[i % 2]) for i in range(10)])
    assert load_dataset(path, image_size=8, train_size=4).train.labels.tolist().count(0) == 2
    write(tmp_path / "own.npz", **arrays())
    assert load_dataset(tmp_path / "own.npz").name == "own"


def test_seed_chooses_the_held_out_images(tmp_path):
    folder = class_folders(tmp_path, 10)
    assert load_dataset(folder, seed=1).digest() == load_dataset(folder, seed=1).digest()
    assert load_dataset(folder, seed=1).digest() != load_dataset(folder, seed=2).digest()


def test_data_dir(tmp_path, monkeypatch):
    write(tmp_path / "breastmnist.npz", **arrays())
    assert len(load_dataset("breastmnist", tmp_path).test) == 4
    monkeypatch.setenv("FEDBICROSS_DATA", str(tmp_path))
    assert default_data_dir() == tmp_path
    assert load_dataset("breastmnist", train_size=4, test_size=2).train.labels.shape == (4,)
    monkeypatch.delenv("FEDBICROSS_DATA")
    assert default_data_dir().name == "fedbicross"


def test_refusals(tmp_path):
    with raises("unknown_dataset", "did you mean 'cells'"):
        load_dataset("cell")
    with raises("missing_file"):
        load_dataset("no/such/folder")
    with raises("missing_file"):
        load_dataset(tmp_path / "no.npz")
    (tmp_path / "x.pdf").write_text("")
    with raises("unknown_format"):
        load_dataset(tmp_path / "x.pdf")
    with raises("multi_label"):
        load_dataset("chestmnist", tmp_path)
    with raises("bad_seed"):
        load_dataset("cells", seed=-1)
    write(tmp_path / "own.npz", **arrays())
    with raises("bad_subset_size"):
        load_dataset(tmp_path / "own.npz", train_size=-1)


def test_a_size_is_at_most(tmp_path):
    write(tmp_path / "own.npz", **arrays())
    whole = load_dataset(tmp_path / "own.npz")
    assert len(load_dataset(tmp_path / "own.npz", train_size=1000).train) == len(whole.train)
    assert len(load_dataset(tmp_path / "own.npz", train_size=5).train) == 5


def test_import_is_light():
    heavy = ("torch", "PIL", "sklearn", "urllib.request")
    code = f"import sys, fedbicross.data; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
