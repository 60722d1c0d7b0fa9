"""What sticks out among uploads that have passed the door, and what becomes of it.

A careless or hostile member can send what no check of one file finds: a network that is a hundred times as sure as all
others, statistics unlike everybody else's, weights that were never trained, a claim of far too many images. Every rule
compares a site with its peers (`steps.outliers`) and has a limit that honest federations, however skewed, do not come
near: docs/how-to/threat-model.md has both tables. What no rule acts on is used exactly as it came.

- **left out** of the fusion: layers, statistics or features of another size, weights that do not come from the common
  start, more images claimed than the network can have seen, or ten thousand times those of others, answers against
  those of its peers about classes that it shares with them. Never half of all sites.
- **limited**: a last layer somewhat larger than those of others is brought to their size; a site that claims far more
  images than others counts for less.

All that is read here are uploads; the operator reads the notes, and may trust a site by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fedbicross import parts, steps
from fedbicross.bundle.validate import images_claimed
from fedbicross.lazy_torch import torch
from fedbicross.messages import Reply, Upload

if TYPE_CHECKING:
    from torch import Tensor

    from fedbicross.context import Context

FEWEST = 3  # sites among which one can stick out
MOST_SIZE = 10.0  # of a layer's weights, over the median of the peers'; honest sites reach 2
MOST_HEAD = 5.0  # the same for the last layer alone, from which on it is made smaller
MOST_STATISTICS = 100.0  # of a layer's batch-normalisation statistics, either way; honest sites reach 25
LEAST_START = 0.25  # cosine with the common start, as a share of the peers' median; honest sites stay above 0.9
CLEAR_START = 0.5  # that median, below which training has left the start too far behind to tell
MOST_LENGTH = 10.0  # of features of one frozen encoder
MOST_CLAIMED = 1e4  # images claimed, over the median of the peers'
MOST_IMAGES = 1e3  # the same, from which on they count for no more
MOST_SEEN = 10.0  # images claimed, over those in all batches that the network counted
LEAST_AGREEMENT = -0.15  # with peers about shared classes; honest sites stay above -0.05
SHARED, KNOWN = 4, 10  # classes that make agreement worth a word, and images that make a class known
SHOWN = 0.03  # share of a class in a network's answers below which it counts as unknown, where no counts are sent
PROBES = 128


@dataclass(frozen=True)
class Note:
    """What sticks out in an upload, in words, and whether it is left out of the fusion for that."""

    client: str
    what: str
    left_out: bool = False

    def __str__(self) -> str:
        return f"{self.client[:64]!r} {self.what}" + ("; it is left out of the fusion" if self.left_out else "")


@dataclass(frozen=True)
class Seen:
    """Uploads as they are to be used, and every note on those that came in."""

    uploads: list[Upload]
    notes: tuple[Note, ...] = ()

    def replies_to(self, uploads: Sequence[Upload], replies: Sequence[Reply]) -> list[Reply]:
        """One reply to each of all uploads from those to the ones used, with the notes in it where there are any.

        Who was left out gets the reply that most others get.
        """
        if not self.notes:
            return list(replies)
        texts = [str(note) for note in self.notes]
        noted = {id(reply): replace(reply, info={**reply.info, "notes": texts}) for reply in replies}
        given = {used.client: noted[id(reply)] for used, reply in zip(self.uploads, replies, strict=True)}
        (usual, _), *_ = Counter(map(id, given.values())).most_common()
        left_out = next(reply for reply in given.values() if id(reply) == usual)
        return [given.get(upload.client, left_out) for upload in uploads]


Counting = Callable[[Upload, float], Upload]  # the upload as if from this share of its images
Measuring = Callable[[Upload], float | None]  # how long the features are that it holds; None: nothing to compare


def counted_less(upload: Upload, share: float) -> Upload:
    """The upload with this share of the numbers that it states: at least 1 of what it has at all."""
    changes: dict[str, Any] = {}
    if upload.class_counts is not None:
        changes["class_counts"] = [max(1, round(share * count)) if count else 0 for count in upload.class_counts]
    if upload.num_samples is not None:
        total = sum(changes["class_counts"]) if "class_counts" in changes else max(1, round(share * upload.num_samples))
        changes["num_samples"] = total
    return replace(upload, **changes)


def look(
    uploads: Sequence[Upload],
    ctx: Context,
    trusted: Collection[str] = (),
    counting: Counting = counted_less,
    length_of: Measuring = lambda upload: None,
) -> Seen:
    """Every rule above, in the order of the uploads; what the operator trusts is noted and used as it is."""
    if len(uploads) < FEWEST:
        return Seen(list(uploads))
    lengths = {upload.client: length for upload in uploads if (length := length_of(upload)) is not None}
    notes = list(_left_out(uploads, ctx, trusted, lengths))
    gone = {note.client for note in notes if note.left_out}
    used = [upload for upload in uploads if upload.client not in gone]
    limits = (_limit_heads, partial(_limit_claims, counting=counting))
    for limit in limits if len(used) >= FEWEST else ():
        found = limit(used)
        notes += [Note(client, what) for client, (what, _) in found.items()]
        used = [found[u.client][1] if u.client in found and u.client not in trusted else u for u in used]
    order = {upload.client: place for place, upload in enumerate(uploads)}
    return Seen(used, tuple(sorted(notes, key=lambda note: order[note.client])))


# --- left out ---------------------------------------------------------------------------------------------------------


def _left_out(
    uploads: Sequence[Upload], ctx: Context, trusted: Collection[str], lengths: Mapping[str, float]
) -> Iterator[Note]:
    """The site that sticks out most, then again among the others, as long as most are left to be the measure."""
    rest = list(uploads)
    while len(rest) >= FEWEST:
        found = _worst(rest, ctx, lengths)
        if found is None:
            return
        client, what = found
        may_go = client not in trusted and 2 * (len(uploads) - len(rest) + 1) < len(uploads)
        yield Note(client, what, may_go)
        rest = [upload for upload in rest if upload.client != client]


Rule = tuple[float, "Tensor", str]  # a limit, the values [N] that it is for, and the words for one beyond it


def _worst(uploads: Sequence[Upload], ctx: Context, lengths: Mapping[str, float]) -> tuple[str, str] | None:
    """Who is furthest beyond a limit, and in what; nobody if all are within all."""
    rules = [(uploads, rule) for rule in _about_claims(uploads, ctx)]
    measured = [upload for upload in uploads if upload.client in lengths]
    if len(measured) >= FEWEST:
        times = steps.outliers.larger_than_peers(torch.tensor([[lengths[upload.client]] for upload in measured]))
        rules.append((measured, (MOST_LENGTH, times, "sent features {:.0f} times as long as the others'")))
    for alike in _by_architecture(uploads):
        rules += [(alike, rule) for rule in (*_about_networks(alike, ctx), *_about_answers(alike, ctx))]
    found = [
        (value / limit, upload.client, what.format(value))
        for group, (limit, values, what) in rules
        for upload, value in zip(group, values.tolist(), strict=True)
        if value > limit
    ]
    return max(found)[1:] if found else None


def _about_claims(uploads: Sequence[Upload], ctx: Context) -> Iterator[Rule]:
    """Images that a site says it has: beside what its network has counted, and beside the others."""
    over = torch.tensor([_claimed_over_seen(upload, ctx) for upload in uploads])
    yield MOST_SEEN, over, "claims {:.0f} times as many images as its network has counted in batches"
    claimed = torch.tensor([[float(max(1, images_claimed(upload)))] for upload in uploads])
    yield MOST_CLAIMED, steps.outliers.larger_than_peers(claimed), "claims {:.0f} times as many images as others"


def _about_answers(alike: Sequence[Upload], ctx: Context) -> Iterator[Rule]:
    """Who says the opposite of the others about classes that they share: labels that were flipped, say.

    Only for networks with batch normalisation: answers of others to noise depend on its size, and honest ones differ.
    """
    if not any(name.endswith("running_var") for name in alike[0].tensors):
        return
    answers = [logits for logits in (parts.probes.answers_by_batch(u, PROBES) for u in alike) if logits is not None]
    logits = torch.stack(answers).nan_to_num(0.0, 0.0, 0.0)  # one network without answers must not silence the rule
    found = steps.outliers.agreement(logits, _known(alike, logits, ctx), SHARED)
    yield 1.0, 1 + LEAST_AGREEMENT - found, "answers against the others on classes that it shares with them"


def _known(alike: Sequence[Upload], logits: Tensor, ctx: Context) -> Tensor:
    """Which classes each site knows [N,C]: by its counts if all sent them, else by what its network shows.

    A network answers about as often with a class as its images had it, and hardly ever with one that it never saw. Not
    so after balanced softmax, which takes the class mix out: there nobody is judged without counts.
    """
    if all(upload.class_counts is not None for upload in alike):
        return parts.teachers.class_counts(alike, len(alike[0].task.classes)) >= KNOWN
    if ctx.training.loss == "balanced":
        return torch.zeros(len(alike), logits.shape[-1], dtype=torch.bool)
    shares = logits.softmax(-1).mean(1)
    trained_on = torch.tensor([_trained_on(upload, ctx) for upload in alike])
    return (shares >= SHOWN) & (shares * trained_on[:, None] >= KNOWN)


def _trained_on(upload: Upload, ctx: Context) -> float:
    """Images of one epoch by the network's own counters, or by what the site claims if that is more.

    A site whose counters are set low must not pass for one too small to be judged while it claims many images.
    """
    claimed = (1 - ctx.training.validation) * images_claimed(upload)
    return max(_images_counted(upload, ctx) / ctx.training.epochs, claimed)


def _about_networks(alike: Sequence[Upload], ctx: Context) -> Iterator[Rule]:
    """Whole networks of one architecture: sizes of layers and of statistics, and what is left of the common start."""
    states = [parts.probes.network_of(upload) or {} for upload in alike]
    compare = steps.outliers
    sizes = torch.stack([_layer_sizes(state) for state in states])
    yield MOST_SIZE, compare.larger_than_peers(sizes), "sent a layer {:.0f} times as large as the others'"
    if any(name.endswith("running_var") for name in states[0]):
        sizes = torch.stack([_statistics_sizes(state) for state in states])
        yield (
            MOST_STATISTICS,
            compare.apart_from_peers(sizes),
            "sent batch-normalisation statistics {:.0f} times as large, or as small, as the others'",
        )
    if ctx.training.init == "shared":
        first = ctx.models.first_model(alike[0].client, alike[0].task.model).state_dict()
        for part in ("trunk.", "head."):
            start, weights = _flat(first, part), torch.stack([_flat(state, part) for state in states])
            if start.numel():
                kept = compare.cosines(weights, start)
                usual = compare.medians_of_others(kept[:, None])[:, 0]
                lost = torch.where(usual > CLEAR_START, LEAST_START * usual - kept, -1.0)
                yield 1.0, 1 + lost, "sent weights that do not come from the common start"


def _by_architecture(uploads: Sequence[Upload]) -> list[list[Upload]]:
    """Whole networks, those of one architecture together, where they are enough to be compared."""
    groups: dict[str, list[Upload]] = {}
    for upload in uploads:
        if parts.probes.network_of(upload) is not None:
            groups.setdefault(upload.task.model, []).append(upload)
    return [group for group in groups.values() if len(group) >= FEWEST]


def _layer_sizes(state: dict[str, Tensor]) -> Tensor:
    """The norm of every layer's weights [L], the last one with its bias and about the mean over classes."""
    sizes = [_head_size(state)]
    sizes += [torch.linalg.vector_norm(v.double()) for name, v in state.items() if name.endswith("weight")]
    return torch.stack(sizes)


def _head_size(state: dict[str, Tensor]) -> Tensor:
    head = torch.cat([state["head.weight"], state["head.bias"][:, None]], 1).double()
    size: Tensor = torch.linalg.vector_norm(head - head.mean(0))
    return size


def _statistics_sizes(state: dict[str, Tensor]) -> Tensor:
    """Of every batch-normalisation layer the geometric mean of its variances and the root mean square of its means."""
    sizes = []
    for name, value in state.items():
        if name.endswith("running_var"):
            sizes.append(value.double().clamp_min(1e-12).log().mean().exp())
        elif name.endswith("running_mean"):
            sizes.append(value.double().square().mean().sqrt().clamp_min(1e-6))
    return torch.stack(sizes)


def _flat(state: dict[str, Tensor], part: str) -> Tensor:
    """The weights of a part in one vector, without those that every network has at 1 or 0 in the beginning."""
    found = [value.flatten() for name, value in state.items() if name.startswith(part) and value.ndim > 1]
    return torch.cat(found) if found else torch.zeros(0)


def _claimed_over_seen(upload: Upload, ctx: Context) -> float:
    """Images claimed over the most that the network can have seen by its own counters; 0 where nothing says so."""
    counted = _images_counted(upload, ctx)
    return images_claimed(upload) / counted if counted and parts.probes.network_of(upload) is not None else 0.0


def _images_counted(upload: Upload, ctx: Context) -> int:
    """The most images that can have been in all batches that the network counted; 0 where it counts none."""
    counters = [int(value) for name, value in upload.tensors.items() if name.endswith("num_batches_tracked")]
    return max(1, *counters) * ctx.training.batch_size if counters else 0


# --- limited ----------------------------------------------------------------------------------------------------------

Limited = dict[str, tuple[str, Upload]]  # by client: what sticks out, and the upload to be used instead


def _limit_heads(uploads: Sequence[Upload]) -> Limited:
    """Scale cannot win: a last layer beyond the limit is divided until it is as large as the peers' median."""
    out: Limited = {}
    for alike in _by_architecture(uploads):
        sizes = torch.stack([_head_size(dict(upload.tensors)) for upload in alike])
        for upload, times in zip(alike, steps.outliers.larger_than_peers(sizes[:, None]).tolist(), strict=True):
            if times > MOST_HEAD:
                head = {name: upload.tensors[name] / times for name in ("head.weight", "head.bias")}
                what = f"sent a last layer {times:.0f} times as large as the others'; it is made as large as theirs"
                out[upload.client] = what, replace(upload, tensors={**upload.tensors, **head})
    return out


def _limit_claims(uploads: Sequence[Upload], counting: Counting) -> Limited:
    """Nobody counts for more than so many times the median of the others, in whatever mix of classes it has."""
    claiming = [upload for upload in uploads if images_claimed(upload)]
    if len(claiming) < FEWEST:
        return {}
    claimed = torch.tensor([float(images_claimed(upload)) for upload in claiming])
    factors = steps.outliers.capped(claimed, MOST_IMAGES).tolist()
    what = f"claims {{:.0f}} times as many images as others; {MOST_IMAGES:.0f} times as many count"
    return {
        upload.client: (what.format(MOST_IMAGES / factor), counting(upload, factor))
        for upload, factor in zip(claiming, factors, strict=True)
        if factor < 1
    }
