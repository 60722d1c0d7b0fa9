from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedbicross.context import Context
from fedbicross.engine.ensemble import Ensemble
from fedbicross.errors import MethodError
from fedbicross.messages import Client, Upload
from fedbicross.methods import create
from fedbicross.parts import teachers
from fedbicross.parts.teachers import inversion_settings, load_teacher, send_network
from fedbicross.steps.head_counts import counts_from_head
from small import TINY_METHODS, refuses, tiny_clients, tiny_context


def load(uploads: list[Upload], ctx: Context) -> Ensemble:
    return teachers.load_ensemble(uploads, ctx, batch=8, at_once=None, passes={}, batchnorm_for="primum")


@pytest.fixture(scope="module")
def uploads() -> list[Upload]:
    ctx = tiny_context()
    return [create("primum").upload(client, ctx) for client in tiny_clients(3)]


def test_networks_are_loaded_frozen_and_in_order(uploads: list[Upload]) -> None:
    ensemble = load(uploads, tiny_context())
    assert len(ensemble) == 3 and ensemble.has_batchnorm == [True] * 3
    x = torch.zeros(2, 3, 12, 12)
    alone = [load([upload], tiny_context()).logits(x)[0] for upload in uploads]
    assert torch.equal(ensemble.logits(x), torch.stack(alone))


def test_counts_as_sent_and_ones_where_none_were(uploads: list[Upload]) -> None:
    sent = teachers.class_counts(uploads, 3)
    assert sent.tolist() == [client.class_counts(3) for client in tiny_clients(3)] and sent.dtype == torch.float64
    secret = [uploads[0], replace(uploads[1], class_counts=None)]
    assert teachers.class_counts(secret, 3)[1].tolist() == [1, 1, 1]


def test_class_weights_by_counts_by_contrast_and_by_its_root() -> None:
    counts = torch.tensor([[90, 10, 0], [10, 10, 0]], dtype=torch.float64)
    plain, contrast = teachers.class_weights(counts, "counts"), teachers.class_weights(counts, "contrast")
    assert plain.dtype == contrast.dtype == torch.float32
    assert plain.tolist() == [[pytest.approx(0.9), 0.5, 0], [pytest.approx(0.1), 0.5, 0]]
    assert contrast.tolist() == [[0.5, 0.5, 0], [0.5, 0.5, 0]]
    uneven = torch.tensor([[90, 160, 0], [10, 10, 0]], dtype=torch.float64)  # contrast 90, 90 and 10, 10
    expected = torch.tensor([[0.75, 0.75, 0], [0.25, 0.25, 0]])
    torch.testing.assert_close(teachers.class_weights(uneven, "root"), expected)


def test_a_student_starts_from_the_network_that_could_tell_most_images_from_others() -> None:
    ctx = tiny_context()
    uploads = [send_network(client, ctx) for client in tiny_clients(3)]
    counts = torch.tensor([[900, 1, 0], [40, 50, 0], [5, 5, 5]], dtype=torch.float64)
    assert teachers.best_start(uploads, counts, "resnet8") == uploads[1].tensors
    other = [uploads[0], replace(uploads[1], task=replace(uploads[1].task, model="wrn16_2")), uploads[2]]
    assert teachers.best_start(other, counts, "resnet8") == uploads[2].tensors
    assert teachers.best_start(uploads, counts, "vgg8") is None


def test_counts_that_are_all_zero_are_refused() -> None:
    with refuses(MethodError, "no_class_counts"):
        teachers.class_weights(torch.zeros(2, 3), "contrast")


def test_class_weighted_teachers_trust_those_who_saw_the_class() -> None:
    config, ctx = create("fedisca:class_weighted", TINY_METHODS).config, tiny_context()
    uploads = [send_network(client, ctx, class_counts=True) for client in tiny_clients(2)]
    loud = [replace(uploads[0], class_counts=[1, 0, 0]), replace(uploads[1], class_counts=[0, 1, 1])]
    teacher = load_teacher(config, "fedisca", loud, ctx)
    x = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    parts = (teacher.ensemble.logits(x) / config.temperature).softmax(-1)
    expected = torch.stack([parts[0, :, 0], parts[1, :, 1], parts[1, :, 2]], dim=1)
    torch.testing.assert_close(teacher.original(x), expected / expected.sum(1, keepdim=True))


@pytest.mark.parametrize(("size", "jitter"), [(28, 2), (128, 2), (129, 30), (224, 30)])
def test_jitter_grows_with_the_image(size: int, jitter: int) -> None:
    def shift(size: int, **settings: int) -> int:
        return inversion_settings(create("fedisca", {"fedisca": settings}).config, size).jitter

    assert shift(size) == jitter
    assert shift(size, jitter=5) == 5
    assert shift(28, jitter=99) == 27, "a full turn is no shift"


# --- clients that keep their class counts to themselves ---------------------------------------------------


def lacking(seed: int) -> Client:
    """A client without class 0 or class 1."""
    client = tiny_clients(2)[seed]
    return replace(client, labels=np.where(client.labels == seed, 2, client.labels))


@pytest.mark.slow
@pytest.mark.parametrize("training", [{}, {"init": "independent"}, {"init_scheme": "he"}, {"lr": 1e-3, "epochs": 1}])
@pytest.mark.parametrize("model", ["resnet8", "vgg8"])
def test_class_counts_are_read_off_the_networks(model: str, training: dict[str, Any]) -> None:
    ctx, clients = tiny_context(model=model, **training), [lacking(0), lacking(1), tiny_clients(3)[2]]
    sent = [create("primum:no_counts").upload(client, ctx) for client in clients]
    assert all(upload.class_counts is None for upload in sent)
    counts = [[int((client.labels == c).sum()) for c in range(3)] for client in clients]
    found = teachers.read_counts(sent, ctx)
    assert (found > 0).tolist() == [[n > 0 for n in row] for row in counts]
    for upload, row in zip(sent, found, strict=True):
        first = ctx.models.first_model(upload.client, model).state_dict()["head.weight"]
        assert torch.equal(row, counts_from_head(upload.tensors["head.weight"], first))


def test_the_first_weights_are_those_that_training_begins_with() -> None:
    """A training whose rate is next to nothing ends where it began."""
    for init in ("shared", "independent"):
        ctx, client = tiny_context(init=init, lr=1e-30, epochs=1), tiny_clients(2)[1]
        first = ctx.models.first_model("client-1", "resnet8").state_dict()["head.weight"]
        assert torch.equal(ctx.local_model(client).state["head.weight"], first)


def test_a_network_that_learnt_nothing_has_a_say_only_where_nobody_else_has() -> None:
    ctx = tiny_context()
    one = replace(tiny_clients(1)[0], name="one", labels=np.zeros(24, np.int64))  # one class: a loss of zero
    sent = [create("primum:no_counts").upload(client, ctx) for client in (one, lacking(1))]
    found = teachers.read_counts(sent, ctx)
    assert found[0].tolist() == [teachers.LEARNT_NOTHING] * 3 and found[1, 1] == 0
    weights = teachers.class_weights(found, "counts")
    assert weights[0, 1] == 1 and weights[0, 0] < 0.01 and weights[0, 2] < 0.01
