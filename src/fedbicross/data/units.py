"""What may be dealt to clients: a patient with all images, or a single image where patients are unknown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedbicross.data.dataset import Indices, Names, Split


@dataclass(frozen=True, eq=False)
class Units:
    """Indivisible groups of images; a group's label is its most frequent one (the lowest of equals)."""

    of_image: Indices  # [images] unit of each image
    label: Indices  # [units]
    size: Indices  # [units] number of images
    are_patients: bool

    def __len__(self) -> int:
        return len(self.label)

    @classmethod
    def of(cls, split: Split, num_classes: int) -> Units:
        """Patients where the split knows them, else images."""
        return cls.of_names(split.patients, split.labels, num_classes)

    @classmethod
    def of_names(cls, patients: Names | None, labels: Indices, num_classes: int) -> Units:
        """Group images by patient name."""
        if patients is None:
            n = len(labels)
            return cls(np.arange(n), labels, np.ones(n, np.int64), False)
        names, unit = np.unique(patients, return_inverse=True)
        unit = unit.reshape(-1).astype(np.int64)
        counts = np.zeros((len(names), num_classes), np.int64)
        np.add.at(counts, (unit, labels), 1)
        return cls(unit, counts.argmax(axis=1).astype(np.int64), counts.sum(axis=1), True)


def split_off_test(
    labels: Indices, patients: Names | None, sites: Names | None, fraction: float, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Which images become the test set: whole patients, spread evenly over sites and classes.

    Units are shuffled, sorted by (site, class) and every 1/fraction-th is taken, so each stratum gives its share to
    within one unit. A class keeps at least one unit for training.
    """
    num_classes = int(labels.max()) + 1
    units = Units.of_names(patients, labels, num_classes)
    stratum = units.label
    if sites is not None:
        first = np.full(len(units), len(labels))
        np.minimum.at(first, units.of_image, np.arange(len(labels)))
        stratum = units.label + num_classes * np.unique(sites, return_inverse=True)[1].reshape(-1)[first]
    order = rng.permutation(len(units))
    order = order[np.argsort(stratum[order], kind="stable")]
    # A random start, then equal steps: a unit is taken where the running sum passes a whole number.
    steps = np.floor(np.arange(len(units) + 1) * fraction + rng.random())
    test_unit = np.zeros(len(units), bool)
    test_unit[order] = np.diff(steps) > 0
    for label in np.unique(units.label):
        members = np.flatnonzero(units.label == label)
        if test_unit[members].all():
            test_unit[members[0]] = False
    if not test_unit.any() and len(units) > 1:
        # Tiny sets: take one unit of the class that can spare it best.
        counts = np.bincount(units.label)
        test_unit[order[units.label[order] == counts.argmax()][0]] = bool(counts.max() > 1)
    return test_unit[units.of_image]
