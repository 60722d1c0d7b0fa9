"""Load data by any address: a known name, a folder, a CSV manifest or an ``.npz`` file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedbicross.data import cells, folder, medmnist
from fedbicross.data.catalogue import DATASETS
from fedbicross.data.dataset import Dataset, Split, stratified_subset
from fedbicross.errors import ConfigError, DataError, nearest


def default_data_dir() -> Path:
    """``$FEDBICROSS_DATA``, or ``~/.cache/fedbicross`` where that is not set."""
    return Path(os.environ.get("FEDBICROSS_DATA") or Path.home() / ".cache" / "fedbicross")


def load_dataset(
    name: str | Path,
    data_dir: Path | str | None = None,
    image_size: int = 28,
    seed: int = 0,
    train_size: int | None = None,
    test_size: int | None = None,
    test_fraction: float = 0.2,
    accept: Sequence[str] = (),
) -> Dataset:
    """Load ``cells``, a MedMNIST set by name, or the folder, ``.csv`` or ``.npz`` at a path.

    ``train_size`` and ``test_size`` keep at most so many of each split, with the same class shares (for ``cells``: how
    many to draw). ``test_fraction`` is held out only where the data name no test images. ``accept`` names
    findings of ``fedbicross check`` that are not to stop it (``patient_in_both_splits``: patients are then ignored).
    Nothing is downloaded here.
    """
    if seed < 0:
        raise ConfigError("bad_seed", f"the seed must be 0 or more, got {seed}")
    text = os.fspath(name)
    if text == "cells":
        train = cells.TRAIN_SIZE if train_size is None else train_size
        test = cells.TEST_SIZE if test_size is None else test_size
        return cells.load_cells(image_size, seed, train, test)
    if text in DATASETS:
        place = default_data_dir() if data_dir is None else Path(data_dir)
        dataset = medmnist.load_medmnist(text, place, image_size)
    else:
        dataset = _load_path(Path(text), image_size, test_fraction, np.random.default_rng((seed, 0)), accept)
    train_part = _subset(dataset.train, train_size, np.random.default_rng((seed, 1)))
    test_part = _subset(dataset.test, test_size, np.random.default_rng((seed, 2)))
    if train_part is dataset.train and test_part is dataset.test:
        return dataset
    return Dataset(dataset.name, dataset.classes, train_part, test_part, dataset.note)


def _load_path(
    path: Path, image_size: int, test_fraction: float, rng: np.random.Generator, accept: Sequence[str]
) -> Dataset:
    suffix = path.suffix.lower()
    if suffix == ".npz":
        return medmnist.load_npz(path, image_size)
    if suffix == ".csv" or path.is_dir():
        return folder.load_folder(path, image_size, test_fraction=test_fraction, rng=rng, accept=accept)
    if path.exists():
        raise DataError("unknown_format", f"{path} is neither a folder nor a .csv or .npz file")
    if len(path.parts) > 1:
        raise DataError("missing_file", f"{path} does not exist")
    raise ConfigError("unknown_dataset", f"no dataset or folder is called {str(path)!r}{nearest(str(path), DATASETS)}")


def _subset(split: Split, size: int | None, rng: np.random.Generator) -> Split:
    if size is None or size >= len(split):
        return split
    return split.take(stratified_subset(split.labels, size, rng))
