"""Who holds which image: the partition of a dataset over clients, drawn, stored and checked.

Every training image belongs to exactly one client. Where patients are known they are dealt whole, so no patient is
ever shared between clients. Test images are shared out in proportion to what each client trains on ("matched").
"""

from __future__ import annotations

import hashlib
import json
import math
import unicodedata
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbicross.data import partitioners
from fedbicross.data.patient_groups import PatientGroups
from fedbicross.data.scanner import ScannerShift, draw_scanner
from fedbicross.errors import ConfigError, DataError, nearest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedbicross.data.dataset import Dataset, Images, Indices, Names

SCHEMA = 1
LONGEST_NAME = 64  # of a site that gives a client its name

PARTITIONS: dict[str, str] = {
    "iid": "every client gets the same mix of classes",
    "dirichlet": "label skew of strength alpha, clients of nearly equal size (the papers' partition)",
    "dirichlet_plain": "label skew of strength alpha, clients of unequal size",
    "pathological": "each client sees only a few classes",
    "quantity": "same mix of classes, client sizes drawn from Dirichlet(alpha)",
    "scanner": "same mix of classes, but every client has its own scanner (colour, contrast, blur, noise)",
    "natural": "one client for each site named in the data",
}


@dataclass(frozen=True, eq=False)
class Partition:
    """The images of each client and the owner of each test image (-1: nobody trains on its class)."""

    kind: str
    seed: int
    params: dict[str, Any]
    clients: tuple[str, ...]
    train_indices: tuple[Indices, ...]
    test_owner: Indices
    scanners: tuple[ScannerShift, ...] | None
    dataset_digest: str
    warnings: tuple[str, ...] = field(default=())

    def digest(self) -> str:
        """SHA-256 of the canonical JSON."""
        text = json.dumps(self._body(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, with the digest under ``sha256``."""
        return self._body() | {"sha256": self.digest()}

    def dumps(self) -> str:
        """``to_json`` as text."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":")) + "\n"

    @classmethod
    def loads(cls, text: str, dataset: Dataset) -> Partition:
        """Read ``dumps`` back and check it against the dataset."""
        try:
            obj = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError("partition_format", f"the partition is not JSON ({error})") from error
        return cls.from_json(obj, dataset)

    @classmethod
    def from_json(cls, obj: Any, dataset: Dataset) -> Partition:
        """Read ``to_json`` back: the hash, the dataset and the coverage must all be right."""
        if not isinstance(obj, dict) or obj.get("schema") != SCHEMA:
            raise DataError("partition_format", f"the partition is not an object with schema {SCHEMA}")
        try:
            scanners = obj["scanners"]
            partition = cls(
                kind=str(obj["kind"]),
                seed=int(obj["seed"]),
                params=dict(obj["params"]),
                clients=tuple(str(name) for name in obj["clients"]),
                train_indices=tuple(_integers(values) for values in obj["train_indices"]),
                test_owner=_integers(obj["test_owner"]),
                scanners=None if scanners is None else tuple(ScannerShift.from_json(item) for item in scanners),
                dataset_digest=str(obj["dataset_digest"]),
                warnings=tuple(str(text) for text in obj["warnings"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DataError("partition_format", f"the partition is malformed ({error!r})") from error
        if partition.digest() != obj.get("sha256"):
            raise DataError("partition_hash", "the partition was changed after it was written: its hash differs")
        check_partition(partition, dataset)
        return partition

    def _body(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            "seed": self.seed,
            "params": self.params,
            "clients": list(self.clients),
            "train_indices": [indices.tolist() for indices in self.train_indices],
            "test_owner": self.test_owner.tolist(),
            "scanners": None if self.scanners is None else [shift.to_json() for shift in self.scanners],
            "dataset_digest": self.dataset_digest,
            "warnings": list(self.warnings),
        }


def make_partition(
    dataset: Dataset,
    kind: str,
    num_clients: int | None,
    rng: np.random.Generator,
    seed: int = 0,
    *,
    alpha: float = 0.1,
    classes_per_client: int = 2,
    min_samples: int = 10,
    strength: float = 1.0,
) -> Partition:
    """Draw a partition of one of the ``PARTITIONS``; ``seed`` is only recorded, all chance comes from ``rng``."""
    if kind not in PARTITIONS:
        raise ConfigError("unknown_partition", f"no partition is called {kind!r}{nearest(kind, PARTITIONS)}")
    groups = PatientGroups.of(dataset.train, dataset.num_classes)
    warnings: list[str] = []
    params: dict[str, Any] = {}
    if kind == "natural":
        sites, owner = partitioners.natural(dataset.train, groups)
        if num_clients not in (None, len(sites)):
            warnings.append(f"the data name {len(sites)} sites: {num_clients} clients were asked for")
        count, params = len(sites), {"sites": sites}
    else:
        count = _check_count(num_clients, groups)
        if kind in ("iid", "scanner"):
            owner = partitioners.iid(groups, count, rng)
        elif kind == "quantity":
            params = {"alpha": _check_alpha(alpha)}
            owner = partitioners.quantity(groups, count, alpha, rng)
        elif kind == "pathological":
            params = {"classes_per_client": int(classes_per_client)}
            owner = partitioners.pathological(
                groups, count, _check_classes(classes_per_client, count, groups), rng, warnings
            )
        else:
            if min_samples < 0:
                raise ConfigError("bad_min_samples", f"min_samples must be 0 or more, got {min_samples}")
            params = {"alpha": _check_alpha(alpha), "min_samples": int(min_samples)}
            owner = partitioners.dirichlet(groups, count, alpha, rng, balanced=kind == "dirichlet")
            owner = partitioners.repair(groups, owner, count, min_samples, warnings)
    image_owner = owner[groups.of_image]
    train_indices = tuple(np.flatnonzero(image_owner == client) for client in range(count))
    if kind == "natural" and dataset.test.sites is not None:
        test_owner = partitioners.site_owner(dataset.test.sites, params["sites"])
    else:
        held = partitioners.class_counts(image_owner, dataset.train.labels, count, dataset.num_classes)
        test_owner = partitioners.matched(PatientGroups.of(dataset.test, dataset.num_classes), held, rng)
    scanners = None
    if kind == "scanner":
        if not (math.isfinite(strength) and strength >= 0):
            raise ConfigError("bad_strength", f"strength must be 0 or more, got {strength}")
        params = {"strength": float(strength)}
        scanners = tuple(draw_scanner(rng, strength) for _ in range(count))
    return Partition(
        kind=kind,
        seed=seed,
        params=params,
        clients=site_names(params["sites"]) if kind == "natural" else client_names(count),
        train_indices=train_indices,
        test_owner=test_owner,
        scanners=scanners,
        dataset_digest=dataset.digest(),
        warnings=tuple(warnings),
    )


def client_names(count: int) -> tuple[str, ...]:
    """``client-0`` …, zero-padded so that sorting by name is sorting by number."""
    width = len(str(max(count - 1, 0)))
    return tuple(f"client-{i:0{width}d}" for i in range(count))


def site_names(sites: Sequence[str]) -> tuple[str, ...]:
    """The sites' own names, which reports then show; ``client-0`` … where one is no name to print or to compare."""
    known = [unicodedata.normalize("NFKC", site).strip().casefold() for site in sites]
    good = all(0 < len(site) <= LONGEST_NAME and site.isprintable() and site == site.strip() for site in sites)
    return tuple(sites) if good and len(set(known)) == len(sites) else client_names(len(sites))


def check_partition(partition: Partition, dataset: Dataset) -> None:
    """Refuse a partition that does not fit the dataset, misses or repeats an image, or shares a patient."""
    if partition.dataset_digest != dataset.digest():
        raise DataError("partition_dataset", f"the partition was made for other data than this {dataset.name!r}")
    count = len(partition.clients)
    if count == 0 or len(set(partition.clients)) != count or len(partition.train_indices) != count:
        raise DataError("partition_format", "the partition needs one list of images for each distinct client name")
    if partition.scanners is not None and len(partition.scanners) != count:
        raise DataError("partition_format", f"{len(partition.scanners)} scanners for {count} clients")
    together = np.sort(np.concatenate(partition.train_indices))
    if not np.array_equal(together, np.arange(len(dataset.train))):
        raise DataError("partition_coverage", "every training image must belong to exactly one client")
    owner = partition.test_owner
    if len(owner) != len(dataset.test) or owner.min() < -1 or owner.max() >= count:
        raise DataError("partition_coverage", "every test image needs an owner among the clients, or -1")
    train_owner = np.empty(len(dataset.train), np.int64)
    for client, indices in enumerate(partition.train_indices):
        train_owner[indices] = client
    for patients, owners in ((dataset.train.patients, train_owner), (dataset.test.patients, owner)):
        if patients is not None and len(np.unique(patients)) != len(set(zip(patients, owners.tolist(), strict=True))):
            raise DataError("patient_shared", "a patient's images are spread over several clients")


def client_images(dataset: Dataset, partition: Partition, client: int) -> tuple[Images, Indices, Names | None]:
    """A client's training images as its scanner sees them, their labels and, where known, patients."""
    indices = partition.train_indices[client]
    own = dataset.train.take(indices)
    images = (
        own.images if partition.scanners is None else partition.scanners[client].apply(own.images, indices, "train")
    )
    return images, own.labels, own.patients


def test_images(dataset: Dataset, partition: Partition) -> Images:
    """All test images, each as its owner's scanner sees it; those nobody owns stay as they are."""
    if partition.scanners is None:
        return dataset.test.images
    images = dataset.test.images.copy()
    for client, shift in enumerate(partition.scanners):
        indices = np.flatnonzero(partition.test_owner == client)
        images[indices] = shift.apply(images[indices], indices, "test")
    return images


test_images.__test__ = False  # type: ignore[attr-defined]  # pytest must not collect it where it is imported


def _integers(values: Any) -> Indices:
    array = np.asarray(values if len(values) else np.empty(0, np.int64))
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise ValueError("a list of integers is needed")
    return array.astype(np.int64)


def _check_count(num_clients: int | None, groups: PatientGroups) -> int:
    if num_clients is None or num_clients < 1:
        raise ConfigError("bad_clients", f"the number of clients must be 1 or more, got {num_clients}")
    if num_clients > len(groups):
        what = "patients" if groups.are_patients else "training images"
        raise DataError("too_many_clients", f"{num_clients} clients cannot share {len(groups)} {what}")
    return num_clients


def _check_alpha(alpha: float) -> float:
    if not (math.isfinite(alpha) and 0 < alpha <= 1e6):
        raise ConfigError("bad_alpha", f"alpha must be above 0 and at most 1,000,000, got {alpha}")
    return float(alpha)


def _check_classes(classes_per_client: int, count: int, groups: PatientGroups) -> int:
    present = len(np.unique(groups.label))
    if not 1 <= classes_per_client <= present:
        raise ConfigError(
            "bad_classes_per_client", f"classes_per_client must be 1 to {present}, got {classes_per_client}"
        )
    if count * classes_per_client < present:
        raise ConfigError(
            "bad_classes_per_client",
            f"{count} clients with {classes_per_client} classes each cannot hold all {present}: at least "
            f"{-(-present // count)} are needed",
        )
    return classes_per_client
