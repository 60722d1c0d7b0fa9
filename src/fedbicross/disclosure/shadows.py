"""Networks that a site trains only to attack its own: shadows for membership inference, and one with canaries."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedbicross.bundle.format import canonical_json, pack, unpack
from fedbicross.errors import DataError
from fedbicross.evaluate import membership, one_run
from fedbicross.messages import Client, Predictor

if TYPE_CHECKING:
    from fedbicross.context import Context

LEAST = 10  # images on each side, without which nothing can be said


@dataclass(frozen=True, eq=False)
class Subjects:
    """The images that an audit is about: members, which the network was trained on, and controls that it never saw."""

    images: np.ndarray
    labels: np.ndarray
    patients: np.ndarray | None
    is_member: np.ndarray  # bool [n]
    rows: np.ndarray  # of a member among the site's training images, of a control among those held out

    def scores(self, predictor: Predictor, ctx: Context) -> np.ndarray:
        """The network's confidence in each image's label."""
        answers = predictor.probabilities(self.images, ctx.device, ctx.precision)
        return membership.confidence(answers, self.labels)

    def groups(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Patients of members and of controls, where they are known."""
        return None if self.patients is None else (self.patients[self.is_member], self.patients[~self.is_member])

    def client(self, name: str, chosen: np.ndarray) -> Client:
        """Some of the images as if they were a site's."""
        patients = None if self.patients is None else self.patients[chosen]
        return Client(name, self.images[chosen], self.labels[chosen], patients)


def choose_subjects(client: Client, controls: Client, ctx: Context, most: int | None) -> Subjects:
    """At most so many images of each kind; images that training only chose its epoch by are neither."""
    trained = np.setdiff1d(np.arange(len(client.labels)), ctx.validation_rows(client))
    rng = ctx.rng("audit", "subjects")
    chosen = [np.sort(rng.permutation(rows)[:most]) for rows in (trained, np.arange(len(controls.labels)))]
    for what, rows in zip(("trained on", "held out"), chosen, strict=True):
        if len(rows) < LEAST:
            raise DataError(
                "too_few_images", f"{len(rows)} images were {what}; an audit needs at least {LEAST} of each kind"
            )
    sides = [(client, chosen[0]), (controls, chosen[1])]
    known = client.patients is not None and controls.patients is not None
    return Subjects(
        np.concatenate([side.images[rows] for side, rows in sides]),
        np.concatenate([side.labels[rows] for side, rows in sides]),
        np.concatenate([np.asarray(side.patients)[rows].astype(str) for side, rows in sides]) if known else None,
        np.repeat([True, False], [len(chosen[0]), len(chosen[1])]),
        np.concatenate(chosen),
    )


@dataclass(frozen=True, eq=False)
class Shadows:
    """What K shadow networks say of all subjects [K,n,C], and which of these each was trained on [K,n]."""

    probabilities: np.ndarray
    inside: np.ndarray

    def expected(self, labels: np.ndarray) -> membership.Expected:
        """The scores to expect with and without each image."""
        return membership.expected(membership.confidence(self.probabilities, labels), self.inside)

    def right(self, labels: np.ndarray) -> np.ndarray:
        """Probability of the right class with the image in training, less that without it [n]: what is memorised."""
        own = self.probabilities[:, np.arange(len(labels)), labels]
        with_it = np.where(self.inside, own, 0).sum(0) / self.inside.sum(0).clip(1)
        without = np.where(self.inside, 0, own).sum(0) / (~self.inside).sum(0).clip(1)
        both = self.inside.any(0) & (~self.inside).any(0)
        return np.where(both, with_it - without, np.nan)


def train_shadows(subjects: Subjects, ctx: Context, count: int) -> Shadows:
    """``count`` networks in pairs: each pair shares out the subjects, whole patients where they are known."""
    answers, inside = [], []
    for pair in range(count // 2):
        half = _half(subjects, ctx.rng("audit", f"pair-{pair}"))
        for side, chosen in enumerate((half, ~half)):
            rows = np.flatnonzero(chosen)
            shadow = subjects.client(f"shadow {2 * pair + side + 1} of {count}", rows)
            answers.append(_answers(shadow, subjects.images, ctx))
            trained = np.zeros(len(half), bool)
            trained[np.delete(rows, ctx.validation_rows(shadow))] = True
            inside.append(trained)
    return Shadows(np.stack(answers), np.stack(inside))


def _half(subjects: Subjects, rng: np.random.Generator) -> np.ndarray:
    """Half of the patients, or of the images, as a mask."""
    groups = np.arange(len(subjects.labels)) if subjects.patients is None else subjects.patients
    known, which = np.unique(groups, return_inverse=True)
    chosen = np.zeros(len(known), bool)
    chosen[rng.permutation(len(known))[: len(known) // 2]] = True
    half: np.ndarray = chosen[which]
    return half


def _answers(client: Client, images: np.ndarray, ctx: Context) -> np.ndarray:
    """What a network trained on this client says of these images; only that is kept, the network is not."""
    asked = hashlib.sha256(images.tobytes()).hexdigest()
    key = hashlib.sha256(canonical_json([ctx.models.local_model_key(client), asked]).encode()).hexdigest()[:32]
    name = f"audit/answers/{key}.safetensors"
    kept = ctx.store.load(name)
    if kept is None:
        trained = ctx.local_model(client)
        predictor = Predictor(ctx.task_of(client), (trained.architecture,), (trained.state,))
        found = torch.from_numpy(predictor.probabilities(images, ctx.device, ctx.precision))
        kept = pack("audit_answers", {"probabilities": found}, {})
        ctx.store.save(name, kept)
        ctx.models.forget(client)
    answers: np.ndarray = unpack(kept, "audit_answers")[0]["probabilities"].numpy()
    return answers


def audit_with_canaries(subjects: Subjects, shadows: Shadows, ctx: Context, count: int, delta: float) -> one_run.Bound:
    """Train once more on the members and on canaries: control images under wrong labels, each in or out by a coin.

    What it bounds is the recipe on these images, not the very file: that one was trained without canaries. A canary's
    score is compared with what the shadows say that never saw its image.
    """
    rng = ctx.rng("audit", "canaries")
    rows = np.sort(rng.permutation(np.flatnonzero(~subjects.is_member))[:count])
    classes = len(ctx.task.classes)
    wrong = (subjects.labels[rows] + rng.integers(1, classes, len(rows))) % classes
    included = rng.random(len(rows)) < 0.5
    labels = subjects.labels.copy()
    labels[rows] = wrong
    chosen = np.concatenate([np.flatnonzero(subjects.is_member), rows[included]])
    mixed = replace(subjects, labels=labels).client("network with canaries", chosen)
    scores = membership.confidence(_answers(mixed, subjects.images[rows], ctx), wrong)
    usual = membership.confidence(shadows.probabilities[:, rows], wrong)
    unseen = ~shadows.inside[:, rows]
    level = np.where(unseen, usual, 0).sum(0) / unseen.sum(0).clip(1)
    return one_run.best_bound(scores - level, included, delta)


def for_shadows(ctx: Context, loss: str | None, epochs: int | None) -> Context:
    """The context in which shadows are trained: the method's loss, and at most so many epochs."""
    ctx = ctx.with_loss(loss)
    if epochs is None or epochs >= ctx.training.as_trained.epochs:
        return ctx
    dp = ctx.training.dp
    fewer = {"epochs": epochs, "dp": None if dp is None else dp.model_copy(update={"epochs": None})}
    return replace(ctx, training=ctx.training.model_copy(update=fewer))
