from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from benchmarks import poison
from fedbicross import pipeline
from fedbicross.messages import Upload
from fedbicross.methods import create
from small import tiny_clients, tiny_context


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


# --- what the stored table must show ---------------------------------------------------------------------------------

STORED = json.loads((poison.ROOT / "results" / "benchmarks" / "poison.json").read_text(encoding="utf-8"))
ALLOWED = {("back door", "fedbicross:k2"), ("back door", "primum")}  # not found: docs/how-to/threat-model.md


@pytest.mark.parametrize("method", poison.METHODS)
def test_under_every_attack_honest_sites_lose_little_or_the_sender_is_named(method: str) -> None:
    rows = {row["attack"]: row for row in STORED["attacks"] if row["method"] == method and row["defended"]}
    assert tuple(rows) == poison.ATTACKS
    for name, row in rows.items():
        assert not [note for note in row["notes"] if not note["attacker"]], "nobody honest is named"
        if not any(note["left_out"] for note in row["notes"]) and (name, method) not in ALLOWED | {
            ("left out", method)
        }:
            assert row["accuracy"] >= rows["honest"]["accuracy"] - 0.03, name


def test_under_every_attack_personal_models_are_no_worse_than_training_alone() -> None:
    rows = [row for row in STORED["attacks"] if row["method"] == "primum"]
    assert sorted((row["attack"], row["defended"]) for row in rows) == sorted(
        (name, defended) for name in poison.ATTACKS for defended in (False, True)
    )
    assert all(row["personal"] >= row["alone"] - 0.01 for row in rows)


def test_nobody_honest_is_left_out_in_federations_that_chose_no_limit() -> None:
    fresh = STORED["fresh"]
    assert len(fresh) == 20 and len({(row["partition"], row["seed"]) for row in fresh}) == 20
    chosen_by = {(row["partition"], row["seed"]) for row in STORED["honest"]}
    assert not chosen_by & {(row["partition"], row["seed"]) for row in [*fresh, *STORED["hostile"]]}
    each = [row[spec] for row in fresh for spec in poison.LOOKED_AT]
    assert sum(one["left_out"] for one in each) == 0 and max(one["lost"] for one in each) <= 0.005
