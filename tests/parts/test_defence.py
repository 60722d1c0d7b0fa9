"""What sticks out is left out or limited by name; what does not is used to the bit as it came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedbicross import pipeline
from fedbicross.context import Context
from fedbicross.federation import simulate
from fedbicross.messages import Client, Reply, Upload
from fedbicross.methods import create
from fedbicross.parts import defence, probes
from small import TINY_METHODS, later, tiny_clients, tiny_context

BAD = 2


@pytest.fixture(scope="module")
def federation() -> tuple[list[Upload], Context]:
    """Five honest sites with all classes."""
    ctx = tiny_context(epochs=4)
    method = create("ensemble:class_weighted")
    return [method.upload(client, ctx) for client in tiny_clients(5, per_client=40)], ctx


def with_bad(uploads: list[Upload], forge: Callable[[Upload], Upload]) -> list[Upload]:
    return [forge(upload) if i == BAD else upload for i, upload in enumerate(uploads)]


def changed(upload: Upload, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Upload:
    return replace(upload, tensors={name: change(name, value) for name, value in upload.tensors.items()})


def times(ends: str | tuple[str, ...], factor: float) -> Callable[[Upload], Upload]:
    return lambda upload: changed(upload, lambda name, value: factor * value if name.endswith(ends) else value)


def untrained(upload: Upload) -> Upload:
    """Other weights under honest statistics."""
    fresh = tiny_context().new_model(torch.Generator().manual_seed(1)).state_dict()
    kept = ("running_mean", "running_var", "num_batches_tracked")
    return changed(upload, lambda name, value: value if name.endswith(kept) else fresh[name])


def claiming(upload: Upload, factor: int, counters: int = 0) -> Upload:
    counts = upload.class_counts and [factor * count for count in upload.class_counts]
    given = replace(upload, class_counts=counts, num_samples=upload.num_samples and factor * upload.num_samples)
    forged = lambda name, value: value + counters if name.endswith("num_batches_tracked") else value  # noqa: E731
    return changed(given, forged)


LEFT_OUT: dict[str, tuple[Callable[[Upload], Upload], str]] = {
    "logits": (times("head.weight", 100), "times as large"),
    "bias": (
        lambda upload: changed(
            upload, lambda name, value: value + torch.eye(3)[0] * 1e4 if name == "head.bias" else value
        ),
        "times as large",
    ),
    "logits the other way round": (times(("head.weight", "head.bias"), -100), "times as large"),
    "a hidden layer": (times("stage3.0.bn2.weight", 100), "times as large"),
    "large statistics": (times(("running_mean", "running_var"), 1000), "batch-normalisation statistics"),
    "large variances": (times("running_var", 1000), "batch-normalisation statistics"),
    "small statistics": (times("running_var", 1e-3), "batch-normalisation statistics"),
    "sign": (times("head.weight", -1), "common start"),
    "untrained": (untrained, "common start"),
    "claim": (lambda upload: claiming(upload, 10**6), "claims"),
    "claim with forged counters": (lambda upload: claiming(upload, 10**6, counters=10**9), "times as many images as o"),
}


@pytest.mark.parametrize("name", LEFT_OUT)
@pytest.mark.parametrize("count", [3, 5])
def test_what_sticks_out_is_named_and_left_out(name: str, count: int, federation: tuple[list[Upload], Context]) -> None:
    honest, ctx = federation
    forge, words = LEFT_OUT[name]
    uploads = with_bad(honest[:count], forge)
    seen = defence.look(uploads, ctx)
    assert [(note.client, note.left_out) for note in seen.notes] == [(honest[BAD].client, True)]
    assert words in str(seen.notes[0]) and "left out" in str(seen.notes[0])
    assert [u is v for u, v in zip(seen.uploads, uploads[:BAD] + uploads[BAD + 1 :], strict=True)] == [True] * (
        count - 1
    )


def test_honest_uploads_are_used_as_they_came(federation: tuple[list[Upload], Context]) -> None:
    honest, ctx = federation
    for count in range(1, 6):
        seen = defence.look(honest[:count], ctx)
        assert not seen.notes and all(a is b for a, b in zip(seen.uploads, honest[:count], strict=True))


def one_class(classes: int) -> list[Client]:
    clients = tiny_clients(classes, per_client=60)
    return [Client(c.name, c.images[c.labels == i], c.labels[c.labels == i]) for i, c in enumerate(clients)]


def mixed_sizes() -> list[Client]:
    sizes = (60, 3, 20, 1, 12)
    return [Client(c.name, c.images[:n], c.labels[:n]) for c, n in zip(tiny_clients(5, 60), sizes, strict=True)]


@pytest.mark.parametrize("spec", ["fedavg", "ensemble:class_weighted", "primum"])
@pytest.mark.parametrize("clients", [one_class(3), mixed_sizes()], ids=["one class each", "sizes"])
def test_skewed_federations_of_honest_sites_are_left_alone(spec: str, clients: list[Client]) -> None:
    method, ctx = create(spec, TINY_METHODS), tiny_context()
    uploads = [method.upload(client, ctx) for client in clients]
    for upload in uploads:
        pipeline.check_upload(method, upload, ctx.task)
    seen = defence.look(uploads, ctx)
    assert not seen.notes and all(a is b for a, b in zip(seen.uploads, uploads, strict=True))


def test_two_sites_have_nobody_to_ask(federation: tuple[list[Upload], Context]) -> None:
    honest, ctx = federation
    uploads = [honest[0], times("head.weight", 100)(honest[1])]
    assert defence.look(uploads, ctx) == defence.Seen(uploads)


def test_two_liars_of_five_are_both_left_out_but_never_half(federation: tuple[list[Upload], Context]) -> None:
    honest, ctx = federation
    bad = [times("head.weight", 100)(honest[0]), times("running_var", 1e4)(honest[1])]
    assert len(defence.look([*bad, *honest[2:]], ctx).uploads) == 3
    seen = defence.look([*bad, *honest[2:4]], ctx)
    assert len(seen.uploads) == 3 and sum(note.left_out for note in seen.notes) == 1


def test_whom_the_operator_trusts_is_noted_and_used(federation: tuple[list[Upload], Context]) -> None:
    honest, ctx = federation
    for forge in (times("head.weight", 100), times("head.weight", 7), lambda u: claiming(u, 5000, 10**6)):
        uploads = with_bad(honest, forge)
        seen = defence.look(uploads, ctx, trusted=[honest[BAD].client])
        assert seen.notes and not any(note.left_out for note in seen.notes)
        assert seen.uploads[BAD] is uploads[BAD]


def test_a_somewhat_larger_last_layer_is_made_as_large_as_the_others(
    federation: tuple[list[Upload], Context],
) -> None:
    honest, ctx = federation

    def louder(upload: Upload) -> Upload:
        return changed(upload, lambda name, value: 7 * value if name.startswith("head.") else value)

    seen = defence.look(with_bad(honest, louder), ctx)
    (note,) = seen.notes
    assert note.client == honest[BAD].client and "last layer 7 times" in note.what and not note.left_out
    sizes = [float(defence._head_size(dict(upload.tensors))) for upload in seen.uploads]
    assert sizes[BAD] == pytest.approx(float(np.median(sizes[:BAD] + sizes[BAD + 1 :])), rel=1e-4)
    assert all(a is b for i, (a, b) in enumerate(zip(seen.uploads, honest, strict=True)) if i != BAD)
    direction = seen.uploads[BAD].tensors["head.weight"], honest[BAD].tensors["head.weight"]
    assert float(torch.cosine_similarity(*(value.flatten() for value in direction), dim=0)) > 0.9999


def test_a_claim_far_beyond_the_others_counts_for_a_thousand_times_their_median(
    federation: tuple[list[Upload], Context],
) -> None:
    honest, ctx = federation
    seen = defence.look(with_bad(honest, lambda upload: claiming(upload, 5000, counters=10**6)), ctx)
    (note,) = seen.notes
    assert "5000 times" in note.what and not note.left_out
    counts = seen.uploads[BAD].class_counts or ()
    assert sum(counts) == pytest.approx(1000 * 40, rel=0.01)
    shares = torch.tensor(counts) / sum(counts), torch.tensor(honest[BAD].class_counts) / 40
    assert torch.allclose(*shares, atol=1e-3), "the mix stays"


def test_so_does_a_claim_of_images_without_classes() -> None:
    method, ctx = create("fedavg"), tiny_context()
    honest = [method.upload(client, ctx) for client in tiny_clients(5)]
    images = honest[0].num_samples or 0
    assert {(upload.class_counts, upload.num_samples) for upload in honest} == {(None, images)}
    forged = with_bad(honest, lambda upload: claiming(upload, 5000, counters=10**6))
    seen = defence.look(forged, ctx)
    (note,) = seen.notes
    assert "5000 times" in note.what and not note.left_out
    assert [(upload.num_samples or 0) / images for upload in seen.uploads] == [1, 1, 1000, 1, 1]
    silent = replace(honest[0], num_samples=None)
    assert defence.look([silent, *forged[1:]], ctx).notes == seen.notes, "one silent site does not shield it"


FOUR: dict[str, int] = {"classes": 4}


@pytest.fixture(scope="module")
def four_classes() -> tuple[list[Upload], Context]:
    """Five honest sites that share four classes."""
    ctx, method = tiny_context(**FOUR, epochs=4), create("ensemble:class_weighted")
    return [method.upload(client, ctx) for client in tiny_clients(5, per_client=80, **FOUR)], ctx


def answering(liars: dict[str, Callable[[torch.Tensor], torch.Tensor]]) -> Callable[[Upload, int], torch.Tensor]:
    """`probes.answers_by_batch`, with other answers of some."""
    ask = probes.answers_by_batch

    def answers(upload: Upload, count: int) -> torch.Tensor:
        found = ask(upload, count)
        assert found is not None
        return liars.get(upload.client, lambda given: given)(found)

    return answers


def test_who_contradicts_the_others_about_classes_that_they_know_is_left_out(
    four_classes: tuple[list[Upload], Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, ctx = four_classes
    assert not defence.look(honest, ctx).notes
    monkeypatch.setattr(probes, "answers_by_batch", answering({honest[BAD].client: torch.neg}))
    seen = defence.look(honest, ctx)
    (note,) = seen.notes
    assert note.client == honest[BAD].client and "against the others" in note.what and note.left_out
    assert all(a is b for a, b in zip(seen.uploads, honest[:BAD] + honest[BAD + 1 :], strict=True))
    assert defence.look(honest, ctx, {honest[BAD].client}).uploads == honest, "unless the operator trusts it"
    alone = [replace(u, class_counts=[77, 1, 1, 1] if i == BAD else u.class_counts) for i, u in enumerate(honest)]
    assert not defence.look(alone, ctx).notes, "one shared class is too little to tell"


def test_one_network_without_answers_does_not_silence_the_rule(
    four_classes: tuple[list[Upload], Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, ctx = four_classes
    silent = {honest[0].client: lambda found: torch.full_like(found, torch.nan)}
    monkeypatch.setattr(probes, "answers_by_batch", answering({honest[BAD].client: torch.neg, **silent}))
    assert [note.client for note in defence.look(honest, ctx).notes] == [honest[BAD].client]


@pytest.mark.parametrize("spec", ["ensemble", *later("fedbicross:k2", "ensemble:class_weighted", "primum")])
def test_flipped_labels_are_found_with_counts_and_without(spec: str) -> None:
    method, ctx = create(spec, TINY_METHODS), tiny_context(**FOUR, epochs=8)
    clients = tiny_clients(5, per_client=80, **FOUR)
    honest = [method.upload(client, ctx) for client in clients]
    assert not pipeline.look_at(method, honest, ctx).notes
    bad = Client(clients[BAD].name, clients[BAD].images, 3 - clients[BAD].labels)
    sent = [method.upload(bad, ctx) if i == BAD else upload for i, upload in enumerate(honest)]
    seen = pipeline.look_at(method, sent, ctx)
    assert [(note.client, note.left_out) for note in seen.notes] == [(bad.name, True)]
    assert "against the others" in seen.notes[0].what


def test_counters_set_low_do_not_hide_a_site_that_claims_many_images() -> None:
    method, ctx = create("fedavg"), tiny_context(epochs=8)
    (upload,) = [method.upload(client, ctx) for client in tiny_clients(1, 120)]
    counters = {name: value * 0 + 1 for name, value in upload.tensors.items() if name.endswith("num_batches_tracked")}
    low = replace(upload, tensors={**upload.tensors, **counters})
    assert upload.num_samples == 120
    assert defence._trained_on(upload, ctx) >= 108  # a tenth is held back, the last batch is counted as full
    assert defence._trained_on(low, ctx) == pytest.approx(108)
    assert defence._trained_on(replace(low, num_samples=None), ctx) < 10


def test_networks_without_batch_normalisation_are_not_asked_about_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of honest ones differ too much: on drawn cells one of five fell to -0.38."""
    method, ctx = create("ensemble"), tiny_context(model="cnn")
    uploads = [method.upload(client, ctx) for client in tiny_clients(4)]
    monkeypatch.setattr(probes, "answers_by_batch", lambda *given: pytest.fail("asked"))
    assert not defence.look(uploads, ctx).notes


def test_which_classes_a_network_knows_can_be_read_off_it() -> None:
    method, ctx = create("ensemble"), tiny_context(epochs=8)
    uploads = []
    for lacking, client in enumerate(tiny_clients(3, 120)):
        kept = client.labels != lacking
        uploads.append(method.upload(Client(client.name, client.images[kept], client.labels[kept]), ctx))
    uploads.append(method.upload(tiny_clients(1, 9)[0], ctx))  # too few to know any class
    logits = torch.stack([answers for u in uploads if (answers := probes.answers_by_batch(u, 128)) is not None])
    expected = ~torch.eye(4, 3, dtype=torch.bool)
    expected[3] = False
    assert torch.equal(defence._known(uploads, logits, ctx), expected)
    assert not defence._known(uploads, logits, ctx.with_loss("balanced")).any(), "there answers do not show the mix"


def test_other_architectures_are_not_compared_and_features_have_no_network() -> None:
    ctx, method = tiny_context(), create("ensemble")
    clients = tiny_clients(4)
    uploads = [method.upload(client, ctx) for client in clients]
    other = replace(ctx, client_models={clients[3].name: "cnn"})
    mixed = [*uploads[:3], method.upload(clients[3], other)]
    assert not defence.look(mixed, ctx).notes
    falcon = create("fedcgs", {"fedcgs": {"encoder": "tiny"}})
    assert not defence.look([falcon.upload(client, ctx) for client in clients], ctx).notes


# --- through the door of every carrier ---------------------------------------------------------------------------


def test_a_reply_says_what_was_noted_and_goes_to_everybody(federation: tuple[list[Upload], Context]) -> None:
    honest, ctx = federation
    method = create("ensemble:class_weighted")
    replies = pipeline.fuse(method, with_bad(honest, times("head.weight", 100)), ctx, "a")
    assert len(replies) == 5 and len({id(reply) for reply in replies}) == 1
    (text,) = replies[0].info["notes"]
    assert text.startswith("'client-2' sent a layer") and text.endswith("left out of the fusion")
    assert len(replies[0].info["architectures"]) == 4
    record = ctx.store.load("records/fuse/a.json") or b""
    assert b"left out of the fusion" in record
    plain = pipeline.fuse(method, honest, ctx, "b")
    assert "notes" not in plain[0].info
    assert plain[0].pack() == method.fuse(honest, ctx)[0].pack(), "nothing is changed where nothing sticks out"


def test_who_is_left_out_gets_what_most_others_get() -> None:
    task = tiny_context().task
    uploads = [Upload(name, task) for name in "abcd"]
    few, many = Reply({}, {"cluster": 0}), Reply({}, {"cluster": 1})
    seen = defence.Seen([uploads[0], uploads[1], uploads[3]], (defence.Note("c", "is odd", True),))
    given = seen.replies_to(uploads, [few, many, many])
    assert [reply.info["cluster"] for reply in given] == [0, 1, 1, 1]
    assert given[1] is given[2] is given[3], "equal replies stay one object"


def test_a_trusting_method_uses_everything(federation: tuple[list[Upload], Context]) -> None:
    honest, ctx = federation
    uploads = with_bad(honest, times("head.weight", 100))
    trusting = create("ensemble:class_weighted:trusting")
    assert trusting.trusting and not create("ensemble:class_weighted").trusting
    assert trusting.config == create("ensemble:class_weighted").config
    seen = pipeline.look_at(trusting, uploads, ctx)
    assert not seen.notes and all(a is b for a, b in zip(seen.uploads, uploads, strict=True))
    assert create("fedavg:personal:trusting").gated


def test_a_simulation_goes_on_without_the_one_that_sticks_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clients, ctx = tiny_clients(4), tiny_context()
    method = create("fedavg")
    original = type(method).upload

    def upload(self: object, client: Client, ctx: Context, previous: Reply | None = None) -> Upload:
        made: Upload = original(method, client, ctx, previous)
        return times("head.weight", 100)(made) if client.name == "client-2" else made

    monkeypatch.setattr(type(method), "upload", upload)
    models = simulate(method, clients, ctx)
    assert list(models) == [client.name for client in clients]
    kept = [original(method, client, ctx) for client in clients if client.name != "client-2"]
    expected = method.fuse(kept, ctx)[0].tensors
    assert all(torch.equal(models["client-2"].states[0][name], value) for name, value in expected.items())
