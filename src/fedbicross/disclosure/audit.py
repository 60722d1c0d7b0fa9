"""What a network that is about to leave gives away of the images that it was trained on.

Four questions, each with controls: can somebody tell who was in it (`evaluate.membership`)? What does training by this
recipe admit at least (`evaluate.one_run`)? Do images inverted from it come nearer to its training images than to others
(`parts.pool`)? Which of the site's images has it learnt by heart? The last answer is for the site alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedbicross import models, parts
from fedbicross.disclosure import tokens
from fedbicross.disclosure.effort import Effort
from fedbicross.disclosure.shadows import (
    Shadows,
    Subjects,
    audit_with_canaries,
    choose_subjects,
    for_shadows,
    train_shadows,
)
from fedbicross.engine.images import grid_png
from fedbicross.errors import MethodError
from fedbicross.evaluate import membership, reconstruction
from fedbicross.evaluate.membership import Interval
from fedbicross.messages import Client, Predictor, Upload
from fedbicross.methods.base import Method, SyntheticFeatures
from fedbicross.methods.primum import PrimumConfig

if TYPE_CHECKING:
    from torch import Tensor

    from fedbicross.context import Context

MEMORISED = 0.01  # share of controls above the score from which a member counts as learnt by heart
SHOWN = 8  # rows of the picture
EXCHANGES = 500  # of the two groups, to see what chance does


@dataclass(frozen=True)
class Memorised:
    """A training image that the network knows by heart. Never leaves the site."""

    row: int  # among the site's training images
    label: int
    patient: str | None
    score: float  # log likelihood ratio
    right_with_it: float | None  # how much more probable the right class is to shadows that saw it


@dataclass(frozen=True)
class Findings:
    """What was found: ``public`` goes into the statement; the rest shows single images and stays."""

    public: dict[str, Any]
    memorised: list[Memorised] = field(default_factory=list)
    pictures: bytes = b""  # PNG: inverted image, nearest training image, nearest held-out image


def network_of(upload: Upload) -> Predictor | None:
    """The whole network in an upload, if it holds one."""
    task = upload.task
    expected = set(models.build(task.model, task.channels, len(task.classes), task.image_size).state_dict())
    if not expected <= set(upload.tensors):
        return None
    return Predictor(task, (task.model,), ({name: upload.tensors[name] for name in expected},))


def audit(
    method: Method[Any], upload: Upload, client: Client, controls: Client, ctx: Context, trying: Effort
) -> Findings:
    """Audit an upload of ``client`` with ``controls`` that no training saw."""
    if upload.empty:
        return Findings({"kind": "nothing"})
    if isinstance(method, SyntheticFeatures):
        return _tokens(method, upload, client, controls, ctx)
    network = network_of(upload)
    if network is None:
        return Findings({"kind": "not_audited"})
    scope = f"audit-{hashlib.sha256(upload.pack()).hexdigest()[:16]}"
    training = for_shadows(replace(ctx, scope=scope), method.loss, trying.epochs)
    subjects = choose_subjects(client, controls, ctx, trying.images)
    ctx.progress.say(
        f"audit: {subjects.is_member.sum():,} images trained on, {(~subjects.is_member).sum():,} that were not"
    )
    shadows = train_shadows(subjects, training, trying.shadows)
    scores = subjects.scores(network, ctx)
    found = membership_of(scores, subjects, shadows, ctx)
    bound = audit_with_canaries(subjects, shadows, training, trying.canaries, trying.delta)
    inverted, pictures = _reconstruction(network, subjects, client, training, trying)
    memorised = _memorised(scores, subjects, shadows)
    public = {
        "kind": "network",
        "membership": found,
        "canaries": {**bound._asdict(), "delta": trying.delta},
        "reconstruction": inverted,
        "memorised": len(memorised),
        "other_tensors": sorted(set(upload.tensors) - set(network.states[0])),
        "counts_sent": upload.class_counts is not None or upload.num_samples is not None,
    }
    training.drop_stages()
    return Findings(public, memorised, pictures)


# --- membership ------------------------------------------------------------------------------------------


def membership_of(scores: np.ndarray, subjects: Subjects, shadows: Shadows, ctx: Context) -> dict[str, Any]:
    """How well members are told from controls, with shadows and without; and what the shadows themselves show."""
    inside, expected = subjects.is_member, shadows.expected(subjects.labels)
    ratio = membership.likelihood_ratio(scores, expected)
    differ = membership.auc_interval(
        expected.without[inside], expected.without[~inside], ctx.rng("audit", "difference"), subjects.groups()
    )
    return {
        "members": int(inside.sum()),
        "controls": int((~inside).sum()),
        "likelihood_ratio": attack_rates(ratio, subjects, ctx, "likelihood ratio"),
        "confidence": attack_rates(scores, subjects, ctx, "confidence"),
        "difference_without_membership": differ._asdict(),
        "shadows_attacked": _attack_on_shadows(subjects.labels, shadows),
        "shadows": len(shadows.inside),
    }


def attack_rates(scores: np.ndarray, subjects: Subjects, ctx: Context, name: str) -> dict[str, Any]:
    """AUC, true positive rates and advantage of one score."""
    members, controls = scores[subjects.is_member], scores[~subjects.is_member]
    area = membership.auc_interval(members, controls, ctx.rng("audit", "bootstrap", name), subjects.groups())
    rates = {f"tpr_at_{fpr:g}": _plain(membership.tpr_at(fpr, members, controls)) for fpr in (0.01, 0.001)}
    false, true = membership.roc(members, controls)
    kept = np.unique(np.linspace(0, len(false) - 1, 200).astype(int))
    curve = [[round(float(false[i]), 4), round(float(true[i]), 4)] for i in kept]
    advantage = membership.advantage(members, controls, ctx.rng("audit", "advantage", name))
    return {"auc": area._asdict(), **rates, "advantage": advantage, "roc": curve}


def _plain(value: Interval | None) -> dict[str, float] | None:
    return None if value is None else value._asdict()


def _attack_on_shadows(labels: np.ndarray, shadows: Shadows) -> float:
    """Mean AUC of the same attack on each shadow by means of the others: membership was drawn by lot there."""
    scores, found = membership.confidence(shadows.probabilities, labels), []
    for number in range(len(scores)):
        others = np.arange(len(scores)) != number
        expected = membership.expected(scores[others], shadows.inside[others])
        ratio = membership.likelihood_ratio(scores[number], expected)
        inside = shadows.inside[number]
        found.append(membership.auc(ratio[inside], ratio[~inside]))
    return float(np.mean(found))


def _memorised(scores: np.ndarray, subjects: Subjects, shadows: Shadows) -> list[Memorised]:
    """The members that the attack finds, the surest first."""
    ratio = membership.likelihood_ratio(scores, shadows.expected(subjects.labels))
    right = shadows.right(subjects.labels)
    rows = membership.found_members(ratio, subjects.is_member, MEMORISED)
    return [
        Memorised(
            int(subjects.rows[row]),
            int(subjects.labels[row]),
            None if subjects.patients is None else str(subjects.patients[row]),
            float(ratio[row]),
            None if np.isnan(right[row]) else float(right[row]),
        )
        for row in sorted(rows, key=lambda row: -ratio[row])
    ]


# --- reconstruction --------------------------------------------------------------------------------------


def _reconstruction(
    network: Predictor, subjects: Subjects, client: Client, ctx: Context, trying: Effort
) -> tuple[dict[str, Any] | None, bytes]:
    """Images inverted from the network by primum's way, each network alone under its own class mix."""
    rate = 0.1 if trying.steps < 200 else 0.05  # fewer steps need larger ones
    config = PrimumConfig(batch=trying.inverted, steps=trying.steps, lr_synthesis=rate)
    upload = Upload(client.name, network.task, network.states[0])
    try:
        source = parts.teachers.load_ensemble(
            [upload],
            ctx,
            batch=config.batch,
            at_once=None,
            passes={},
            bn_distance=config.bn_distance,
            batchnorm_for="inversion",
        )
    except MethodError as error:
        if error.code != "needs_bn_stats":
            raise
        return None, b""
    mix = torch.tensor(client.class_counts(len(ctx.task.classes)), dtype=torch.float64)
    settings = parts.teachers.inversion_settings(config, ctx.task.image_size)
    pool = parts.pool.invert_each({client.name: source}, {client.name: mix}, settings, 1, "fp32", ctx)
    batch = pool.batch(0)
    with torch.no_grad():
        recognised = (source.logits(batch["images"]).mean(0).argmax(1) == batch["labels"]).float().mean()
    found, pictures = compare_with_inverted((batch["images"].cpu().clamp(-1, 1) + 1) / 2, subjects, ctx)
    return {**found, "recognised": float(recognised), "steps": trying.steps}, pictures


def compare_with_inverted(inverted: Tensor, subjects: Subjects, ctx: Context) -> tuple[dict[str, Any], bytes]:
    """Distances in pixels between inverted images [m,C,H,W] in [0,1] and the same number of members and controls."""
    inside = np.flatnonzero(subjects.is_member), np.flatnonzero(~subjects.is_member)
    count, rng = min(map(len, inside)), ctx.rng("audit", "as many of each")
    rows = [np.sort(rng.permutation(side)[:count]) for side in inside]
    real = [torch.from_numpy(subjects.images[side]).permute(0, 3, 1, 2).float() / 255 for side in rows]
    near = [reconstruction.nearest(inverted, side) for side in real]
    # Inverted images resemble each other and may share one nearest image: chance is found by exchanging the groups.
    apart, lots = reconstruction.distances(inverted, torch.cat(real)).numpy(), np.arange(2 * count)
    chance = np.quantile([_closer(apart, rng.permutation(lots)) for _ in range(EXCHANGES)], [0.025, 0.975])
    back = [-reconstruction.nearest(side, inverted).distance.numpy() for side in real]  # higher: nearer
    groups = None if subjects.patients is None else (subjects.patients[rows[0]], subjects.patients[rows[1]])
    area = membership.auc_interval(back[0], back[1], ctx.rng("audit", "bootstrap", "inverted"), groups)
    order = torch.argsort(near[0].distance / near[1].distance.clamp_min(1e-12))[:SHOWN]
    shown = torch.stack([inverted[order], *(side[part.which[order]] for side, part in zip(real, near, strict=True))], 1)
    found = {
        "images": len(inverted),
        "compared_with": count,
        "closer_to_training": _closer(apart, lots),
        "closer_by_chance": [float(chance[0]), float(chance[1])],
        "auc": area._asdict(),
        "nearest_training": float(near[0].distance.median()),
        "nearest_held_out": float(near[1].distance.median()),
        "closest_training": float(near[0].distance.min()),
        "closest_held_out": float(near[1].distance.min()),
    }
    return found, grid_png((shown * 255).round().byte().permute(0, 1, 3, 4, 2).numpy())


def _closer(apart: np.ndarray, order: np.ndarray) -> float:
    """Share of inverted images whose nearest image is in the first half of this order; distances [m, images]."""
    halves = np.split(order, 2)
    return float((apart[:, halves[0]].min(1) < apart[:, halves[1]].min(1)).mean())


# --- features --------------------------------------------------------------------------------------------


def _tokens(method: SyntheticFeatures, upload: Upload, client: Client, controls: Client, ctx: Context) -> Findings:
    """What exists for uploads that stand for features: distance, copies, and a decoder that tries to rebuild images."""
    settings = tokens.AuditSettings(seed=ctx.seed)
    features = tokens.as_sent(method, ctx.features(controls, method.views(ctx.task.image_size)))
    attack = tokens.train_attacker(controls.images, features, settings, ctx)
    found, pictures = tokens.measure(method, client, upload, attack, settings, ctx)
    return Findings({"kind": "features", "features": found, "settings": asdict(settings)}, [], pictures)
