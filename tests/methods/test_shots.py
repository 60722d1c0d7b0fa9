"""Several shots: the loop written out, killed and resumed, and what is refused before any work."""

from __future__ import annotations

from typing import Any

import pytest
import slow
import test_e_fedisca
import test_fedisca
import torch

from fedbicross import models
from fedbicross.context import Context, MemoryStore
from fedbicross.engine import train as training
from fedbicross.errors import ConfigError, MethodError
from fedbicross.federation import records, round_records, simulate
from fedbicross.messages import Predictor, Reply, Upload
from fedbicross.methods import create
from small import TINY_METHODS, Mortal, refuses, survive, tiny_clients, tiny_context

NAMES = ["fedisca", "e_fedisca"]
each = pytest.mark.parametrize("name", NAMES)
PLAIN = {"fedisca": test_fedisca.plain, "e_fedisca": test_e_fedisca.plain}


def shots(name: str, count: int = 2, **settings: Any) -> Any:
    return create(name, {name: {**TINY_METHODS[name], "lr": 0.2, "shots": count, **settings}})


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@each
@pytest.mark.parametrize("start", ["fresh", "last"])
def test_two_shots_equal_the_loop_written_out(name: str, start: str) -> None:
    """One shot; clients retrained from its student; the algorithm in plain torch on what they then have.

    The first shot and the retraining are the product's own, tested elsewhere.
    """
    clients, method = tiny_clients(2), shots(name, student_start=start, epochs_shot=1)
    found = simulate(method, clients, tiny_context())["client-0"].states[0]
    ctx = tiny_context()
    first = simulate(shots(name, 1), clients, ctx)["client-0"].states[0]
    uploads = [
        Upload(client.name, ctx.task, ctx.models.retrain(client, first, visit="shot-2", epochs=1)) for client in clients
    ]
    second = tiny_context().at_shot(2)
    if start == "last":
        model = models.build(*second.architecture)
        model.load_state_dict(first)
        second.new_model = lambda rng, name=None: model  # type: ignore[method-assign]
    expected = PLAIN[name](method.config, uploads, second)
    found = {key: found[key] for key in expected}  # a file sorts its tensors
    slow.assert_same_state(found, expected)
    with pytest.raises(AssertionError):  # the random streams of the first shot give another student
        slow.assert_same_state(found, PLAIN[name](method.config, uploads, tiny_context()))


@each
def test_one_shot_says_nothing_of_shots(name: str) -> None:
    """A one-shot run is byte for byte what it was before there were several."""
    ctx, client = tiny_context(), tiny_clients(1)[0]
    method = shots(name, 1)
    upload = method.upload(client, ctx)
    assert upload.extra == {} and method.rounds == 1
    assert method.fuse([upload], ctx)[0].info == {"architecture": "resnet8"}
    assert "times" not in method.upload_summary and "3 times; the server" in shots(name, 3).upload_summary


@pytest.mark.parametrize("name", ["fedisca", pytest.param("e_fedisca", marks=pytest.mark.slow)])
def test_the_first_of_several_shots_is_the_only_one_of_one(name: str) -> None:
    seen: list[Predictor] = []
    clients = tiny_clients(2)
    simulate(shots(name), clients, tiny_context(), lambda number, found: seen.append(found["client-0"]))
    alone = simulate(shots(name, 1), clients, tiny_context())["client-0"]
    assert seen[0].pack() == alone.pack() != seen[1].pack()


def run(method: Any, store: MemoryStore, shown: list[tuple[int, bytes]]) -> tuple[dict[str, bytes], Context]:
    ctx = tiny_context()
    ctx.store, ctx.seconds_between_stages = store, 0
    made = simulate(
        method,
        tiny_clients(2),
        ctx,
        lambda number, models: shown.append((number, models["client-0"].pack())),
    )
    return {name: predictor.pack() for name, predictor in made.items()}, ctx


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lives"), [("fedisca", 13), ("e_fedisca", 6)])
def test_killed_anywhere_three_shots_end_with_the_same_bytes(
    name: str, lives: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "SECONDS_BETWEEN_CHECKPOINTS", -1.0)
    method = shots(name, 3)
    rounds: list[tuple[int, bytes]] = []
    expected, ctx = run(method, MemoryStore(), rounds)
    assert [number for number, _ in rounds] == [1, 2, 3]
    store, again = Mortal(), list[tuple[int, bytes]]()
    found, resumed = survive(store, lives, lambda: run(method, store, again))
    assert found == expected
    assert sorted(set(again)) == rounds, "shown again after a kill, but never another model"
    names = ["client-0", "client-1"]
    assert records(resumed, names, 3) == records(ctx, names, 3)
    assert round_records(resumed, 3) == round_records(ctx, 3)


@pytest.mark.slow
@each
def test_costs_add_up_over_the_shots(name: str) -> None:
    clients, method = tiny_clients(2), shots(name, 3, epochs_shot=1)
    ctx = tiny_context()
    simulate(method, clients, ctx)
    first, second, third = round_records(ctx, 3)
    # Two local epochs at first, one in every later shot.
    assert first["client_flops"] == 2 * second["client_flops"] == 2 * third["client_flops"] > 0
    assert first["server_flops"] == second["server_flops"] > 0
    assert len(first["local_models"]) == 2 and second["local_models"] == []
    assert all(min(sizes) > 300_000 for record in (first, second, third) for sizes in record["bytes"].values())
    total = sum(record["flops"] for record in records(ctx, ["client-0", "client-1"], 3))
    assert total == sum(r["client_flops"] + r["server_flops"] for r in (first, second, third))


@pytest.mark.slow
@each
def test_only_what_a_later_shot_needs_is_kept(name: str) -> None:
    """The checkpoint of a synthesis may hold a gigabyte of images: thirty shots must not keep thirty."""
    ctx, method = tiny_context(), shots(name, 3)
    ctx.seconds_between_stages = 0
    client = tiny_clients(1)[0]
    reply = None
    for number in (1, 2, 3):
        reply = method.fuse([method.upload(client, ctx, reply)], ctx)[0]
        kept = {(n, s) for n in (1, 2, 3) for s in ("student", "distillation") if ctx.at_shot(n).load_stage(s)}
        assert (
            kept
            == {
                1: {(1, "student"), (1, "distillation")},
                2: {(1, "student"), (2, "student"), (2, "distillation")},
                3: {(2, "student"), (3, "distillation")},
            }[number]
        )


@each
def test_refusals(name: str) -> None:
    ctx, client, method = tiny_context(epochs=1), tiny_clients(1)[0], shots(name, 2)
    upload = method.upload(client, ctx)

    def refused(code: str, uploads: list[Upload], by: Any = method) -> None:
        with refuses(MethodError, code):
            by.fuse(uploads, ctx)

    def of(shot: Any) -> Upload:
        return Upload(upload.client, upload.task, upload.tensors, extra={"shot": shot})

    refused("wrong_shot", [of(1), of(2)])
    for wrong in (0, 3, -1, "2", None, [2], True, 2.0):
        refused("wrong_shot", [of(wrong)])
    refused("wrong_shot", [of(2)], shots(name, 1))
    refused("no_student", [of(2)])
    assert shots(name, 2, student_start="fresh").fuse([of(2)], ctx)[0].info["shot"] == 2
    with refuses(MethodError, "wrong_shot"):
        method.upload(client, ctx, Reply(upload.tensors, {"shot": "x"}))
    with pytest.raises(ConfigError, match=rf"method\.{name}\.shots"):
        shots(name, 0)
    with pytest.raises(ConfigError, match="epochs_shot"):
        shots(name, 2, epochs_shot=0)


def test_class_counts_are_sent_with_every_shot_where_they_are_needed() -> None:
    method = create("fedisca:class_weighted", {"fedisca": {**TINY_METHODS["fedisca"], "shots": 2}})
    ctx, client = tiny_context(epochs=1), tiny_clients(1)[0]
    first = method.upload(client, ctx)
    reply = method.fuse([first], ctx)[0]
    second = method.upload(client, ctx, reply)
    assert first.class_counts == second.class_counts == client.class_counts(3)
    assert not torch.equal(first.tensors["head.weight"], second.tensors["head.weight"])
