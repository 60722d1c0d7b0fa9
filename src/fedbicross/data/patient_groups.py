"""Groups of images that stay together: all images of a patient, or single images where patients are unknown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedbicross.data.dataset import Indices, Names, Split


@dataclass(frozen=True, eq=False)
class PatientGroups:
    """Indivisible groups of images; a group's label is its most frequent one (the lowest of equals)."""

    of_image: Indices  # [images] group of each image
    label: Indices  # [groups]
    size: Indices  # [groups] number of images
    are_patients: bool

    def __len__(self) -> int:
        return len(self.label)

    @classmethod
    def of(cls, split: Split, num_classes: int) -> PatientGroups:
        """Patients where the split knows them, else images."""
        return cls.of_names(split.patients, split.labels, num_classes)

    @classmethod
    def of_names(cls, patients: Names | None, labels: Indices, num_classes: int) -> PatientGroups:
        """Group images by patient name."""
        if patients is None:
            n = len(labels)
            return cls(np.arange(n), labels, np.ones(n, np.int64), False)
        names, group = np.unique(patients, return_inverse=True)
        group = group.reshape(-1).astype(np.int64)
        counts = np.zeros((len(names), num_classes), np.int64)
        np.add.at(counts, (group, labels), 1)
        return cls(group, counts.argmax(axis=1).astype(np.int64), counts.sum(axis=1), True)


def split_off_test(
    labels: Indices, patients: Names | None, sites: Names | None, fraction: float, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Which images become the test set: whole patients, spread evenly over sites and classes.

    Groups are shuffled, sorted by (site, class) and every 1/fraction-th is taken, so each stratum gives its share to
    within one group. A class keeps at least one group for training.
    """
    num_classes = int(labels.max()) + 1
    groups = PatientGroups.of_names(patients, labels, num_classes)
    stratum = groups.label
    if sites is not None:
        first = np.full(len(groups), len(labels))
        np.minimum.at(first, groups.of_image, np.arange(len(labels)))
        stratum = groups.label + num_classes * np.unique(sites, return_inverse=True)[1].reshape(-1)[first]
    order = rng.permutation(len(groups))
    order = order[np.argsort(stratum[order], kind="stable")]
    # A random start, then equal steps: a group is taken where the running sum passes a whole number.
    steps = np.floor(np.arange(len(groups) + 1) * fraction + rng.random())
    test_group = np.zeros(len(groups), bool)
    test_group[order] = np.diff(steps) > 0
    for label in np.unique(groups.label):
        members = np.flatnonzero(groups.label == label)
        if test_group[members].all():
            test_group[members[0]] = False
    if not test_group.any() and len(groups) > 1:
        # Tiny sets: take one group of the class that can spare it best.
        counts = np.bincount(groups.label)
        test_group[order[groups.label[order] == counts.argmax()][0]] = bool(counts.max() > 1)
    return test_group[groups.of_image]
