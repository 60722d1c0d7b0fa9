"""FALCON: what leaves, what is refused, the server against plain torch, and personal heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedbicross import models
from fedbicross.context import Context
from fedbicross.errors import ConfigError, MethodError, UploadError
from fedbicross.federation import simulate
from fedbicross.messages import Client, Predictor, Reply, Upload
from fedbicross.methods import create
from fedbicross.methods.falcon import Falcon
from fedbicross.parts.features import take_prefix
from fedbicross.parts.features import tokens as tokens_of
from fedbicross.parts.heads import hold_out_rows, seeded
from fedbicross.parts.sequences import draw_apart, local_generator
from fedbicross.steps.tokens import exact_copies, nearest_cosine
from small import TINY_METHODS, Mortal, refuses, survive, tiny_clients, tiny_context

SETTINGS = TINY_METHODS["falcon"]


def method(spec: str = "falcon", **values: Any) -> Falcon:
    made = create(spec, {"falcon": {**SETTINGS, **values}, spec: {**TINY_METHODS.get(spec, {}), **values}})
    assert isinstance(made, Falcon)
    return made


@pytest.fixture(scope="module")
def uploads() -> list[Upload]:
    ctx = tiny_context()
    return [method(send="sequences").upload(client, ctx) for client in tiny_clients(3)]


# --- what leaves --------------------------------------------------------------------------------------


def test_an_upload_is_synthetic_sequences_of_the_classes_at_hand_and_a_classifier() -> None:
    client = tiny_clients(1, per_client=40)[0]
    client = replace(client, labels=np.where(client.labels == 2, 0, client.labels))
    ctx = tiny_context(validation=0.0)
    upload = method(send="sequences").upload(client, ctx)
    counts = np.bincount(client.labels, minlength=3)
    made = torch.bincount(upload.tensors["labels"], minlength=3).tolist()
    assert made == [round(1.5 * n) for n in counts] and made[2] == 0
    assert upload.tensors["sequences"].shape == (sum(made), 5, 128)
    assert upload.extra["form"] == "sequences" and upload.extra["dim"] == 128 and upload.extra["tokens"] == 5
    assert upload.num_samples is None and upload.class_counts is None
    others = {name for name in upload.tensors if not name.startswith("classifier.")}
    assert others == {"sequences", "labels"}
    method().check_upload(Upload.unpack(upload.pack()))


@pytest.mark.parametrize("seed", range(6))
def test_no_real_token_leaves(seed: int) -> None:
    client = tiny_clients(1, per_client=16, seed=seed)[0]
    ctx = replace(tiny_context(), seed=seed)
    falcon = method(send="sequences", epochs_generator=15, epochs_classifier=1)
    sent = falcon.upload(client, ctx).tensors["sequences"]
    real = tokens_of(falcon.config, client, ctx)
    assert exact_copies(sent, real) == 0
    assert float(nearest_cosine(sent, real).max()) <= 0.999
    # The check itself can fail: a real token hidden among the synthetic ones is found.
    sent = sent.clone()
    sent[2, 3] = real[5, 1]
    assert exact_copies(sent, real) == 1 and float(nearest_cosine(sent, real)[2]) > 0.9999


class Parrot:
    """A generator that repeats what it was given."""

    sampling_flops = 1

    def __init__(self, sequences: list[Tensor]) -> None:
        self.sequences = sequences

    def draw(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        return self.sequences.pop(0)[: len(labels)].clone()


def test_sequences_too_near_are_drawn_again_and_at_last_left_out() -> None:

    rng = torch.Generator().manual_seed(0)
    real, far = torch.randn(4, 2, 8, generator=rng), torch.randn(3, 2, 8, generator=rng)
    labels = torch.tensor([0, 1, 1])
    near = torch.stack([far[0], real[1] * 1.5, far[2]])  # the cosine does not care for the length
    ctx = tiny_context()
    sent, kept = draw_apart(Parrot([near, far[1:2]]), labels, real, ctx, "c")  # type: ignore[arg-type]
    assert torch.equal(sent, far) and torch.equal(kept, labels) and not ctx.record.warnings
    sent, kept = draw_apart(Parrot([near] + [real[1:2]] * 10), labels, real, ctx, "c")  # type: ignore[arg-type]
    assert torch.equal(sent, far[[0, 2]]) and kept.tolist() == [0, 1]
    assert "1 of 3 synthetic sequences stay closer" in ctx.record.warnings[0]
    with refuses(MethodError, "too_near", "only repeats real tokens"):
        draw_apart(Parrot([real[:3]] + [real[:3]] * 10), labels, real, ctx, "c")  # type: ignore[arg-type]


def test_the_smaller_of_sequences_and_generator_leaves() -> None:
    ctx = tiny_context()
    small, large = tiny_clients(1, per_client=12)[0], tiny_clients(1, per_client=80, seed=1)[0]
    falcon = method()
    few, many = falcon.upload(small, ctx), falcon.upload(replace(large, name="large"), ctx)
    assert (few.extra["form"], many.extra["form"]) == ("sequences", "generator")
    generator = sum(v.nbytes for v in take_prefix(many.tensors, "generator.").values())
    per_sequence = 5 * 128 * 4
    assert few.tensors["sequences"].nbytes == len(few.tensors["labels"]) * per_sequence <= generator
    assert int(many.tensors["counts"].sum()) * per_sequence > generator
    assert method(send="generator").upload(small, ctx).extra["form"] == "generator"
    assert method(send="sequences").upload(replace(large, name="large"), ctx).extra["form"] == "sequences"


def test_a_generator_upload_makes_the_sequences_that_would_have_been_sent() -> None:
    ctx, client = tiny_context(), tiny_clients(1)[0]
    sequences = method(send="sequences").upload(client, ctx)
    generator = Upload.unpack(method(send="generator").upload(client, ctx).pack())
    made, labels = method().synthetic_tokens(generator, tiny_context())
    assert torch.equal(labels, sequences.tensors["labels"])
    torch.testing.assert_close(made, sequences.tensors["sequences"], atol=1e-5, rtol=1e-5)


def test_one_image_one_class_and_an_even_smaller_validation() -> None:
    client = Client("one", tiny_clients(1)[0].images[:1], np.array([1]))
    upload = method().upload(client, tiny_context())
    assert upload.tensors["labels"].tolist() == [1, 1]
    assert exact_copies(upload.tensors["sequences"], tokens_of(method().config, client, tiny_context())) == 0


# --- what is refused ----------------------------------------------------------------------------------


def changed(upload: Upload, extra: Mapping[str, Any] | None = None, **tensors: Tensor | None) -> Upload:
    new = {name: value for name, value in {**upload.tensors, **tensors}.items() if value is not None}
    return replace(upload, tensors=new, extra={**upload.extra, **(extra or {})})


def test_bad_uploads_are_refused_by_name(uploads: list[Upload]) -> None:
    good, falcon = uploads[0], method()
    falcon.check_upload(good)
    sequences, labels = good.tensors["sequences"], good.tensors["labels"]
    nan = sequences.clone()
    nan[0, 0, 0] = float("nan")
    empty = {"sequences": sequences[:0], "labels": labels[:0]}
    bad: list[tuple[Upload, str]] = [
        (changed(good, image=torch.zeros(3)), "tensor_names"),
        (changed(good, labels=None), "tensor_names"),
        (changed(good, sequences=sequences[:, :4]), "tensor_shape"),
        (changed(good, sequences=sequences[1:]), "tensor_shape"),
        (changed(good, sequences=sequences.half()), "tensor_type"),
        (changed(good, labels=labels.int()), "tensor_type"),
        (changed(good, sequences=nan), "non_finite"),
        (changed(good, labels=labels + 2), "falcon_labels"),
        (changed(good, labels=labels - 1), "falcon_labels"),
        (changed(good, **empty), "falcon_labels"),
        (changed(good, labels=torch.tensor(1)), "tensor_shape"),
        (changed(good, {"dim": 127}), "tensor_shape"),
        (changed(good, {"dim": 10**9}), "falcon_manifest"),
        (changed(good, {"tokens": 0}), "falcon_manifest"),
        (changed(good, {"tokens": "5"}), "falcon_manifest"),
        (changed(good, {"form": "images"}), "falcon_manifest"),
        (changed(good, {"form": "generator"}), "tensor_names"),
    ]
    for upload, code in bad:
        with pytest.raises(UploadError) as caught:
            falcon.check_upload(upload)
        assert caught.value.code == code, (caught.value, code)
        assert "client-0" in str(caught.value)


def test_bad_generators_are_refused_before_anything_is_made() -> None:
    falcon = method(send="generator")
    good = falcon.upload(tiny_clients(1)[0], tiny_context())
    falcon.check_upload(good)
    for counts in ([0, 0, 0], [-1, 5, 5], [10**12, 0, 0], [10**18] * 3):
        with pytest.raises(UploadError, match="out of range"):
            falcon.check_upload(changed(good, counts=torch.tensor(counts)))
    weight = good.tensors["generator.mixture.weight"]
    with pytest.raises(UploadError, match="has shape"):
        falcon.check_upload(changed(good, **{"generator.mixture.weight": weight[1:]}))
    with pytest.raises(UploadError, match="makes values that are not finite"):
        huge = torch.full_like(good.tensors["generator.scale.scale"], 3e38)
        falcon.fuse([changed(good, **{"generator.scale.scale": huge})], tiny_context())
    short = method("falcon:no_hse").upload(tiny_clients(1)[0], tiny_context())
    with pytest.raises(UploadError, match="another shape than the others"):
        falcon.fuse([good, changed(short, {"encoder": good.extra["encoder"]})], tiny_context())
    with pytest.raises(UploadError, match="another encoder"):
        other = {"encoder": {**good.extra["encoder"], "window": 3}}
        falcon.fuse([good, changed(good, other)], tiny_context())


@pytest.mark.parametrize("size", [0, -3, None])
def test_sizes_that_weigh_teachers_must_be_sizes(size: int | None) -> None:
    falcon = method("falcon:released")
    good = falcon.upload(tiny_clients(1)[0], tiny_context())
    falcon.check_upload(good)
    with pytest.raises(UploadError, match="must be 1 or more"):
        falcon.check_upload(replace(good, num_samples=size))


def test_strange_names_of_clients_do_no_harm() -> None:
    ctx = replace(tiny_context(), seconds_between_stages=0.0)
    client = replace(tiny_clients(1)[0], name="../../St. Mary's / ward 5")
    simulate(method("falcon:personal"), [client], ctx)
    assert all(".." not in name and "Mary" not in name for name in ctx.store._names)  # type: ignore[attr-defined]


def test_bad_settings_and_replies() -> None:
    with pytest.raises(ConfigError, match="width must be a multiple of heads"):
        method(width=10, heads=4)
    with pytest.raises(ConfigError, match="does not fit images of 12 px"):
        method(window=12).upload(tiny_clients(1)[0], tiny_context())
    falcon, ctx, client = method(), tiny_context(), tiny_clients(1)[0]
    reply = falcon.fuse([falcon.upload(client, ctx)], ctx)[0]
    other = Reply(reply.tensors, {**reply.info, "encoder": {**reply.info["encoder"], "digest": "x"}})
    with pytest.raises(MethodError, match="another encoder"):
        falcon.personalize(client, other, ctx)


# --- the server ---------------------------------------------------------------------------------------


def plain_server(falcon: Falcon, uploads: list[Upload], ctx: Context) -> dict[str, Tensor]:
    """Section 2.6 with loops: mean of softened teachers, Eq. 13, Adam."""
    config = falcon.config
    x = torch.cat([upload.tensors["sequences"] for upload in uploads])
    y = torch.cat([upload.tensors["labels"] for upload in uploads])
    heads = [models.heads.load(config.head, take_prefix(u.tensors, "classifier."), 3) for u in uploads]
    head = models.heads.build(config.head, 128, 3, 16, config.dropout)
    models.initialise(head, ctx.torch_rng("falcon", "global"))
    shares = torch.tensor([1 / len(uploads)] * len(uploads))
    if config.teachers == "size":
        sizes = torch.tensor([float(upload.num_samples or 0) for upload in uploads])
        shares = sizes / sizes.sum()
    if config.start == "mean":
        mean = {k: sum(h.state_dict()[k] for h in heads) / len(heads) for k in head.state_dict()}
        head.load_state_dict(mean)
    optimiser = torch.optim.Adam(head.parameters(), lr=config.lr_global)
    head.train()
    for epoch in range(config.epochs_global):
        stream = ctx.torch_rng("global", f"epoch-{epoch}")
        order = torch.randperm(len(y), generator=ctx.torch_rng("global", f"order-{epoch}"))
        for start in range(0, len(y), config.batch_global):
            rows = order[start : start + config.batch_global]
            tokens = x[rows]
            if config.token_noise:
                tokens = tokens + config.token_noise * torch.randn(tokens.shape, generator=stream)
            with torch.no_grad():
                soft = sum(w * F.softmax(h(tokens) / 4, 1) for w, h in zip(shares, heads, strict=True))
            with seeded(stream):
                logits = head(tokens)
            student = F.log_softmax(logits / 4, 1)
            assert isinstance(soft, Tensor)
            divergence = (soft * (soft.log() - student)).sum(1).mean()
            loss = (1 - config.alpha) * F.cross_entropy(logits, y[rows]) + config.alpha * 16 * divergence
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return head.state_dict()


@pytest.mark.parametrize("spec", ["falcon", "falcon:no_kd", "falcon:released"])
def test_the_server_equals_section_2_6_in_plain_torch(
    spec: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = tiny_context()
    falcon = method(spec, send="sequences", batch_global=16)
    uploads = [falcon.upload(client, ctx) for client in tiny_clients(2)]
    request.getfixturevalue("float64")  # from here on; encoders are float32
    monkeypatch.setattr(Falcon, "check_upload", lambda self, upload: None)  # so are uploads
    wide = [{k: v.double() if v.is_floating_point() else v for k, v in u.tensors.items()} for u in uploads]
    uploads = [replace(upload, tensors=tensors) for upload, tensors in zip(uploads, wide, strict=True)]
    replies = falcon.fuse(uploads, tiny_context())
    assert len(replies) == 2 and replies[0] is replies[1], "one classifier for everyone"
    expected = plain_server(falcon, uploads, tiny_context())
    for name, value in expected.items():
        torch.testing.assert_close(replies[0].tensors[name], value)
    other = method(spec, send="sequences", batch_global=16, epochs_global=4)
    longer = plain_server(other, uploads, tiny_context())
    assert not torch.allclose(longer["head.weight"], expected["head.weight"], atol=1e-3)


def test_variants_change_what_they_say() -> None:
    assert method("falcon:no_hse").config.spec(28).window is None
    assert method("falcon:no_kd").config.alpha == 0
    assert method("falcon:ar").config.scheme == "ar" and method("falcon:nar").config.scheme == "nar"
    paper = create("falcon").config
    values = (paper.width, paper.layers, paper.heads, paper.components, paper.epochs_generator, paper.lr_generator)
    assert values == (768, 4, 16, 20, 400, 1e-4)
    assert (paper.alpha, paper.temperature, paper.epochs_global, paper.batch, paper.lr_global) == (
        0.5,
        4,
        60,
        256,
        5e-4,
    )
    assert "num_samples" in method("falcon:released").needs and "num_samples" not in method().needs
    assert method("falcon:class_weighted").config.teachers == "class"


def test_class_weights_come_from_the_synthetic_sequences(uploads: list[Upload]) -> None:
    labels = [torch.tensor([0, 0, 1]), torch.tensor([1, 1, 1])]
    weights = method(teachers="class")._weights(uploads[:2], labels, 3, "cpu")
    assert weights is not None
    torch.testing.assert_close(weights, torch.tensor([[1.0, 0.25, 0.0], [0.0, 0.75, 0.0]]))


# --- sharing, resuming, learning ----------------------------------------------------------------------


def test_variants_share_generator_and_classifier_and_encoder_is_not_needed_at_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ctx, made = tiny_context(), []
    ctx.event = lambda **fields: made.append(fields["key"].partition("-")[0]) if fields["event"] == "trained" else None
    client = tiny_clients(1)[0]
    first = method(send="sequences").upload(client, ctx)
    second = method("falcon:no_kd", send="sequences").upload(client, ctx)
    assert made == ["classifier", "generator"]
    assert all(torch.equal(first.tensors[name], value) for name, value in second.tensors.items())
    method("falcon:nar").upload(client, ctx)
    assert made == ["classifier", "generator", "generator"]
    flops = ctx.record.flops
    method().upload(client, ctx)
    assert ctx.record.flops > flops, "shared work is charged to everybody"
    import fedbicross.models.encoders as encoders

    def refuse(*arguments: object) -> None:
        raise AssertionError("the server loaded an encoder")

    monkeypatch.setattr(encoders, "load_encoder", refuse)
    monkeypatch.setattr("fedbicross.engine.predict.load_encoder", refuse)
    monkeypatch.setattr("fedbicross.engine.tokens.load_encoder", refuse)
    method().fuse([Upload.unpack(first.pack())], tiny_context())


def test_killed_anywhere_goes_on_to_the_same_bytes() -> None:
    clients, falcon = tiny_clients(2), method("falcon:personal", send="sequences")
    whole = simulate(falcon, clients, tiny_context())
    for lives in (7, 16):
        store = Mortal()

        def work(store: Mortal = store) -> dict[str, Predictor]:
            return simulate(falcon, clients, replace(tiny_context(), store=store, seconds_between_stages=0.0))

        again = survive(store, lives, work)
        assert {n: p.pack() for n, p in again.items()} == {n: p.pack() for n, p in whole.items()}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["mar", "ar", "nar"])
def test_it_learns_something_that_no_client_knows_alone(scheme: str) -> None:
    """Three clients with two of three classes each: the global classifier knows all three."""
    everyone = tiny_clients(1, per_client=180, seed=3)[0]
    clients = []
    for index in range(3):
        rows = np.flatnonzero(everyone.labels != index)
        clients.append(Client(f"client-{index}", everyone.images[rows[index::2]], everyone.labels[rows[index::2]]))
    values = {
        "epochs_generator": 40,
        "epochs_classifier": 20,
        "epochs_global": 15,
        "lr_global": 3e-3,
        "batch_global": 32,
    }
    ctx = tiny_context()
    made = simulate(method(f"falcon:{scheme}" if scheme != "mar" else "falcon", **values), clients, ctx)
    test = tiny_clients(1, per_client=150, seed=9)[0]
    accuracy = (made["client-0"].probabilities(test.images).argmax(1) == test.labels).mean()
    assert accuracy > 0.85
    assert len({predictor.pack() for predictor in made.values()}) == 1


@pytest.mark.slow
def test_the_generator_that_was_not_yet_learned_by_heart_can_be_kept() -> None:
    """A generator trained for long knows its few images; the epoch kept is the likeliest on images it never saw."""
    client, ctx = tiny_clients(1, per_client=60)[0], tiny_context(validation=0.3)
    found = {}
    for spec in ("falcon", "falcon:held_out"):
        made = method(spec, epochs_generator=60, lr_generator=1e-2)
        tokens = tokens_of(made.config, client, ctx)
        rows, held_out = hold_out_rows(client, ctx)
        generator, labels = local_generator(made.config, client, tokens, ctx), torch.from_numpy(client.labels)
        with torch.no_grad():
            found[spec] = [float(generator.nll(tokens[part], labels[part]).mean()) for part in (rows, held_out)]
    assert found["falcon:held_out"][1] < found["falcon"][1], "better on images that it did not see"
    assert found["falcon:held_out"][0] > found["falcon"][0], "and not because it was trained longer"
    alone = replace(client, images=client.images[:1], labels=client.labels[:1])
    assert method("falcon:held_out").upload(alone, ctx).tensors, "without validation images: the last epoch"


@pytest.mark.slow
def test_calibrated_sequences_are_nearer_to_the_real_ones_and_leave_either_way() -> None:
    client, ctx = tiny_clients(1, per_client=90)[0], tiny_context()
    found, flops = {}, {}
    for spec in ("falcon:held_out", "falcon:calibrated"):
        made, before = method(spec, send="sequences", epochs_generator=8), ctx.record.flops
        upload = made.upload(client, ctx)
        made.check_upload(upload)
        flops[spec] = ctx.record.flops - before
        tokens, labels = tokens_of(made.config, client, ctx), torch.from_numpy(client.labels)
        rows, _ = hold_out_rows(client, ctx)
        real = tokens[rows]
        drawn = [upload.tensors["sequences"][upload.tensors["labels"] == c].mean(0) for c in range(3)]
        found[spec] = sum(float((real[labels[rows] == c].mean(0) - drawn[c]).norm()) for c in range(3))
    assert found["falcon:calibrated"] < found["falcon:held_out"]
    assert flops["falcon:calibrated"] > flops["falcon:held_out"], "the sequences drawn for it are charged"
    sent = method("falcon:calibrated", send="generator", epochs_generator=8).upload(client, ctx)
    assert {"generator.scale.offset", "generator.scale.gain"} <= set(sent.tensors)
    method("falcon:calibrated").check_upload(Upload.unpack(sent.pack()))
    made, _ = method("falcon:calibrated").synthetic_tokens(sent, tiny_context())
    torch.testing.assert_close(made, upload.tensors["sequences"], atol=1e-5, rtol=1e-5)
    with pytest.raises(UploadError):  # a server that asked for no calibration does not take one
        method("falcon:held_out").check_upload(sent)


@pytest.mark.slow
def test_personal_heads_are_mixed_by_validation_only() -> None:
    clients = tiny_clients(2, per_client=60)
    clients = [replace(c, labels=np.where(c.labels == 2, i, c.labels)) for i, c in enumerate(clients)]
    ctx = replace(tiny_context(), scope="seed-0/personal")
    made = simulate(method("falcon:personal", epochs_classifier=15), clients, ctx)
    assert made["client-0"].pack() != made["client-1"].pack()
    for predictor in made.values():
        assert predictor.combine == "class_weighted" and predictor.class_weights is not None
        shares = predictor.class_weights
        assert math.isclose(float(shares[:, 0].sum()), 1, abs_tol=1e-6) and (shares > 0).all()
        assert (shares == shares[:, :1]).all(), "one share per head"
        assert np.allclose(predictor.probabilities(clients[0].images).sum(1), 1, atol=1e-5)
    alone = simulate(
        method("falcon:personal"),
        [replace(c, images=c.images[:6], labels=c.labels[:6]) for c in clients],
        tiny_context(),
    )
    for predictor in alone.values():  # too few images to validate: the fine-tuned head
        assert len(predictor.states) == 1
