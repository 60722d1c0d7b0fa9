"""primum against its algorithm written out in plain torch; resuming; hospitals with little to give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import slow
import torch
from torch import Tensor

from fedbicross import models, pipeline
from fedbicross.context import Context, MemoryStore
from fedbicross.errors import ConfigError, MethodError, UploadError
from fedbicross.federation import records, simulate
from fedbicross.messages import Client, Predictor, Reply, Upload
from fedbicross.methods import METHODS, create
from fedbicross.parts import class_mix, gate, teachers
from fedbicross.parts.local import own_model
from fedbicross.parts.pool import page_batches
from fedbicross.steps.augment import draw_boxes, draw_views, zoomed
from fedbicross.steps.gate import Choice
from small import TINY_METHODS, Killed, Mortal, first_in_check, later, refuses, tiny_clients, tiny_context

TINY = TINY_METHODS["primum"]


def uneven(count: int = 3) -> list[Client]:
    """Clients of different class mixes; the last lacks a class."""
    clients = tiny_clients(count)
    for index, client in enumerate(clients):
        labels = client.labels.copy()
        labels[: 8 * index] = index % 3
        clients[index] = replace(client, labels=labels)
    return clients


@pytest.fixture(scope="module")
def trained() -> Context:
    ctx = tiny_context()
    for client in uneven():
        ctx.with_loss("balanced").local_model(client)
    return ctx


@pytest.fixture(scope="module")
def uploads(trained: Context) -> list[Upload]:
    return [create("primum").upload(client, trained) for client in uneven()]


def tiny(spec: str = "primum", **settings: Any) -> Any:
    return create(spec, {"primum": {**TINY, **settings}})


# --- the algorithm ----------------------------------------------------------------------------------------


def slow_weights(counts: list[list[float]], by: str) -> list[list[float]]:
    """a(i,c), with min(n(i,c), Σ_d≠c n(i,d)), or its root, for n(i,c) where that is asked for."""
    classes = range(len(counts[0]))
    if by != "counts":
        told = [[min(row[c], sum(row) - row[c]) for c in classes] for row in counts]
        totals = [sum(row[c] for row in told) for c in classes]
        counts = [[t[c] if totals[c] else row[c] for c in classes] for t, row in zip(told, counts, strict=True)]
    if by == "root":
        counts = [[n**0.5 for n in row] for row in counts]
    totals = [sum(row[c] for row in counts) for c in classes]
    return [[row[c] / totals[c] if totals[c] else 0.0 for c in classes] for row in counts]


def slow_teacher(networks: Sequence[torch.nn.Module], x: Tensor, weights: Tensor, config: Any) -> Tensor:
    """Soft labels, client by client."""
    tau = config.temperature
    with torch.no_grad():
        logits = [network(x) for network in networks]
    if config.teacher == "mean_logits":
        return (sum(logits) / len(logits) / tau).softmax(1)
    if config.teacher == "class_weighted":
        total = sum(a * (z / tau).softmax(1) for a, z in zip(weights, logits, strict=True))
        return total / total.sum(1, keepdim=True)
    return (sum(a * z.log_softmax(1) for a, z in zip(weights, logits, strict=True)) / tau).softmax(1)


def slow_batch(
    networks: Sequence[torch.nn.Module], mix: list[float], name: str, number: int, config: Any, ctx: Context
):
    """One batch of images: torch.optim.Adam on the pixels."""
    shares = np.array(mix) / sum(mix)
    drawn = ctx.rng("labels", name, f"batch-{number}").choice(len(mix), config.batch, p=shares)
    rng = ctx.torch_rng("synthesis", name, f"batch-{number}")
    size = ctx.task.image_size
    x = torch.randn((config.batch, 3, size, size), generator=rng)
    shifts = torch.randint(-2, 3, (config.steps, 2), generator=rng).tolist()
    x.requires_grad_(True)
    adam = torch.optim.Adam([x], lr=config.lr_synthesis)
    terms = SimpleNamespace(ce="mean_logits", bn_reduction="mean", alpha_tv=config.alpha_tv, alpha_bn=config.alpha_bn)
    for shift in shifts:
        adam.zero_grad()
        seen = torch.roll(x, shift, dims=(2, 3))
        slow.inversion_loss(networks, seen, torch.from_numpy(drawn), terms).backward()
        adam.step()
    return x.detach()


def slow_page(
    pool: Tensor,
    networks: Sequence[torch.nn.Module],
    weights: Tensor,
    batches: int,
    page: int,
    config: Any,
    ctx: Context,
) -> tuple[Tensor, Tensor]:
    """Augmented images one by one, and the teacher's soft labels of them."""
    count, size = batches * config.batch, ctx.task.image_size
    rng = ctx.torch_rng("distillation", f"page-{page}")
    rows = torch.randint(len(pool), (count,), generator=rng)
    kinds = torch.randint(8 if config.turns else 1, (count,), generator=rng).tolist()
    views, boxes = draw_views(count, rng), draw_boxes(count, size, rng).tolist()
    whole = []
    for row, kind, view in zip(rows, kinds, views, strict=True):
        image = torch.rot90(pool[row], kind % 4, dims=(1, 2))
        image = image.flip(2) if kind >= 4 else image
        whole.append(zoomed(image[None], view[None])[0] if config.zoom else image)
    seen = []
    for i, image in enumerate(whole):
        first = i - i % config.batch
        other = whole[first + (i - first - 1) % config.batch]  # its neighbour in the batch
        top, bottom, left, right = boxes[i] if config.cutmix and (i + 1) % config.cutmix == 0 else [0] * 4
        image = image.clone()
        image[:, top:bottom, left:right] = other[:, top:bottom, left:right]
        seen.append(image)
    x = torch.stack(seen)
    return x, slow_teacher(networks, x, weights, config)


def slow_student(uploads: list[Upload], config: Any, ctx: Context) -> dict[str, Tensor]:
    """The server's work with loops; only the random draws are the product's own."""
    networks = slow.networks(uploads, ctx)
    counts = [[float(n) for n in upload.class_counts] if upload.class_counts else [1.0] * 3 for upload in uploads]
    weights = torch.tensor(slow_weights(counts, config.weights))
    if config.invert == "alone":
        asked = [([network], counts[i], uploads[i].client) for i, network in enumerate(networks)]
    else:
        asked = [(networks, [sum(row[c] for row in counts) for c in range(3)], "everyone")]
    images = []
    for members, mix, name in asked:
        for number in range(max(1, config.pool // len(asked))):
            wanted = [1.0] * 3 if config.labels == "balanced" else mix
            images.append(slow_batch(members, wanted, name, number, config, ctx))
    pool = torch.cat(images)

    pupil = slow.Pupil(config, ctx)
    if config.start == "uploaded":
        told = [sum(min(n, sum(row) - n) for n in row) for row in counts]
        pupil.network.load_state_dict(uploads[told.index(max(told))].tensors)
    step, page, batches = 0, 0, page_batches(config, ctx)
    while step < config.steps_distil:
        seen, soft = slow_page(pool, networks, weights, batches, page, config, ctx)
        for turn in range(config.reuse):
            rng = ctx.torch_rng("distillation", f"page-{page}", f"order-{turn}")
            for rows in torch.randperm(len(seen), generator=rng).split(config.batch):
                if step < config.steps_distil:
                    log_q = (pupil.network(seen[rows]) / config.temperature).log_softmax(1)
                    terms = soft[rows] * (soft[rows].clamp_min(1e-300).log() - log_q)
                    rate = slow.rate(config, step, config.steps_distil)
                    pupil.step(terms.sum(1).mean() * config.temperature**2, rate)
                    step += 1
        page += 1
    return pupil.network.state_dict()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("spec", "settings", "other"),
    first_in_check(
        [
            ("primum", {}, {"weights": "contrast"}),
            ("primum", {"steps_distil": 5, "reuse": 2}, {"reuse": 1}),
            ("primum:fresh", {}, {"start": "uploaded"}),
            ("primum:no_zoom", {}, {"zoom": True}),
            ("primum", {"pool": 6, "alpha_bn": 1.0}, {"alpha_bn": 2.0}),
            ("primum:together", {}, {"labels": "own"}),
            ("primum:balanced_labels", {"cutmix": 1}, {"cutmix": 2}),
            ("primum:mean_teacher", {"schedule": "step"}, {"teacher": "consensus"}),
            ("primum:mixture_teacher", {"temperature": 2.0}, {"temperature": 4.0}),
            ("primum:plain_weights", {"alpha_tv": 0.1}, {"alpha_tv": 0.0}),
            ("primum:no_cutmix", {}, {"cutmix": 3}),
            ("primum:no_turns", {"momentum": 0.5}, {"turns": True}),
        ]
    ),
)
def test_equals_the_algorithm_in_plain_torch(
    spec: str, settings: dict[str, Any], other: dict[str, Any], uploads: list[Upload]
) -> None:
    method = tiny(spec, **settings)
    replies = method.fuse(uploads, tiny_context())
    assert len(replies) == 3 and replies[0] is replies[2], "one student for everyone"
    slow.assert_same_state(replies[0].tensors, slow_student(uploads, method.config, tiny_context()))
    changed = method.config.model_copy(update=other)
    with pytest.raises(AssertionError):  # the comparison is fine enough to tell the variants apart
        slow.assert_same_state(replies[0].tensors, slow_student(uploads, changed, tiny_context()))


@pytest.mark.usefixtures("float64")
def test_without_class_counts_those_are_used_that_the_networks_show() -> None:
    clients, ctx = uneven(), tiny_context()
    clients[0] = replace(clients[0], labels=np.where(clients[0].labels == 1, 2, clients[0].labels))
    method = tiny("primum:no_counts")
    secret = [method.upload(client, ctx) for client in clients]
    assert all(upload.class_counts is None for upload in secret)
    found = method.fuse(secret, tiny_context())[0].tensors
    shown = teachers.read_counts(secret, tiny_context()).tolist()
    assert shown[0][1] == 0 and min(shown[0][0], *shown[1]) > 0
    told = [replace(upload, class_counts=row) for upload, row in zip(secret, shown, strict=True)]
    slow.assert_same_state(found, slow_student(told, method.config, tiny_context()))


def test_what_leaves(trained: Context, uploads: list[Upload]) -> None:
    client = uneven()[1]
    balanced = trained.with_loss("balanced").local_model(client).state
    assert all(torch.equal(uploads[1].tensors[name], value) for name, value in balanced.items())
    assert uploads[1].class_counts == client.class_counts(3) and uploads[1].num_samples is None
    assert "class" in tiny().upload_summary and "class_counts" in tiny().needs
    secret = tiny("primum:no_counts")
    assert secret.upload(client, trained).class_counts is None
    assert "number of training images" not in secret.upload_summary and "class_counts" not in secret.needs
    plain = tiny("primum:cross_entropy").upload(client, trained)
    own = trained.local_model(client).state
    assert all(torch.equal(plain.tensors[name], value) for name, value in own.items())


def test_the_recipe_of_the_run_does_not_change_the_loss() -> None:
    client = tiny_clients(1)[0]
    first, second = (tiny().upload(client, tiny_context(loss=loss)) for loss in ("balanced", "cross_entropy"))
    assert first.pack() == second.pack()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("pool", 0), ("batch", 1), ("steps", 0), ("temperature", 0), ("lr", 0), ("cutmix", -1), ("momentum", 1.0)),
        *(
            ("teacher", "best"),
            ("weights", "equal"),
            ("prior", "mine"),
            ("own", "best"),
            ("loss", "focal"),
            ("storage", "uint4"),
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=setting):
        tiny(**{setting: value})


def test_every_variant_but_two_shares_the_gate() -> None:
    without = {"student": "uniform", "estimated": "estimated"}
    for variant in METHODS["primum"].variants:
        assert tiny(f"primum:{variant}").config.prior == without.get(variant, "own")


# --- killed and resumed -----------------------------------------------------------------------------------


def fuse(
    method: Any, uploads: Sequence[Upload], store: MemoryStore, fast: bool = False
) -> tuple[bytes, dict[str, Any]]:
    ctx = replace(tiny_context(), store=store, seconds_between_stages=0.0, fast=fast)
    reply = method.fuse(uploads, ctx)[0]
    return reply.pack(), ctx.record.as_json()


@pytest.mark.parametrize("fast", [False, *later(True)])
@pytest.mark.parametrize("storage", ["bf16", *later("fp32")])
def test_cut_in_the_pool_and_in_the_distillation_it_ends_with_the_same_bytes(
    storage: str, fast: bool, uploads: list[Upload]
) -> None:
    method = tiny(pool=6, storage=storage, steps_distil=4)
    whole = Mortal(1000)
    expected = fuse(method, uploads, whole, fast)
    made = ["pool.safetensors"] * (2 if fast else 6)  # a batch of each client at once, or one batch
    assert [Path(name).name for name in whole.names] == [*made, *["distillation.safetensors"] * 4, "pool.png"]
    store = Mortal()
    for files in range(len(whole.names)):  # one run, killed after each of its files
        store.budget = files - len(store.names)
        with pytest.raises(Killed):
            fuse(method, uploads, store, fast)
    store.budget = 1000
    assert fuse(method, uploads, store, fast) == expected
    assert store.names == whole.names, "nothing is made twice"


def test_a_pool_that_is_there_is_not_inverted_again(uploads: list[Upload], monkeypatch: pytest.MonkeyPatch) -> None:
    store, method = Mortal(1000), tiny(pool=3, steps_distil=3)
    expected = fuse(method, uploads, store)[0]
    ctx = replace(tiny_context(), store=store)
    ctx.drop_stage("distillation")
    monkeypatch.setattr("fedbicross.steps.inversion.Inversion.start", lambda *given: pytest.fail("inverted again"))
    assert method.fuse(uploads, ctx)[0].pack() == expected


# --- back at the client -----------------------------------------------------------------------------------


def student_of(reply: Reply) -> dict[str, Tensor]:
    return dict(reply.tensors)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def reply(uploads: list[Upload]) -> Reply:
    return tiny().fuse(uploads, tiny_context())[0]


def test_the_student_alone_is_for_patients_from_anywhere(reply: Reply, trained: Context) -> None:
    predictor = tiny("primum:student").personalize(uneven()[0], reply, trained)
    assert predictor.architectures == ("resnet8",) and predictor.log_prior is None
    assert same(predictor.states[0], student_of(reply))


def test_an_estimated_mix_needs_a_student_that_can_be_given_one(reply: Reply, trained: Context) -> None:
    method, client = tiny("primum:estimated"), uneven()[0]
    assert method.adapts_prior and not tiny().adapts_prior
    predictor = method.personalize(client, reply, trained)
    expected = class_mix.calibrated(client, tiny("primum:student").personalize(client, reply, trained), trained)
    assert predictor.pack() == expected.pack() and len(predictor.states) == 1
    assert class_mix.adapt_prior(predictor, client.images).log_prior is not None


@pytest.mark.parametrize(
    ("spec", "losses"),
    [
        ("primum", ("cross_entropy", "balanced")),
        ("primum:one_network", ("balanced",)),
        ("primum:cross_entropy", ("cross_entropy", "balanced")),
    ],
)
@pytest.mark.parametrize("accepted", [False, True])
@pytest.mark.parametrize("referred", [False, True])
def test_a_client_keeps_its_own_model_and_gets_the_student_where_the_gate_says_so(
    referred: bool,
    accepted: bool,
    spec: str,
    losses: tuple[str, ...],
    reply: Reply,
    trained: Context,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, marks = uneven()[0], torch.tensor([1e4, 3.0, 1e4])
    monkeypatch.setattr(gate, "choose", lambda *given: Choice(0.5 if accepted else 1.0, 2))
    monkeypatch.setattr(gate, "referral", lambda *given: marks if referred else None)
    predictor = tiny(spec).personalize(client, reply, trained)
    expected = [trained.with_loss(loss).local_model(client).state for loss in losses]
    expected += [student_of(reply)] if accepted or referred else []
    assert len(predictor.states) == len(expected) and all(map(same, predictor.states, expected))
    assert predictor.combine == "consensus" and (predictor.referral is not None) == referred


def test_one_network_in_the_end_learns_from_what_the_gate_gives(
    reply: Reply, trained: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = uneven()[0]
    asked: list[Any] = []
    monkeypatch.setattr("fedbicross.parts.personal.distil_into_one", lambda *given: asked.append(given) or given[1])
    found = tiny("primum:single", turns=False).personalize(client, reply, trained)
    assert found.pack() == tiny().personalize(client, reply, trained).pack() == asked[0][1].pack()
    _, _, starts, turns, _ = asked[0]
    expected = [trained.with_loss(loss).local_model(client).state for loss in ("cross_entropy", "balanced")]
    assert all(map(same, starts.states, [*expected, student_of(reply)])) and turns is False


@pytest.mark.parametrize("own", ["both", "balanced", "cross_entropy"])
def test_the_own_model_that_the_gate_starts_from_is_a_setting(
    own: Any, reply: Reply, trained: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = uneven()[0]
    monkeypatch.setattr(gate, "choose", lambda *given: Choice(1.0, 2))
    monkeypatch.setattr(gate, "referral", lambda *given: None)
    found = tiny(own=own).personalize(client, reply, trained)
    assert found.pack() == own_model(client, trained, own).pack()


def test_what_is_decided_at_home_does_not_change_what_leaves_or_what_the_server_makes(uploads: list[Upload]) -> None:
    assert METHODS["primum"].at_client == {"own", "prior", "single"}
    expected = tiny().fuse(uploads, tiny_context())[0].pack()
    for settings in ({"own": "balanced"}, {"prior": "uniform"}, {"prior": "estimated"}, {"single": True}):
        assert tiny(**settings).fuse(uploads, tiny_context())[0].pack() == expected


def test_a_reply_that_is_no_network_is_refused(reply: Reply, trained: Context) -> None:
    client = uneven()[0]
    for spec in ("primum", "primum:student", "primum:estimated"):
        method = tiny(spec)
        with refuses(UploadError, "architecture"):
            pipeline.personalize(method, client, Reply(reply.tensors, {"architecture": "cnn"}), trained, "x")


# --- odd federations --------------------------------------------------------------------------------------


def finite(predictors: dict[str, Predictor], images: np.ndarray) -> dict[str, np.ndarray]:
    found = {name: predictor.probabilities(images) for name, predictor in predictors.items()}
    for answers in found.values():
        assert np.isfinite(answers).all() and np.allclose(answers.sum(1), 1, atol=1e-4)
    return found


def test_one_client_alone() -> None:
    clients, ctx = tiny_clients(1), tiny_context()
    finite(simulate(tiny(), clients, ctx), clients[0].images)
    assert len(ctx.store.load("replies/seed-0/method/client-0.safetensors") or b"") > 0


def test_hospitals_with_one_class_each() -> None:
    clients = [replace(c, labels=np.full_like(c.labels, i)) for i, c in enumerate(tiny_clients(3))]
    found = finite(simulate(tiny(), clients, tiny_context()), clients[0].images)
    assert len(found) == 3


def test_a_hospital_with_one_class_among_others() -> None:
    clients = tiny_clients(3)
    clients[0] = replace(clients[0], labels=np.full_like(clients[0].labels, 1))
    ctx = tiny_context()
    finite(simulate(tiny(), clients, ctx), clients[1].images)
    upload = Upload.unpack(ctx.store.load("uploads/seed-0/method/client-0.safetensors") or b"")
    assert upload.class_counts == [0, 24, 0]


def test_a_class_that_nobody_has() -> None:
    clients, ctx = tiny_clients(3, classes=2), tiny_context(classes=3)
    finite(simulate(tiny(), clients, ctx), clients[0].images)
    for spec in ("ensemble:consensus", "local_only:balanced"):
        found = finite(simulate(create(spec), clients, replace(ctx, scope=f"seed-0/{spec}")), clients[0].images)
        assert all((answers[:, 2] == 0).all() for answers in found.values())


def test_clients_with_too_few_images_for_validation_keep_their_own_model_and_are_told() -> None:
    """The last one has one image, of one class: the student answers only what is referred to it."""
    clients = [Client(c.name, c.images[:n], c.labels[:n]) for c, n in zip(tiny_clients(3), (24, 9, 1), strict=True)]
    clients[1] = replace(clients[1], labels=np.arange(9) % 3)
    ctx = tiny_context()
    predictors = simulate(tiny(), clients, ctx)
    finite(predictors, clients[0].images)
    assert predictors["client-1"].pack() == own_model(clients[1], ctx, "both").pack()
    own, model = own_model(clients[2], ctx, "both"), predictors["client-2"]
    assert all(map(same, model.states[:2], own.states)) and len(model.states) == 3
    assert model.class_weights is not None and (model.class_weights[2] == 0).all(), (
        "the student has no say but by referral"
    )
    assert model.referral is not None and (model.referral < 1e4).sum() == 2
    warnings = [text for record in records(ctx, [c.name for c in clients], 1) for text in record["warnings"]]
    told = [text for text in warnings if "no validation images" in text]
    assert len(told) == 2 and "client-1" in told[0] and "client-2" in told[1]


def test_mixed_architectures_teach_one_student_of_the_runs(trained: Context) -> None:
    clients = uneven()
    ctx = replace(trained, scope="seed-0/mixed", client_models={"client-1": "wrn16_2"})
    finite(simulate(tiny("primum:student"), clients, ctx), clients[0].images)
    predictors = simulate(tiny(), clients, replace(ctx, scope="seed-0/mixed-own"))
    finite(predictors, clients[0].images)
    assert predictors["client-1"].architectures[0] == "wrn16_2"
    reply = Reply.unpack(ctx.store.load("replies/seed-0/mixed/client-1.safetensors") or b"")
    assert reply.info["architecture"] == "resnet8"


def test_the_order_of_clients_changes_nothing() -> None:
    clients = uneven()
    first = simulate(tiny(), clients, tiny_context())
    second = simulate(tiny(), [clients[2], clients[0], clients[1]], tiny_context())
    assert {name: p.pack() for name, p in first.items()} == {name: p.pack() for name, p in second.items()}


def test_a_network_without_batch_normalisation_is_refused() -> None:
    with refuses(MethodError, "needs_bn_stats"):
        simulate(tiny(), tiny_clients(2), tiny_context(model="cnn"))


def test_a_client_that_keeps_its_counts_is_refused_unless_nobody_sends_them(uploads: list[Upload]) -> None:
    secret = [uploads[0], replace(uploads[1], class_counts=None)]
    with refuses(MethodError, "needs_class_counts"):
        pipeline.fuse(tiny(), secret, tiny_context(), "server")


@pytest.mark.parametrize("spec", ["primum", "primum:together"])
def test_the_server_counts_the_passes_of_every_network(spec: str, uploads: list[Upload]) -> None:
    method, ctx = tiny(spec, pool=6), tiny_context()
    method.fuse(uploads, ctx)
    one, config = models.forward_flops("resnet8", 3, 3, 12), method.config
    by = 3 if spec == "primum:together" else 1
    inverted = 6 * config.batch * config.steps * 2 * by
    labelled = config.batch * math.ceil(config.steps_distil / config.reuse)  # a page of what is needed
    assert ctx.record.flops == (inverted + 3 * labelled + 3 * config.batch * config.steps_distil) * one


@pytest.mark.parametrize(("spec", "own"), [("primum", "both"), ("primum:one_network", "balanced")])
def test_it_is_measured_against_what_its_gate_starts_from(spec: str, own: str, trained: Context) -> None:
    client = uneven()[0]
    assert create(spec, TINY_METHODS).alone(client, trained).pack() == own_model(client, trained, own).pack()
