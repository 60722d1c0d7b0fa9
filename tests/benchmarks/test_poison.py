from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import poison
from fedbicross import pipeline
from fedbicross.context import MemoryStore
from fedbicross.messages import Upload
from fedbicross.methods import create
from small import TINY_METHODS, tiny_clients, tiny_context

TINY: dict[str, Any] = {
    **poison.ATTACKED,
    "data": {"name": "cells", "image_size": 16, "train_size": 300, "test_size": 100},
    "training": {"recipe": "modern", "epochs": 8, "batch_size": 8, "select": "best"},
}
STORE = MemoryStore()  # of the clients' networks


@pytest.mark.parametrize("name", [name for name in poison.ATTACKS if name not in ("honest", "left out")])
def test_every_attack_passes_the_door(name: str) -> None:
    """What the door refuses would be no attack."""
    method, ctx, client = create("ensemble:class_weighted"), tiny_context(epochs=1), tiny_clients(1)[0]
    honest, sent = method.upload(client, ctx), poison.attack(name, method, client, ctx)
    pipeline.check_upload(method, sent, ctx.task)
    same = all(torch.equal(value, honest.tensors[key]) for key, value in sent.tensors.items())
    assert not same or sent.class_counts != honest.class_counts


def test_a_head_that_is_only_louder_gives_the_same_answers() -> None:
    upload = create("ensemble").upload(tiny_clients(1)[0], tiny_context(epochs=1))
    louder = poison.scaled_head(upload, 20.0)
    assert torch.equal(louder.tensors["head.weight"], 20 * upload.tensors["head.weight"])
    assert torch.equal(louder.tensors["head.bias"], 20 * upload.tensors["head.bias"])
    assert all(louder.tensors[name] is value for name, value in upload.tensors.items() if not name.startswith("head."))


def test_a_claim_keeps_counts_and_sizes_possible() -> None:
    task = tiny_context().task
    claimed = poison.claiming(Upload("a", task, class_counts=[1, 2, 3], num_samples=6))
    assert claimed.class_counts == [10**8] * 3 and claimed.num_samples == 8 * 10**8
    assert poison.claiming(Upload("a", task)).class_counts is None


def test_a_back_door_marks_copies_and_leaves_the_images_alone() -> None:
    client = tiny_clients(1, per_client=20)[0]
    marked = poison.back_door(client)
    assert np.array_equal(marked.images[:20], client.images) and np.array_equal(marked.labels[:20], client.labels)
    assert set(marked.labels[20:]) == {poison.TARGET} and len(marked.labels) == 40
    assert (marked.images[20:, : poison.PATCH, : poison.PATCH] == 255).all()
    assert np.array_equal(marked.images[20:, poison.PATCH :], client.images[:, poison.PATCH :])


# --- what comes of it -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fed() -> poison.Federation:
    return poison.federation(TINY, STORE)


@pytest.mark.slow
def test_what_an_attack_does_and_what_the_defence_makes_of_it(fed: poison.Federation) -> None:
    """A network that says one class costs all but that class, and behind the defence what its absence costs."""
    fusions = poison.Fusions(fed)
    cases = [("honest", True), ("left out", True), ("bias 1e4 to one class", True), ("bias 1e4 to one class", False)]
    honest, without, defended, trusting = (poison.outcome(name, "ensemble", fed, way, fusions) for name, way in cases)
    assert honest["notes"] == without["notes"] == trusting["notes"] == [] and not trusting["refused"]
    assert [(note["attacker"], note["left_out"]) for note in defended["notes"]] == [(True, True)]
    found = [(row["accuracy"], row["opened"]) for row in (honest, without, defended, trusting)]
    assert found[0] != found[1] == found[2]
    assert found[3] == ((fed.test_labels == poison.TARGET).mean(), 1)


@pytest.mark.slow
@pytest.mark.parametrize("spec", poison.BEHIND_A_GATE)
def test_personal_models_are_measured_on_each_honest_sites_own_images(
    spec: str, fed: poison.Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poison, "SETTINGS", {"primum": TINY_METHODS["primum"]})
    row = poison.personal("logits x100", spec, fed, True, poison.Fusions(fed))
    method = create(spec, poison.SETTINGS)
    uploads = [method.upload(client, fed.ctx) for client in fed.clients]
    uploads[poison.ATTACKER] = poison.attack("logits x100", method, fed.clients[poison.ATTACKER], fed.ctx)
    replies = pipeline.fuse(method, uploads, replace(fed.ctx, store=MemoryStore()), "again")
    marked = poison.with_trigger(fed.test_images[fed.test_labels != poison.TARGET])
    honest = [number for number in range(len(fed.clients)) if number != poison.ATTACKER]
    for number, site in zip(honest, row["sites"], strict=True):
        client, own = fed.clients[number], fed.owner == number
        ours = pipeline.personalize(method, client, replies[number], fed.ctx, f"again/{number}")
        models = ours, method.alone(client, fed.ctx)
        said = [m.probabilities(fed.test_images[own]) for m in models]
        doors = [np.mean(m.probabilities(marked).argmax(1) == poison.TARGET) for m in models]
        assert [site["personal_opened"], site["alone_opened"]] == pytest.approx(doors) and site["images"] == own.sum()
        if own.any():
            right = [np.mean(answers.argmax(1) == fed.test_labels[own]) for answers in said]
            assert [site["personal"], site["alone"]] == pytest.approx(right)
            assert site["let_in"] == bool((said[0] != said[1]).any())


@pytest.mark.slow
def test_members_that_attack_are_counted_apart_from_honest_ones() -> None:
    rows = poison.hostile("tiny", TINY, (1, 2), STORE)
    found = {row["hostile"]: row["fedavg"] for row in rows if row["attack"] == "logits x100"}
    assert found == {count: {"found": count, "wronged": 0} for count in (1, 2)}


def test_limits_are_tried_on_other_federations_than_they_were_chosen_on() -> None:
    chosen_on = [one for several in poison.HONEST.values() for one in several]
    tried_on = [*poison.FRESH.values(), *(several for several, _ in poison.HOSTILE.values())]
    assert not [one for several in tried_on for one in several if one in chosen_on]
