"""One linear head for everyone on frozen features, and the gate before it, against loops."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedbicross import pipeline
from fedbicross.bundle import validate
from fedbicross.context import Context
from fedbicross.errors import ConfigError, MethodError, UploadError
from fedbicross.federation import simulate
from fedbicross.messages import Client, Predictor, Reply
from fedbicross.methods import create
from fedbicross.parts import gate, heads
from fedbicross.parts.features import describe
from fedbicross.parts.settings import HeadConfig
from fedbicross.steps.gate import Choice
from small import TINY_METHODS, refuses, tiny_clients, tiny_context

SPECS = ["fedcgs", "fedcgs:hierarchy", "fedpft"]


def method(spec: str) -> Any:
    return create(spec, TINY_METHODS)


def clients_without_a_class() -> list[Client]:
    """The first lacks class 0; pooled counts are uneven."""
    first, second = tiny_clients(2, per_client=30)
    return [replace(first, labels=np.where(first.labels == 0, 1, first.labels)), second]


def replies(spec: str, ctx: Context) -> tuple[Reply, Reply]:
    """Of the plain method, and of the same before a gate."""
    clients = clients_without_a_class()
    plain, gated = method(spec), method(f"{spec}:personal")
    return tuple(m.fuse([m.upload(c, ctx) for c in clients], ctx)[0] for m in (plain, gated))  # type: ignore[return-value]


@pytest.mark.parametrize("spec", SPECS)
def test_before_a_gate_the_head_loses_the_class_mix_of_all_clients(spec: str) -> None:
    clients, ctx = clients_without_a_class(), tiny_context()
    plain, gated = replies(spec, ctx)
    assert "class_counts" not in plain.tensors
    counts = [sum(int((client.labels == c).sum()) for client in clients) for c in range(3)]
    assert gated.tensors["class_counts"].tolist() == counts and len(set(counts)) > 1
    images = clients[1].images
    before = method(spec).personalize(clients[0], plain, ctx).probabilities(images)
    after = method(f"{spec}:personal").personalize(clients[0], gated, ctx).probabilities(images)
    for p, q in zip(before, after, strict=True):
        scores = [value / count for value, count in zip(p, counts, strict=True)]
        assert q.tolist() == pytest.approx([score / sum(scores) for score in scores], abs=1e-5)


def decided(monkeypatch: pytest.MonkeyPatch, share: float, referred: list[float] | None) -> list[Any]:
    asked: list[Any] = []

    def choice(own: Tensor, shared: Tensor, labels: Tensor, counts: Tensor) -> Choice:
        asked.append((own, shared, labels))
        return Choice(share, len(labels))

    monkeypatch.setattr(gate, "choose", choice)
    monkeypatch.setattr(gate, "referral", lambda *given: None if referred is None else torch.tensor(referred))
    return asked


@pytest.mark.slow
@pytest.mark.parametrize("referral", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("spec", SPECS)
def test_the_gate_mixes_two_heads_on_one_encoder(
    spec: str, share: float, referral: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients, ctx = clients_without_a_class(), tiny_context(validation=0.3)
    client, images = clients[0], clients[1].images
    gated = method(f"{spec}:personal")
    reply = gated.fuse([gated.upload(c, ctx) for c in clients], ctx)[0]
    own, held_back = gated.alone(client, ctx), gated.held_back(client, ctx)
    shared = gated.personalize(client, reply, ctx)
    mine, theirs = own.probabilities(images).astype(float), shared.probabilities(images).astype(float)
    odds = np.log(theirs[:, 0]) - np.log(theirs[:, 1:].max(1))
    threshold = float(np.median(odds)) + 1e-3  # about half are referred
    asked = decided(monkeypatch, share, [threshold, 1e4, 1e4] if referral else None)
    model = pipeline.personalize(gated, client, reply, ctx, "a")
    validate.check_predictor(model)
    assert model.encoder == own.encoder == shared.encoder
    assert len(model.states) == (share > 0) + (share < 1 or referral)
    counts = client.class_counts(3)
    found = model.probabilities(images)
    for i in range(len(images)):
        scores = []
        for c in range(3):
            prior = 0.7 * counts[c] / sum(counts) + 0.1
            mixed = share * math.log(max(mine[i, c], 1e-300))
            scores.append(mixed + (1 - share) * (math.log(max(theirs[i, c], 1e-300)) + math.log(prior)))
        total = sum(math.exp(score - max(scores)) for score in scores)
        expected = [math.exp(score - max(scores)) / total for score in scores]
        if referral and odds[i] > threshold:
            expected = theirs[i].tolist()
        assert found[i].tolist() == pytest.approx(expected, abs=1e-4)
    # What the rule was shown: both heads on the images that the head's own training held back.
    shown_own, shown_shared, labels = asked[0]
    rows = heads.hold_out_rows(client, ctx)[1].numpy()
    assert len(rows) == 9 and held_back.tolist() == rows.tolist() and labels.tolist() == client.labels[rows].tolist()
    for scores, head in ((shown_own, own), (shown_shared, shared)):
        assert np.allclose(scores.exp(), head.probabilities(client.images[rows]), atol=1e-5)


@pytest.mark.parametrize("spec", SPECS)
def test_the_own_model_is_a_local_head_on_the_method_s_own_view_of_the_image(spec: str) -> None:
    client, ctx, gated = tiny_clients(1)[0], tiny_context(validation=0.3), method(f"{spec}:personal")
    own = gated.alone(client, ctx)
    config = HeadConfig(encoder="tiny", hierarchy=spec.endswith("hierarchy"))
    assert own.pack() == heads.local_predictor(config, client, ctx).pack()


def test_a_federation_ends_with_a_model_for_each_client() -> None:
    clients, ctx = clients_without_a_class(), tiny_context(validation=0.3)
    models = simulate(method("fedcgs:personal"), clients, ctx)
    assert len({id(model) for model in models.values()}) == 2
    for model in models.values():
        answers = Predictor.unpack(model.pack()).probabilities(clients[0].images)
        assert np.isfinite(answers).all() and np.allclose(answers.sum(1), 1, atol=1e-5)


def test_a_gated_reply_is_not_taken_from_a_plain_one() -> None:
    """The same uploads in one run, but one reply holds the counts and the other does not."""
    clients, ctx = clients_without_a_class(), tiny_context(validation=0.3)
    simulate(method("fedcgs"), clients, replace(ctx, scope="seed-0/fedcgs"))
    simulate(method("fedcgs:personal"), clients, replace(ctx, scope="seed-0/fedcgs+personal"))


BAD_TENSORS: list[tuple[str, str, Tensor | None]] = [
    ("tensor_names", "class_counts", None),
    ("tensor_names", "weight", None),
    ("tensor_names", "other", torch.zeros(3)),
    ("tensor_type", "class_counts", torch.ones(3)),
    ("tensor_type", "class_counts", torch.ones(3, 1, dtype=torch.long)),
    ("tensor_shape", "class_counts", torch.ones(4, dtype=torch.long)),
    ("tensor_shape", "class_counts", torch.ones(0, dtype=torch.long)),
    ("bad_counts", "class_counts", torch.tensor([5, -1, 3])),
    ("bad_counts", "class_counts", torch.zeros(3, dtype=torch.long)),
    ("bad_counts", "class_counts", torch.full((3,), 2**62)),
    ("tensor_type", "weight", torch.zeros(3)),
    ("tensor_type", "weight", torch.zeros(3, 128, dtype=torch.float64)),
    ("tensor_shape", "weight", torch.zeros(4, 128)),
    ("tensor_shape", "weight", torch.zeros(1, 1).expand(3, 1 << 20)),  # a square of it would be 4 TiB
    ("tensor_shape", "bias", torch.zeros(1)),
    ("non_finite", "bias", torch.tensor([0.0, math.nan, 0.0])),
]


@pytest.mark.parametrize(("code", "name", "tensor"), BAD_TENSORS)
@pytest.mark.parametrize("spec", ["fedcgs:hierarchy:personal", "fedpft:local_prior"])
def test_a_stranger_s_reply_is_refused_by_a_stable_code(spec: str, code: str, name: str, tensor: Tensor | None) -> None:
    client, ctx, chosen = tiny_clients(1)[0], tiny_context(), method(spec)
    encoder = describe(chosen.config, ctx)
    good = {"weight": torch.zeros(3, 128), "bias": torch.zeros(3), "class_counts": torch.tensor([5, 0, 3])}
    chosen.personalize(client, Reply(good, {"encoder": encoder}), ctx)
    bad = {**good, name: tensor} if tensor is not None else {key: good[key] for key in good.keys() - {name}}
    with refuses(UploadError, code):
        chosen.personalize(client, Reply(bad, {"encoder": encoder}), ctx)


@pytest.mark.parametrize("info", [{}, {"encoder": None}, {"encoder": "tiny"}, {"encoder": {"name": "tiny"}}])
def test_a_reply_that_names_no_encoder_is_refused(info: dict[str, Any]) -> None:
    reply = Reply({"weight": torch.zeros(3, 128), "bias": torch.zeros(3)}, info)
    with refuses(MethodError, "encoder_mismatch"):
        method("fedcgs").personalize(tiny_clients(1)[0], reply, tiny_context())


@pytest.mark.parametrize("spec", ["fedcgs:local_prior", "fedpft:local_prior"])
def test_a_head_that_has_the_client_s_mix_already_has_no_gate(spec: str) -> None:
    with refuses(ConfigError, "no_gate", "class mix"):
        create(f"{spec}:personal")


def test_heads_on_two_encoders_are_not_mixed() -> None:
    client, ctx = tiny_clients(1)[0], tiny_context()
    own, other = (heads.local_predictor(HeadConfig(encoder="tiny", hierarchy=h), client, ctx) for h in (True, False))
    with refuses(MethodError, "no_gate", "encoder"):
        gate.gated(client, own, other, ctx)
