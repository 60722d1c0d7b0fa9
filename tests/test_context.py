"""Whose network has which architecture, trainings that go on from a given one, and time that is counted once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedbicross import client_models, context, models
from fedbicross.context import Context, Stopwatch
from fedbicross.engine import train as training
from fedbicross.engine.train import epoch_batches, split_validation
from fedbicross.errors import MethodError
from fedbicross.messages import Client
from fedbicross.seeds import numpy_rng
from small import Mortal, refuses, survive, tiny_clients, tiny_context

MIXED = {"client-1": "vgg8"}


def mixed_context(**settings: Any) -> Context:
    return replace(tiny_context(**settings), client_models=MIXED)


def test_clients_without_an_architecture_of_their_own_have_the_servers() -> None:
    ctx, (first, second) = mixed_context(), tiny_clients(2)
    assert (ctx.model_of(first), ctx.model_of(second)) == ("resnet8", "vgg8")
    assert ctx.task_of(first) == ctx.task
    assert ctx.task_of(second) == replace(ctx.task, model="vgg8")
    assert ctx.architecture == ("resnet8", 3, 3, 12)
    assert ctx.architecture_of(second) == ("vgg8", 3, 3, 12)


def test_each_client_trains_its_own_architecture_and_pays_for_it() -> None:
    ctx, (first, second) = mixed_context(epochs=1), tiny_clients(2)
    plain, other = ctx.local_model(first), ctx.local_model(second)
    assert (plain.architecture, other.architecture) == ("resnet8", "vgg8")
    for client, trained in ((first, plain), (second, other)):
        expected = models.build(*ctx.architecture_of(client)).state_dict()
        assert {name: value.shape for name, value in trained.state.items()} == {
            name: value.shape for name, value in expected.items()
        }
    images = 3 * plain.train_images + plain.val_images
    assert other.flops == models.forward_flops("vgg8", 3, 3, 12) * images
    assert ctx.record.flops == plain.flops + other.flops


def test_the_key_of_a_client_model_names_its_architecture_and_nobody_elses() -> None:
    first, second = tiny_clients(2)
    assert mixed_context().models.local_model_key(first) == tiny_context().models.local_model_key(first)
    assert mixed_context().models.local_model_key(second) != tiny_context().models.local_model_key(second)


def test_a_later_shot_has_streams_and_checkpoints_of_its_own() -> None:
    ctx = tiny_context()
    assert ctx.at_shot(1).rng("x").random() == ctx.rng("x").random()
    assert ctx.at_shot(2).rng("x").random() != ctx.rng("x").random()
    assert ctx.at_shot(3).at_shot(2).rng("x").random() == ctx.at_shot(2).rng("x").random()
    drawn = [torch.randn(3, generator=c.torch_rng("x")) for c in (ctx, ctx.at_shot(2), ctx.at_shot(3))]
    assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[1], drawn[2])
    ctx.at_shot(2).save_stage("s", {"w": torch.ones(1)}, {})
    assert ctx.load_stage("s") is None and ctx.at_shot(3).load_stage("s") is None
    assert ctx.at_shot(2).load_stage("s") is not None
    ctx.at_shot(3).drop_stage("s")
    assert ctx.at_shot(2).load_stage("s") is not None
    ctx.drop_stages()
    assert ctx.at_shot(2).load_stage("s") is None, "forgotten with the method's others"
    assert ctx.at_shot(2).record is ctx.record


PLAIN: dict[str, Any] = {"recipe": "paper", "lr": 0.05, "epochs": 3, "batch_size": 8, "validation": 0.2}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("epochs", [None, 2])
def test_retraining_is_the_recipe_from_the_given_weights(epochs: int | None) -> None:
    """Against SGD written out: its own batches, the first training's validation images, the whole schedule again."""
    ctx, (client, other) = tiny_context(**PLAIN, select="last"), tiny_clients(2)
    start = ctx.local_model(other).state
    state = ctx.models.retrain(client, start, visit="shot-2", epochs=epochs)
    model = models.build(*ctx.architecture)
    model.load_state_dict(start)
    model.train()
    count = epochs or 3
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    stream = ("training", client.name)
    rows, _ = split_validation(client.labels, None, 0.2, numpy_rng(0, *stream, "validation-split"))
    images = torch.from_numpy(client.images[rows]).permute(0, 3, 1, 2).float() / 127.5 - 1
    labels = torch.from_numpy(client.labels[rows])
    for epoch in range(count):
        for group in optimiser.param_groups:
            group["lr"] = 0.05 * (0.01 if epoch / count >= 0.75 else 0.1 if epoch / count >= 0.5 else 1)
        for chosen in epoch_batches(len(rows), 8, numpy_rng(0, *stream, "shot-2", f"epoch-{epoch}")):
            optimiser.zero_grad()
            F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimiser.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value)
    again = tiny_context(**PLAIN, select="last").models.retrain(client, start, visit="shot-3", epochs=epochs)
    assert not torch.equal(again["head.weight"], state["head.weight"]), "another visit has other batches"


def test_retraining_uploads_the_best_epoch_on_the_local_validation_images() -> None:
    client = tiny_clients(1, per_client=40)[0]
    kept = {}
    for select in ("best", "last"):
        ctx = tiny_context(**{**PLAIN, "lr": 2.0, "epochs": 4}, select=select)  # a rate that ends badly
        kept[select] = ctx.models.retrain(client, ctx.local_model(client).state, visit="shot-2")
    assert not torch.equal(kept["best"]["head.weight"], kept["last"]["head.weight"])


def test_retraining_killed_at_any_epoch_ends_with_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "SECONDS_BETWEEN_CHECKPOINTS", -1.0)
    client = tiny_clients(1)[0]
    start = tiny_context(**PLAIN).local_model(client).state
    whole = tiny_context(**PLAIN).models.retrain(client, start, visit="shot-2")

    store = Mortal()

    def work() -> dict[str, torch.Tensor]:
        ctx = tiny_context(**PLAIN)
        ctx.store = store
        return ctx.models.retrain(client, start, visit="shot-2")

    again = survive(store, 1, work)
    assert len(store.names) == 2, "a checkpoint after each epoch but the last"
    assert all(torch.equal(whole[name], value) for name, value in again.items())


def test_weights_of_another_architecture_are_refused_by_name() -> None:
    ctx, (first, second) = mixed_context(epochs=1), tiny_clients(2)
    with refuses(MethodError, "wrong_weights", "client-1 has a vgg8"):
        ctx.models.retrain(second, ctx.local_model(first).state, visit="shot-2")


def test_the_pooled_site_has_the_servers_architecture() -> None:
    pooled = Client("all-sites-pooled", np.zeros((2, 12, 12, 3), np.uint8), np.zeros(2, np.int64))
    assert mixed_context().model_of(pooled) == "resnet8"


def test_a_context_with_another_loss_shares_everything_else() -> None:
    ctx, client = tiny_context(), tiny_clients(1)[0]
    assert ctx.with_loss(None) is ctx and ctx.with_loss("cross_entropy") is ctx
    other = ctx.with_loss("balanced")
    assert other.training.balanced and not ctx.training.balanced
    assert other.store is ctx.store and other.record is ctx.record and other.seed == ctx.seed
    assert other.with_loss("balanced") is other
    assert other.models.local_model_key(client) != ctx.models.local_model_key(client)
    assert other.validation_rows(client).tolist() == ctx.validation_rows(client).tolist()


# --- time ---------------------------------------------------------------------------------------------


class Clock:
    """A time that passes only when told to."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (context, client_models):
        monkeypatch.setattr(module, "time", clock)
    return clock


def test_each_second_is_told_once_and_shared_work_is_left_out(clock: Clock) -> None:
    watch = Stopwatch()
    watch.begin("fuse", "server")
    clock.now += 5
    assert watch.lap() == 5
    clock.now += 7
    watch.shared_seconds += 3  # of the seven
    assert watch.lap() == 4
    assert watch.lap() == 0
    assert watch.at_work == ("fuse", "server")


@pytest.mark.parametrize("shot", [1, 2])
def test_checkpoints_of_a_shot_are_not_counted_again_at_the_end(clock: Clock, shot: int) -> None:
    """A shot works with a copy of the context; the time of its checkpoints was once told twice."""
    events: list[dict[str, Any]] = []
    ctx = tiny_context()
    ctx.event = lambda **fields: events.append(fields)
    with ctx.measured("fuse", "server"):
        copy = ctx.at_shot(shot)
        clock.now += 30
        copy.save_stage("distillation", {}, {"step": 1})
        clock.now += 12
    assert [(e["event"], e["seconds"]) for e in events] == [("partial", 30), ("fuse", 12)]
    assert ctx.stopwatch.at_work is None
    copy.save_stage("distillation", {}, {"step": 2})  # after the verb: nobody's time
    assert len(events) == 2


def test_checkpoints_of_shared_work_are_charged_as_shared_work_only(clock: Clock) -> None:
    events: list[dict[str, Any]] = []
    ctx = tiny_context()
    ctx.event = lambda **fields: events.append(fields)

    def make() -> bytes:
        clock.now += 25
        ctx.save_stage("generator", {}, {"epoch": 1})
        clock.now += 15
        return b"made"

    with ctx.measured("upload", "client-0"):
        clock.now += 2
        assert ctx.models.shared("generator", tiny_clients(1)[0], {}, make) == b"made"
        clock.now += 3
        ctx.save_stage("own", {}, {})
    assert [(e["event"], e["seconds"]) for e in events] == [("trained", 40), ("partial", 5), ("upload", 0)]
