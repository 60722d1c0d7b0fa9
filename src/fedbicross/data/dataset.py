"""What every loader returns: images as uint8 [n, H, W, C], integer labels, and who and where they came from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedbicross.errors import DataError

Images: TypeAlias = NDArray[np.uint8]
Indices: TypeAlias = NDArray[np.int64]
Names: TypeAlias = NDArray[np.str_]


@dataclass(frozen=True, eq=False)
class Split:
    """Images with their labels and, where known, a patient and a site for each; length 0 is allowed."""

    images: Images
    labels: Indices
    patients: Names | None = None
    sites: Names | None = None

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        if images.ndim != 4 or images.dtype != np.uint8:
            raise DataError("bad_images", f"images must be uint8 [n, H, W, C], got {images.dtype} {images.shape}")
        if images.shape[1] != images.shape[2] or images.shape[1] == 0:
            raise DataError("not_square", f"images must be square, got {images.shape[1]} x {images.shape[2]} pixels")
        if images.shape[3] not in (1, 3):
            raise DataError("bad_channels", f"images must have 1 or 3 channels, got {images.shape[3]}")
        if labels.ndim != 1 or labels.dtype != np.int64:
            raise DataError("bad_labels", f"labels must be int64 [n], got {labels.dtype} {labels.shape}")
        for what, values in (("labels", labels), ("patients", self.patients), ("sites", self.sites)):
            if values is not None and len(values) != len(images):
                raise DataError("length_mismatch", f"{len(images)} images but {len(values)} {what}")
        for what, names in (("patients", self.patients), ("sites", self.sites)):
            if names is not None and (names.ndim != 1 or names.dtype.kind != "U"):
                raise DataError("bad_names", f"{what} must be a 1-D array of strings, got {names.dtype} {names.shape}")

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Indices) -> Split:
        """The images at ``indices``, copied."""
        return Split(
            self.images[indices],
            self.labels[indices],
            None if self.patients is None else self.patients[indices],
            None if self.sites is None else self.sites[indices],
        )


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training and a test split with the same classes; ``note`` is the caveat and licence to print with results.

    ``train`` holds the official train and validation images together, as the papers do.
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split
    note: str = ""

    def __post_init__(self) -> None:
        if len(self.classes) < 2:
            raise DataError("one_class", f"{self.name}: at least two classes are needed, got {list(self.classes)}")
        if len(set(self.classes)) != len(self.classes):
            raise DataError("duplicate_class", f"{self.name}: class names must differ, got {list(self.classes)}")
        if self.train.images.shape[1:] != self.test.images.shape[1:]:
            raise DataError(
                "shape_mismatch",
                f"{self.name}: train images are {self.train.images.shape[1:]}, test {self.test.images.shape[1:]}",
            )
        for what, split in (("train", self.train), ("test", self.test)):
            if len(split) == 0:
                raise DataError("empty", f"{self.name}: the {what} split has no images")
            low, high = int(split.labels.min()), int(split.labels.max())
            if low < 0 or high >= len(self.classes):
                bad = low if low < 0 else high
                raise DataError("label_range", f"{self.name}: {what} label {bad} is outside 0..{len(self.classes) - 1}")
        # A patient on both sides would make every test number too good, so this is refused rather than noted.
        if self.train.patients is not None and self.test.patients is not None:
            shared = np.intersect1d(self.train.patients, self.test.patients)
            if len(shared):
                raise DataError(
                    "patient_in_both_splits",
                    f"{self.name}: {len(shared)} patients are in both train and test, e.g. {str(shared[0])!r}; "
                    "keep each on one side, or --accept patient_in_both_splits, which ignores patients",
                )

    @property
    def channels(self) -> int:
        """1 (grey) or 3 (RGB)."""
        return int(self.train.images.shape[3])

    @property
    def image_size(self) -> int:
        """Side of the square images in pixels."""
        return int(self.train.images.shape[1])

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    def digest(self) -> str:
        """SHA-256 of the content: classes, pixels, labels, patients and sites, but neither name nor note."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        sha = hashlib.sha256(repr(self.classes).encode())
        for split in (self.train, self.test):
            for values in (split.images, split.labels, split.patients, split.sites):
                _hash_array(sha, values)
        return sha.hexdigest()

    @classmethod
    def from_arrays(
        cls,
        name: str,
        train_images: ArrayLike,
        train_labels: ArrayLike,
        test_images: ArrayLike,
        test_labels: ArrayLike,
        *,
        classes: Sequence[str] | None = None,
        train_patients: ArrayLike | None = None,
        test_patients: ArrayLike | None = None,
        train_sites: ArrayLike | None = None,
        test_sites: ArrayLike | None = None,
        note: str = "",
    ) -> Dataset:
        """Build a dataset from arrays; grey images may be [n, H, W], labels any integer type, [n] or [n, 1]."""
        train = Split(
            as_images(train_images), as_labels(train_labels), _as_names(train_patients), _as_names(train_sites)
        )
        test = Split(as_images(test_images), as_labels(test_labels), _as_names(test_patients), _as_names(test_sites))
        if classes is None:
            highest = max((int(s.labels.max()) for s in (train, test) if len(s)), default=0)
            classes = default_classes(highest + 1)
        return cls(name, tuple(classes), train, test, note)


def default_classes(count: int) -> tuple[str, ...]:
    """Names for classes nobody named; zero-padded so that sorting keeps their order."""
    width = len(str(max(count - 1, 0)))
    return tuple(f"class-{i:0{width}d}" for i in range(count))


def as_images(values: ArrayLike) -> Images:
    """uint8 [n, H, W, C] from [n, H, W] or [n, H, W, C]; other types are refused, never rescaled by a guess."""
    images = np.asarray(values)
    if images.dtype != np.uint8:
        raise DataError("bad_images", f"images must be uint8 (0..255), got {images.dtype}")
    return images[..., None] if images.ndim == 3 else images


def as_labels(values: ArrayLike) -> Indices:
    """int64 [n] from integers [n] or [n, 1]."""
    labels = np.asarray(values)
    if labels.dtype.kind == "f":
        raise DataError("float_labels", f"labels must be integers, got {labels.dtype}")
    if labels.dtype.kind not in "iu":
        raise DataError("bad_labels", f"labels must be integers, got {labels.dtype}")
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim == 2:
        raise DataError("multi_label", f"one label per image is needed, got {labels.shape[1]} columns")
    if labels.dtype == np.uint64 and labels.size and int(labels.max()) > np.iinfo(np.int64).max:
        raise DataError("label_range", f"label {int(labels.max())} is too large")
    return labels.astype(np.int64)


def stratified_subset(labels: Indices, size: int, rng: np.random.Generator) -> Indices:
    """Sorted indices of ``size`` samples whose class shares are those of ``labels`` to within one sample a class."""
    n = len(labels)
    if not 0 < size <= n:
        raise DataError("bad_subset_size", f"cannot take {size} of {n} images")
    order = rng.permutation(n)
    order = order[np.argsort(labels[order], kind="stable")]
    # Evenly spaced positions along the images sorted by class.
    positions = np.floor((np.arange(size) + 0.5) * n / size).astype(np.int64)
    return np.sort(order[positions]).astype(np.int64)


def _as_names(values: ArrayLike | None) -> Names | None:
    return None if values is None else np.asarray(values).astype(np.str_)


def _hash_array(sha: Any, values: NDArray[Any] | None) -> None:
    if values is None:
        sha.update(b"none;")
        return
    if values.dtype.kind == "U":  # a fixed-width array's bytes would depend on its longest string
        lengths = np.char.str_len(values).astype("<i8")
        sha.update(f"text{values.shape};".encode() + lengths.tobytes() + "".join(values.tolist()).encode())
        return
    little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    sha.update(f"{little.dtype.str}{little.shape};".encode())
    sha.update(little.data)
