"""Partitioners: pure functions that give every group (an image, or a whole patient) an owner among the clients."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

from fedbicross.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedbicross.data.dataset import Indices, Names, Split
    from fedbicross.data.patient_groups import PatientGroups


def iid(groups: PatientGroups, count: int, rng: np.random.Generator) -> Indices:
    """A random order dealt so that sizes stay equal: the next group always goes to the smallest client."""
    owner = np.empty(len(groups), np.int64)
    order = rng.permutation(len(groups))
    if not groups.are_patients:
        owner[order] = np.arange(len(groups)) * count // len(groups)
        return owner
    held = [(0, client) for client in range(count)]
    for group in order:
        size, client = held[0]
        owner[group] = client
        heapq.heapreplace(held, (size + int(groups.size[group]), client))
    return owner


def quantity(groups: PatientGroups, count: int, alpha: float, rng: np.random.Generator) -> Indices:
    """Client sizes in proportion to one draw of Dirichlet(alpha); nobody goes empty."""
    owner = np.empty(len(groups), np.int64)
    order = rng.permutation(len(groups))
    owner[order] = _cut(groups.size[order], _dirichlet(rng, alpha, count))
    return _fill_empty(groups, owner, count)


def dirichlet(groups: PatientGroups, count: int, alpha: float, rng: np.random.Generator, balanced: bool) -> Indices:
    """Each class is cut by its own draw of Dirichlet(alpha); balanced: clients that have n/N already get no more."""
    owner = np.empty(len(groups), np.int64)
    held = np.zeros(count, np.int64)
    fair = groups.size.sum() / count
    for label in np.unique(groups.label):
        members = rng.permutation(np.flatnonzero(groups.label == label))
        share = _dirichlet(rng, alpha, count)
        if balanced:
            room = held < fair  # never all False: what is dealt so far is less than N times n/N
            share = share * room
            # At tiny alpha the whole share may have sat on full clients.
            share = share / share.sum() if share.sum() > 1e-12 else room / room.sum()
        owner[members] = _cut(groups.size[members], share)
        held += np.bincount(owner[members], weights=groups.size[members], minlength=count).astype(np.int64)
    return owner


def repair(groups: PatientGroups, owner: Indices, count: int, min_samples: int, warnings: list[str]) -> Indices:
    """Move groups from the largest client to the smallest until all have ``min_samples``, instead of drawing again.

    The donor gives from its most plentiful class and never falls below the minimum itself, so this ends.
    """
    owner = owner.copy()
    total = int(groups.size.sum())
    if total < count * min_samples:
        lowered = max(total // count, 1)
        warnings.append(f"min_samples lowered from {min_samples} to {lowered}: {total} images for {count} clients")
        min_samples = lowered
    owner = _fill_empty(groups, owner, count)
    held = np.bincount(owner, weights=groups.size, minlength=count).astype(np.int64)
    while held.min() < min_samples:
        poorest = int(held.argmin())
        given = _spare_groups(groups, owner, held, min_samples)
        if len(given) == 0:
            warnings.append(
                f"a client keeps only {int(held.min())} images (min_samples {min_samples}): patients are kept whole"
            )
            break
        held[owner[given[0]]] -= groups.size[given].sum()
        held[poorest] += groups.size[given].sum()
        owner[given] = poorest
    return owner


def pathological(
    groups: PatientGroups, count: int, classes_per_client: int, rng: np.random.Generator, warnings: list[str]
) -> Indices:
    """Every client gets ``classes_per_client`` classes and every class at least one client.

    Classes are handed out in rounds, first those nobody has, then the one with most images per holder, which keeps
    the client sizes close; a class is then shared evenly among its holders.
    """
    mass = np.bincount(groups.label, weights=groups.size)
    tie = rng.permutation(len(mass))
    holders: list[list[int]] = [[] for _ in mass]
    for _ in range(classes_per_client):
        for client in rng.permutation(count):
            open_classes = [c for c in range(len(mass)) if mass[c] > 0 and client not in holders[c]]
            best = max(open_classes, key=lambda c: (not holders[c], mass[c] / (len(holders[c]) + 1), tie[c]))
            holders[best].append(int(client))
    owner = np.full(len(groups), -1, np.int64)
    held = np.zeros(count, np.int64)
    for label in np.argsort(-mass, kind="stable"):  # plentiful first: the rare ones go where most is missing
        members = rng.permutation(np.flatnonzero(groups.label == label))
        if len(members) == 0:
            continue
        if len(members) < len(holders[label]):
            warnings.append(f"class {label} has fewer units ({len(members)}) than clients meant to hold it")
        ranked = sorted(holders[label], key=lambda client: held[client])
        begins = np.cumsum(groups.size[members]) - groups.size[members]
        owner[members] = np.array(ranked)[begins * len(ranked) // groups.size[members].sum()]
        held += np.bincount(owner[members], weights=groups.size[members], minlength=count).astype(np.int64)
    if (held == 0).any():
        warnings.append("some clients would have been empty and got one unit of another class")
    return _fill_empty(groups, owner, count)


def natural(split: Split, groups: PatientGroups) -> tuple[list[str], Indices]:
    """Site names in order, and the site of each group."""
    if split.sites is None:
        raise DataError("no_sites", "a natural partition needs a site for every training image (column 'site')")
    names, site = np.unique(split.sites, return_inverse=True)
    site = site.reshape(-1).astype(np.int64)
    owner = np.empty(len(groups), np.int64)
    owner[groups.of_image] = site
    if not np.array_equal(owner[groups.of_image], site):
        raise DataError("patient_at_two_sites", "a patient has images at two sites, so sites cannot be clients")
    return [str(name) for name in names], owner


def site_owner(sites: Names, known: list[str]) -> Indices:
    """The client of each test image by its site; -1 for a site without training images."""
    position = {name: client for client, name in enumerate(known)}
    return np.array([position.get(str(site), -1) for site in sites], np.int64)


def class_counts(owner: Indices, labels: Indices, count: int, num_classes: int) -> Indices:
    """Training images [client, class]."""
    counts = np.zeros((count, num_classes), np.int64)
    np.add.at(counts, (owner, labels), 1)
    return counts


def matched(groups: PatientGroups, held: Indices, rng: np.random.Generator) -> Indices:
    """Owner of each test image: per class, shuffled and cut in proportion to the clients' training counts."""
    owner = np.full(len(groups), -1, np.int64)
    for label in np.unique(groups.label):
        members = rng.permutation(np.flatnonzero(groups.label == label))
        weight = held[:, label]
        if weight.sum() == 0:
            continue
        quota = largest_remainder(weight, int(groups.size[members].sum()))
        if not groups.are_patients:
            owner[members] = np.repeat(np.arange(len(weight)), quota)
            continue
        # Whole patients: the next one goes to the client that is owed most; never to one without the class.
        owed = np.where(weight > 0, quota.astype(np.float64), -np.inf)
        for group in members:
            client = int(owed.argmax())
            owner[group] = client
            owed[client] -= groups.size[group]
    return owner[groups.of_image]


def largest_remainder(weight: Indices, total: int) -> Indices:
    """Whole numbers in proportion to ``weight`` that add up to ``total``; ties go to the lower index."""
    exact = weight.astype(object) * total  # Python integers: exact at any size
    whole = np.array([value // int(weight.sum()) for value in exact], np.int64)
    rest = np.array([int(value % int(weight.sum())) for value in exact])
    winners = np.argsort(-rest, kind="stable")[: total - int(whole.sum())]
    whole[winners] += 1
    return whole


def _dirichlet(rng: np.random.Generator, alpha: float, count: int) -> NDArray[np.float64]:
    share = rng.dirichlet(np.full(count, alpha))
    if np.isfinite(share).all() and share.sum() > 0.5:
        return share
    # Alpha so small that the draw underflows: in the limit everything goes to one client.
    one_hot: NDArray[np.float64] = np.eye(count)[rng.integers(count)]
    return one_hot


def _cut(sizes: Indices, share: NDArray[np.float64]) -> Indices:
    """Position in ``share`` of each group when the row of groups is cut at the cumulative shares of its total size."""
    total = int(sizes.sum())
    ends = np.floor(np.cumsum(share) * total + 1e-9)  # 0.999… of a group is rounding, not a share
    ends[np.flatnonzero(share > 0)[-1] :] = total  # rounding must not hand the tail to a client with share 0
    begins = np.cumsum(sizes) - sizes
    return np.searchsorted(ends, begins, side="right").astype(np.int64)


def _fill_empty(groups: PatientGroups, owner: Indices, count: int) -> Indices:
    """Give each empty client the smallest group of the client with most groups; possible while groups >= clients."""
    owner = owner.copy()
    number = np.bincount(owner, minlength=count)
    for client in np.flatnonzero(number == 0):
        donor = int(number.argmax())
        members = np.flatnonzero(owner == donor)
        group = members[groups.size[members].argmin()]
        owner[group] = client
        number[donor] -= 1
        number[client] += 1
    return owner


def _spare_groups(groups: PatientGroups, owner: Indices, held: Indices, min_samples: int) -> Indices:
    """What to give the smallest client: from the largest that can spare any, its most plentiful class, small first."""
    lacking = min_samples - int(held.min())
    for donor in np.argsort(-held, kind="stable"):
        spare = int(held[donor]) - min_samples
        members = np.flatnonzero(owner == donor)
        members = members[groups.size[members] <= spare]
        if len(members):
            labels = groups.label[members]
            members = members[labels == np.bincount(labels, weights=groups.size[members]).argmax()]
            members = members[np.argsort(groups.size[members], kind="stable")]
            upto = np.cumsum(groups.size[members])
            chosen: Indices = members[(upto <= spare) & (upto - groups.size[members] < lacking)]
            return chosen
    return np.empty(0, np.int64)
