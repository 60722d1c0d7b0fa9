"""FedBiCross against its algorithm written out in plain torch, with second-order derivatives for the weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import slow
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functional_call

from fedbicross.context import Context
from fedbicross.errors import ConfigError, MethodError
from fedbicross.federation import simulate
from fedbicross.messages import Client, Upload
from fedbicross.methods import create
from fedbicross.parts.teachers import load_teacher
from fedbicross.steps.bilevel import split_batch
from small import TINY_METHODS, refuses, tiny_clients, tiny_context

SETTINGS = {**TINY_METHODS["fedbicross"], "personalisation": False}


def two_camps() -> list[Client]:
    """Clients 0 and 2 hold dark images, 1 and 3 bright ones: two clusters that nobody could miss."""
    clients = tiny_clients(4, per_client=30)
    kept = [np.isin(c.labels, [0, 1] if index % 2 == 0 else [1, 2]) for index, c in enumerate(clients)]
    return [Client(c.name, c.images[rows], c.labels[rows]) for c, rows in zip(clients, kept, strict=True)]


@pytest.fixture(scope="module")
def trained() -> Context:
    """A context whose store holds the clients' networks."""
    ctx = tiny_context(epochs=6)
    for client in two_camps():
        ctx.local_model(client)
    return ctx


@pytest.fixture(scope="module")
def uploads(trained: Context) -> list[Upload]:
    return [create("fedbicross").upload(client, trained) for client in two_camps()]


def bench(spec: str = "fedbicross", **settings: Any) -> Any:
    return create(spec, {"fedbicross": {**SETTINGS, **settings}})


# --- stage 2 against double backward ---------------------------------------------------------------------


def nearest_on_simplex(point: Tensor) -> Tensor:
    """Projection by bisection on the threshold: max(v - θ, 0) must sum to 1."""
    low, high = point.min().item() - 1, point.max().item()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if (point - middle).clamp_min(0).sum() > 1 else (low, middle)
    return (point - (low + high) / 2).clamp_min(0)


class Model:
    """One cluster model whose SGD step is a differentiable function of the weights."""

    def __init__(self, ctx: Context, number: int) -> None:
        self.network = ctx.new_model(ctx.torch_rng("student", str(number))).train()
        self.params = {name: p.detach().clone() for name, p in self.network.named_parameters()}
        self.buffers = dict(self.network.named_buffers())
        self.momentum = {name: torch.zeros_like(p) for name, p in self.params.items()}

    def answer(self, params: dict[str, Tensor], x: Tensor, track: bool) -> Tensor:
        buffers = self.buffers if track else {name: b.clone() for name, b in self.buffers.items()}
        return functional_call(self.network, {**params, **buffers}, (x,))

    def state(self) -> dict[str, Tensor]:
        return {name: {**self.params, **self.buffers}[name] for name in self.network.state_dict()}


def plain(
    config: Any, uploads: list[Upload], labels: list[int], ctx: Context
) -> tuple[list[dict[str, Tensor]], Tensor]:
    """Algorithm 1, lines 4-15, with loops: the cluster models and the final weights."""
    members = [[i for i, label in enumerate(labels) if label == k] for k in range(max(labels) + 1)]
    teachers = [slow.networks([uploads[i] for i in who], ctx) for who in members]
    count, total = len(members), config.trajectories * config.steps
    students = [Model(ctx, k) for k in range(count)]
    weights = torch.full((count, count), 1 / count)
    held = torch.tensor(range(9, 12)) if config.validation_share else torch.tensor([], dtype=torch.long)
    train = torch.tensor([i for i in range(12) if i not in held])
    for number in range(config.trajectories):
        images = [slow.synthesise(teachers[k], config, ctx, k, number)[0] for k in range(count)]
        if config.validation_batch == "other":
            later = number + config.trajectories
            others = [slow.synthesise(teachers[k], config, ctx, k, later)[0] for k in range(count)]
        else:
            others = images
        adapted = [
            slow.by_moving_average(teachers[k], images[k][::-1], config.momentum_adaptation)
            if config.adaptation == "ema"
            else slow.in_train_mode(teachers[k])
            for k in range(count)
        ]
        for t in range(1, config.steps + 1):
            lam, lr = 1 - t / config.steps, slow.rate(config, number * config.steps + t - 1, total)

            # The teachers see the whole batch; it is split afterwards.
            def loss_of(answer: Tensor, k: int, x: Tensor, rows: Tensor, adapted=adapted, lam=lam) -> Tensor:
                noisy, clean = slow.mean_logits(adapted[k], x)[rows], slow.mean_logits(teachers[k], x)[rows]
                hot = slow.divergence(noisy, answer, config.temperature)
                return lam * hot + (1 - lam) * slow.divergence(clean, answer, config.temperature)

            for k, model in enumerate(students):
                w = weights[k].clone().requires_grad_(True)
                leaves = {name: p.detach().requires_grad_(True) for name, p in model.params.items()}
                mixture = sum(
                    w[j] * loss_of(model.answer(leaves, images[j][t - 1][train], j == k), j, images[j][t - 1], train)
                    for j in range(count)
                )
                gradients = torch.autograd.grad(mixture, list(leaves.values()), create_graph=True)
                moved, momentum = {}, {}
                for (name, p), gradient in zip(leaves.items(), gradients, strict=True):
                    momentum[name] = config.momentum * model.momentum[name] + gradient + config.weight_decay * p
                    moved[name] = p - lr * momentum[name]
                if config.weights == "bilevel" and count > 1:
                    x = others[k][t - 1]
                    validation = loss_of(model.answer(moved, x[held], False), k, x, held)
                    (slope,) = torch.autograd.grad(validation, w)  # through the update: second order
                    slope = slope / lr  # η_w is relative to η_G
                    if config.unit_hypergradient:
                        slope = slope - slope.mean()
                        slope = slope / slope.abs().max()
                    weights[k] = nearest_on_simplex(weights[k] - config.lr_weights * slope)
                model.params = {name: p.detach() for name, p in moved.items()}
                model.momentum = {name: b.detach() for name, b in momentum.items()}
    return [model.state() for model in students], weights


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        ("fedbicross", {"unit_hypergradient": False, "lr_weights": 0.02}),
        ("fedbicross", {"clusters": 3, "lr_weights": 0.03, "schedule": "step"}),
        ("fedbicross:ema", {"unit_hypergradient": False, "lr_weights": 0.02}),
        ("fedbicross:other_batch", {"unit_hypergradient": False, "lr_weights": 0.02}),
        ("fedbicross:uniform", {"validation_share": 0.0}),
    ],
)
def test_cluster_models_and_weights_equal_double_backward(
    spec: str, settings: dict[str, Any], uploads: list[Upload]
) -> None:
    settings = {"lr": 0.02, "steps": 2, **settings}  # four steps in all: every rate of the schedule
    method, ctx = bench(spec, **settings), tiny_context()
    replies = method.fuse(uploads, ctx)
    labels = [reply.info["cluster"] for reply in replies]
    assert max(labels) + 1 == replies[0].info["clusters"] == method.config.clusters
    states, weights = plain(method.config, uploads, labels, tiny_context())
    for reply, label in zip(replies, labels, strict=True):
        slow.assert_same_state(reply.tensors, states[label])
    shown = torch.tensor(
        ctx.record.diagnosis["heatmaps"]["final cross-cluster weights (row listens to column)"]["values"]
    )
    torch.testing.assert_close(shown, weights, rtol=0, atol=1e-4)  # shown with four digits
    assert (weights != 1 / len(weights)).any() == (spec != "fedbicross:uniform"), "learned weights move"
    assert torch.allclose(shown.sum(1), torch.ones(len(shown)), atol=1e-3) and (shown >= 0).all()
    if spec == "fedbicross:uniform":  # the quickest
        other, _ = plain(bench(spec, **settings, momentum=0.8).config, uploads, labels, tiny_context())
        with pytest.raises(AssertionError):  # the comparison is fine enough to notice a slightly different optimiser
            slow.assert_same_state(replies[0].tensors, other[0])


def test_the_two_camps_are_found_and_share_their_reply(uploads: list[Upload]) -> None:
    replies = bench().fuse(uploads, tiny_context())
    assert [reply.info["cluster"] for reply in replies] == [0, 1, 0, 1]
    assert replies[0] is replies[2] and replies[1] is replies[3]
    assert not torch.equal(replies[0].tensors["head.weight"], replies[1].tensors["head.weight"])


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_intra_ignores_the_other_clusters(uploads: list[Upload]) -> None:
    """A cluster alone, with the number that it has among others, ends with the same model."""
    both = bench("fedbicross:intra").fuse(uploads, tiny_context())
    alone = bench(clusters=1).fuse([uploads[0], uploads[2]], tiny_context())
    slow.assert_same_state(both[0].tensors, dict(alone[0].tensors))


# --- the bridge to FedISCA -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "adaptation", ["batch", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ema", "none"))]
)
def test_one_cluster_without_validation_is_fedisca_to_the_byte(adaptation: str, uploads: list[Upload]) -> None:
    common = {"steps": 3, "batch": 12, "adaptation": adaptation, "lr": 0.07, "schedule": "step"}
    fedisca = create("fedisca", {"fedisca": {**common, "epochs": 3}})
    settings = {**common, "trajectories": 3, "weights": "uniform", "validation_share": 0.0, "clusters": 1}
    mine = bench(**settings).fuse(uploads, tiny_context())
    theirs = fedisca.fuse(uploads, tiny_context())
    assert list(mine[0].tensors) == list(theirs[0].tensors)
    for name, value in theirs[0].tensors.items():
        assert value.numpy().tobytes() == mine[0].tensors[name].numpy().tobytes(), name


# --- the split of a batch --------------------------------------------------------------------------------


@given(st.integers(2, 300), st.integers(2, 12), st.floats(0.01, 0.95))
def test_split_is_disjoint_complete_and_stratified(batch: int, classes: int, share: float) -> None:
    train, held = split_batch(batch, classes, share)
    assert sorted([*train, *held]) == list(range(batch))
    assert train and held
    counts = np.bincount(np.arange(batch) % classes, minlength=classes)
    kept_out = np.bincount(np.array(held) % classes, minlength=classes)
    if counts.min() * share >= 1:
        assert (np.abs(kept_out - share * counts) < 1).all(), "the share of every class"
    assert kept_out.max() - kept_out.min() <= 1, "no class is preferred"


def test_split_of_the_papers_batch() -> None:
    train, held = split_batch(256, 8, 0.2)
    assert len(held) == 48 and len(train) == 208
    assert (np.bincount(np.array(held) % 8) == 6).all()
    assert split_batch(12, 3, 0.0) == (list(range(12)), [])


@pytest.mark.parametrize(("batch", "classes"), [(2, 9), (3, 2), (5, 4)])
def test_tiny_batches_train(batch: int, classes: int) -> None:
    ctx, clients = tiny_context(classes=classes), tiny_clients(2, classes=2)
    method = bench(batch=batch, trajectories=1)
    replies = method.fuse([method.upload(client, ctx) for client in clients], ctx)
    assert all(torch.isfinite(value).all() for value in replies[0].tensors.values())


# --- stage 1 ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("clustering", ["predictions", "parameters", "hierarchical", "pacfl"])
def test_every_clustering_runs(clustering: str, trained: Context) -> None:
    method, ctx = bench(clustering=clustering, trajectories=1), replace(trained)
    uploads = [Upload.unpack(method.upload(client, ctx).pack()) for client in two_camps()]
    assert ("pacfl.signature" in uploads[0].tensors) == (clustering == "pacfl")
    assert ("principal directions" in method.upload_summary) == (clustering == "pacfl")
    replies = method.fuse(uploads, tiny_context())
    assert replies[0].info["clusters"] == 2
    assert "pacfl.signature" not in replies[0].tensors


def test_sending_subspaces_is_warned_about(trained: Context) -> None:
    ctx = tiny_context()
    ctx.store = trained.store
    bench(clustering="pacfl").upload(two_camps()[0], ctx)
    assert any("principal directions" in warning for warning in ctx.record.warnings)


def test_auto_says_why(uploads: list[Upload]) -> None:
    ctx = tiny_context()
    replies = bench(clusters="auto", trajectories=1).fuse(uploads, ctx)
    assert ctx.record.diagnosis["scalars"]["K chosen from the uploads"].startswith(f"{replies[0].info['clusters']}: ")
    table = ctx.record.diagnosis["tables"]["evidence for K"]
    assert table["columns"] == ["k", "silhouette", "stability", "sizes", "chosen"] and table["rows"]


@pytest.mark.parametrize(
    ("clients", "clusters", "said"), [(1, 3, "lowered to 1"), (2, 3, "lowered to 2"), (3, 3, None)]
)
def test_few_clients_lower_k_with_a_warning(
    clients: int, clusters: int, said: str | None, uploads: list[Upload]
) -> None:
    ctx = tiny_context()
    replies = bench(clusters=clusters, trajectories=1).fuse(uploads[:clients], ctx)
    assert replies[0].info["clusters"] == min(clients, clusters)
    assert (
        any(said in warning for warning in ctx.record.warnings)
        if said
        else not any("lowered" in warning for warning in ctx.record.warnings)
    )


@pytest.mark.parametrize("clustering", ["predictions", "parameters", "hierarchical"])
def test_identical_clients_share_one_cluster(clustering: str, uploads: list[Upload]) -> None:
    ctx = tiny_context()
    twins = [replace(uploads[0], client=f"twin-{i}") for i in range(3)]
    replies = bench(clusters=3, clustering=clustering, trajectories=1).fuse(twins, ctx)
    assert [reply.info["clusters"] for reply in replies] == [1, 1, 1]
    assert "K=3 lowered to 1: only 1 of 3 clients can be told apart" in ctx.record.warnings


def test_parameters_of_different_architectures_cannot_be_clustered(uploads: list[Upload]) -> None:
    other = tiny_context(model="vgg8")
    mixed = [uploads[0], create("fedbicross").upload(two_camps()[1], other)]
    for clustering in ("parameters", "hierarchical"):
        with refuses(MethodError, "architectures_differ"):
            bench(clustering=clustering).fuse(mixed, tiny_context())
    replies = bench(trajectories=1).fuse(mixed, tiny_context())
    assert [reply.info["architecture"] for reply in replies] == ["resnet8", "resnet8"]


def test_class_weights_are_renormalised_within_a_cluster(trained: Context) -> None:
    from fedbicross.methods.fedbicross import _of_cluster

    method = bench("fedbicross:class_weighted")
    uploads = [method.upload(client, trained) for client in two_camps()]
    everyone = load_teacher(method.config, "fedbicross", uploads, tiny_context())
    part = _of_cluster(everyone, [0, 2])
    dark = torch.tensor([two_camps()[i].class_counts(3) for i in (0, 2)], dtype=torch.float64)
    expected = dark / dark.sum(0).clamp_min(1e-12)
    torch.testing.assert_close(part.class_weights.double(), expected, atol=1e-6, rtol=0)
    assert len(part.ensemble) == 2
    assert (part.class_weights[:, 2] == 0).all(), "no client of this cluster has class 2"


# --- stage 3 ---------------------------------------------------------------------------------------------


def test_without_personalisation_the_cluster_model_is_used_as_it_is(uploads: list[Upload], trained: Context) -> None:
    method, ctx = bench(), replace(trained)
    reply = method.fuse(uploads, ctx)[0]
    predictor = method.personalize(two_camps()[0], reply, ctx)
    assert all(torch.equal(predictor.states[0][name], value) for name, value in reply.tensors.items())


def test_personal_models_differ_between_clients_of_a_cluster(uploads: list[Upload], trained: Context) -> None:
    method, ctx = bench(personalisation=True), replace(trained)
    replies, clients = method.fuse(uploads, ctx), two_camps()
    first, third = (method.personalize(clients[i], replies[i], ctx).states[0]["head.weight"] for i in (0, 2))
    assert not torch.equal(first, third)
    assert not torch.equal(first, replies[0].tensors["head.weight"])


def test_starting_from_the_own_model_keeps_its_architecture(uploads: list[Upload], trained: Context) -> None:
    ctx, client = replace(trained), two_camps()[0]
    reply = bench().fuse(uploads, ctx)[0]
    untouched = bench("fedbicross:own_start", personalisation=True, epochs_personal=0).personalize(client, reply, ctx)
    own = ctx.local_model(client).state
    assert untouched.architectures == (ctx.model_of(client),)
    assert all(torch.equal(untouched.states[0][name], value) for name, value in own.items())


def test_what_differs_at_the_client_alone_is_fused_once() -> None:
    method = bench("fedbicross:own_start")
    at_server = {"clusters", "weights", "lr", "validation_batch", "trajectories"}
    assert method.at_client < set(type(method.config).model_fields) and not method.at_client & at_server


@pytest.mark.slow
def test_a_client_with_one_image_gets_a_personal_model() -> None:
    clients = tiny_clients(3)
    clients[1] = Client("client-1", clients[1].images[:1], clients[1].labels[:1])
    ctx = tiny_context()
    predictors = simulate(bench(personalisation=True), clients, ctx)
    answers = predictors["client-1"].probabilities(clients[0].images)
    assert np.isfinite(answers).all()
    assert not np.allclose(answers, predictors["client-0"].probabilities(clients[0].images))


# --- settings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"clusters": 0}, "method.fedbicross.clusters"),
        ({"clusters": -1}, "method.fedbicross.clusters"),
        ({"clusters": "many"}, "method.fedbicross.clusters"),
        ({"steps": 0}, "method.fedbicross.steps"),
        ({"trajectories": 0}, "method.fedbicross.trajectories"),
        ({"validation_share": 1.0}, "method.fedbicross.validation_share"),
        ({"validation_share": 0.0}, "validation_share"),
        ({"weights": "bilevle"}, "method.fedbicross.weights"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        create("fedbicross", {"fedbicross": settings})
    assert caught.value.code == "bad_value" and named in str(caught.value)
