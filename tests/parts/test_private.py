"""Noise on what leaves: DP-SGD with its numbers of images, and the methods on features."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedbicross import pipeline
from fedbicross.context import Context
from fedbicross.engine.private import counts_release, training_release
from fedbicross.engine.recipe import PrivateTraining
from fedbicross.errors import ConfigError, MethodError, UploadError
from fedbicross.federation import simulate
from fedbicross.messages import Client, Upload
from fedbicross.methods import create, method_names
from fedbicross.parts import moments, private
from fedbicross.privacy.accountant import spent
from fedbicross.privacy.gaussian import noise_for
from small import TINY_METHODS, Mortal, survive, tiny_clients, tiny_context

DP = PrivateTraining(epsilon=2.0, max_grad_norm=1.0)


def context(**more: Any) -> Context:
    return tiny_context(model="resnet8_gn", dp=DP, **more)


def made(spec: str, ctx: Context, client: Client | None = None) -> Upload:
    upload = pipeline.make_upload(create(spec, TINY_METHODS), client or tiny_clients(1)[0], ctx, "x")
    return Upload.unpack(upload.pack())


# --- DP-SGD -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["fedavg", "fedavg:uniform", "ensemble", "ensemble:class_weighted"])
def test_a_private_network_says_what_it_cost(spec: str) -> None:
    pytest.importorskip("opacus")
    ctx, client = context(), tiny_clients(1)[0]
    upload = made(spec, ctx, client)
    assert upload.privacy is not None
    sends = upload.num_samples is not None or upload.class_counts is not None
    assert [release.mechanism for release in upload.privacy.releases] == ["sampled_gaussian", "gaussian"][: 1 + sends]
    assert spent(upload.privacy.releases, DP.delta) <= DP.epsilon
    images = len(client.labels) - len(ctx.validation_rows(client))
    assert upload.privacy.releases[0] == training_release(ctx.training, images)
    pipeline.check_upload(create(spec, TINY_METHODS), upload, ctx.task)
    assert not any("running" in name for name in upload.tensors)


def test_numbers_of_images_leave_with_noise() -> None:
    pytest.importorskip("opacus")
    client = tiny_clients(1)[0]
    sent = Upload("client-0", context().task, class_counts=[1000, 2000, 0], num_samples=3000)
    found = [private.of_training(sent, client, replace(context(), seed=seed)).class_counts for seed in range(300)]
    spread = np.array(found)[:, :2].std(0)
    assert np.all(np.abs(spread / counts_release(DP).noise_multiplier - 1) < 0.3)
    assert np.abs(np.array(found)[:, :2].mean(0) - [1000, 2000]).max() < 6 * spread.max() / 300**0.5
    one = private.of_training(sent, client, context())
    assert one.num_samples == sum(one.class_counts or []) and min(one.class_counts or []) >= 0
    alone = private.of_training(replace(sent, class_counts=None, num_samples=1), client, context())
    assert alone.num_samples is not None and alone.num_samples >= 1


@pytest.mark.slow
def test_training_is_repeated_and_goes_on_after_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opacus")
    monkeypatch.setattr("fedbicross.engine.train.SECONDS_BETWEEN_CHECKPOINTS", -1.0)
    client = tiny_clients(1)[0]
    first, again = (context(epochs=4).local_model(client).state for _ in range(2))
    store = Mortal()
    killed = survive(store, 2, lambda: replace(context(epochs=4), store=store).local_model(client).state)
    other = replace(context(epochs=4), seed=1).local_model(client).state
    for name, value in first.items():
        assert torch.equal(value, again[name]) and torch.equal(value, killed[name])
    assert not torch.equal(first["head.weight"], other["head.weight"])
    secret = [replace(context(epochs=4), secret_noise=True).local_model(client).state for _ in range(2)]
    assert not torch.equal(secret[0]["head.weight"], secret[1]["head.weight"])


def test_only_one_whole_training_is_accounted_for() -> None:
    pytest.importorskip("opacus")
    ctx, client = context(), tiny_clients(1)[0]
    state = ctx.openly.local_model(client).state
    for again in (
        lambda: ctx.models.retrain(client, state, visit="shot-2"),
        lambda: ctx.models.train_further(client, None, epochs=1, first_epoch=0, total_epochs=2),
    ):
        with pytest.raises(MethodError) as error:
            again()
        assert error.value.code == "not_private"


@pytest.mark.slow
def test_a_network_learns_in_spite_of_the_noise() -> None:
    pytest.importorskip("opacus")
    clients = tiny_clients(1, per_client=400)
    dp = PrivateTraining(epsilon=50.0, max_grad_norm=1.0)
    ctx = tiny_context(model="resnet8_gn", dp=dp, epochs=6, batch_size=32, lr=0.2, size=12)
    upload = made("fedavg", ctx, clients[0])
    method = create("fedavg")
    reply = method.fuse([upload], ctx)[0]
    answers = method.personalize(clients[0], reply, ctx).probabilities(clients[0].images)
    assert (answers.argmax(1) == clients[0].labels).mean() > 0.6


@pytest.mark.slow
def test_settings_for_the_noise_leave_alone_what_stays_at_home() -> None:
    pytest.importorskip("opacus")
    client, other = tiny_clients(1)[0], {"epochs": 3, "batch_size": 6, "lr": 0.3}
    own = context()
    own = replace(own, training=own.training.model_copy(update={"dp": DP.model_copy(update=other)}))
    plain = context()
    plain = replace(plain, training=plain.training.model_copy(update=other))
    for name, value in own.local_model(client).state.items():
        assert torch.equal(value, plain.local_model(client).state[name])
    for name, value in own.openly.local_model(client).state.items():
        assert torch.equal(value, context().openly.local_model(client).state[name])


def test_what_stays_at_home_is_trained_without_noise() -> None:
    pytest.importorskip("opacus")
    clients = tiny_clients(2)
    ctx = context()
    own = simulate(create("local_only"), clients, ctx)
    openly = tiny_context(model="resnet8_gn")
    expected = simulate(create("local_only"), clients, openly)
    for name, model in own.items():
        assert model.pack() == expected[name].pack()
    central = simulate(create("centralised"), clients, replace(ctx, scope="seed-0/centralised"))["client-0"]
    assert (
        central.pack()
        == simulate(create("centralised"), clients, replace(openly, scope="seed-0/centralised"))["client-0"].pack()
    )
    gated = simulate(create("fedavg:personal"), clients, replace(ctx, scope="seed-0/personal"))
    assert all(np.isfinite(model.probabilities(clients[0].images)).all() for model in gated.values())


WORK = {"fedavg", "fedavg:uniform", "ensemble", "ensemble:mean_probs", "ensemble:class_weighted"}
WORK |= {spec for spec in method_names() if spec.partition(":")[0] == "dafl"}


@pytest.mark.parametrize("spec", method_names())
def test_every_method_is_private_or_refuses_or_sends_no_network(spec: str) -> None:
    method = create(spec, TINY_METHODS)
    features = "encoder" in type(method.config).model_fields
    if method.private_training_problem:
        with pytest.raises(MethodError, match="cannot be private") as error:
            pipeline.make_upload(method, tiny_clients(1)[0], context(), "x")
        assert error.value.code == "not_private"
    elif not method.sends_only_the_network:
        assert features or not method.needs, "it sends a network that nobody made private"
    if spec in WORK:
        assert not method.private_training_problem and method.sends_only_the_network
    if "bn_stats" in method.needs:
        assert "batch-normalisation" in method.private_training_problem
    if spec in ("fedavg:multi_round", "ensemble:consensus"):
        assert method.private_training_problem


def test_the_report_says_it() -> None:
    said = create("fedavg").leaves(context().training)
    assert "DP-SGD" in said and "ε = 2" in said
    assert create("fedavg").leaves(tiny_context().training) == create("fedavg").upload_summary
    assert "ε = 1" in create("analytic:private").upload_summary


# --- on features ------------------------------------------------------------------------------------------------------


def many(count: int = 3000) -> Client:
    whole = tiny_clients(1, per_client=count, size=8)[0]
    return Client("many", whole.images, whole.labels)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["fedcgs", "fedpft", "analytic"])
def test_methods_on_features_learn_behind_noise(spec: str) -> None:
    table = {
        **TINY_METHODS,
        f"{spec}:private": {"epsilon": 8.0},
        "fedpft": {"encoder": "tiny", "epochs": 20, "lr": 1e-2},
    }
    ctx, client = tiny_context(size=8), many()
    answers = simulate(create(f"{spec}:private", table), [client], ctx)["many"].probabilities(client.images)
    assert (answers.argmax(1) == client.labels).mean() > 0.6


@pytest.mark.slow
@pytest.mark.parametrize("covariance", ["diag", "spherical"])
def test_fedpft_sends_one_gaussian_from_noisy_sums(covariance: str) -> None:
    ctx, client = tiny_context(size=8), many()
    settings = {"encoder": "tiny", "components": 1, "covariance": covariance, "clip": 1.0}
    noisy, plain = (create("fedpft", {"fedpft": {**settings, "epsilon": epsilon}}) for epsilon in (100.0, None))
    upload, exact = (Upload.unpack(method.upload(client, ctx).pack()) for method in (noisy, plain))
    noisy.check_upload(upload)
    assert upload.privacy is not None and exact.privacy is None
    assert float((upload.tensors["means"] - exact.tensors["means"]).abs().max()) < 0.01
    assert float((upload.tensors["scales"] / exact.tensors["scales"] - 1).abs().median()) < 0.5
    assert np.abs(np.array(upload.class_counts) - np.array(exact.class_counts)).max() < 10
    with pytest.raises(UploadError) as error:
        noisy.check_upload(replace(upload, privacy=None))
    assert error.value.code == "not_private"


def test_fedpft_leaves_out_what_cannot_be_told_from_noise() -> None:
    ctx = tiny_context()
    upload = create("fedpft:private", {"fedpft": {"encoder": "tiny"}}).upload(tiny_clients(1)[0], ctx)
    assert upload.class_counts == [0, 0, 0] and not upload.tensors
    create("fedpft:private", {"fedpft": {"encoder": "tiny"}}).check_upload(upload)


@pytest.mark.parametrize("settings", [{"components": 2}, {"covariance": "full"}, {"clip": None}])
def test_mixtures_take_no_noise(settings: dict[str, object]) -> None:
    values = {"encoder": "tiny", "components": 1, "clip": 1.0, "epsilon": 1.0, **settings}
    with pytest.raises(ConfigError, match="epsilon needs"):
        create("fedpft", {"fedpft": values})


def test_counts_are_whole_and_small_ones_are_noise() -> None:
    assert private.as_counts(torch.tensor([-3.2, 0.4, 17.6])) == [0, 0, 18]
    config = create("analytic:private").config
    limit = 3 * noise_for(1.0, 1e-5) / moments.COUNTS**0.5
    noisy = torch.tensor([limit - 1, limit + 1, -5.0], dtype=torch.float64)
    assert (private.told_from_noise(noisy, moments.COUNTS, config) > 0).tolist() == [False, True, False]
    assert not (private.told_from_noise(noisy, moments.COUNTS, config, sites=4) > 0).any()
