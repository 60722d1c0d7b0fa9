from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedbicross.errors import UploadError
from fedbicross.messages import Upload
from fedbicross.methods import create
from fedbicross.parts import probes
from small import refuses, tiny_clients, tiny_context


@pytest.fixture(scope="module")
def upload() -> Upload:
    return create("ensemble").upload(tiny_clients(1)[0], tiny_context())


def test_probes_are_images_of_two_kinds_and_always_the_same() -> None:
    first = probes.images(3, 12)
    assert first.shape == (probes.COUNT, 3, 12, 12) and float(first.abs().max()) <= 1
    probes.images.cache_clear()
    assert torch.equal(probes.images(3, 12), first)
    rough = (first[..., 1:] - first[..., :-1]).square().mean((1, 2, 3)) / first.var((1, 2, 3))
    assert float(rough[: probes.COUNT // 2].min()) > float(rough[probes.COUNT // 2 :].median())


def test_answers_are_those_of_the_network(upload: Upload) -> None:
    ctx = tiny_context()
    network = ctx.new_model(torch.Generator())
    network.load_state_dict(dict(upload.tensors))
    with torch.no_grad():
        expected = network.eval()(probes.images(3, 12))
    found = probes.answers(upload)
    assert found is not None and torch.equal(found, expected)
    beside = replace(upload, tensors={**upload.tensors, "pacfl.signature": torch.ones(3, 3)})
    again = probes.answers(beside)
    assert again is not None and torch.equal(again, expected)


def test_answers_by_batch_do_not_depend_on_stored_statistics(upload: Upload) -> None:
    expected = probes.answers_by_batch(upload, 32)
    other = {n: v * 100 if n.endswith(("running_mean", "running_var")) else v for n, v in upload.tensors.items()}
    found = probes.answers_by_batch(replace(upload, tensors=other), 32)
    assert expected is not None and found is not None and torch.equal(found, expected)
    usual, changed = probes.answers(upload), probes.answers(replace(upload, tensors=other))
    assert usual is not None and changed is not None and not torch.allclose(usual, changed)
    assert probes.answers_by_batch(replace(upload, tensors={}), 32) is None


def test_what_is_no_network_is_not_asked(upload: Upload) -> None:
    trunk = {name: value for name, value in upload.tensors.items() if not name.startswith("head.")}
    assert probes.answers(replace(upload, tensors=trunk)) is None
    assert probes.answers(replace(upload, tensors={})) is None
    probes.check(replace(upload, tensors=trunk))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2e6])
def test_answers_that_are_no_use_are_refused(value: float) -> None:
    probes.check_answers("a", torch.zeros(3, 2))
    with refuses(UploadError, "answers", "'a' sent weights"):
        probes.check_answers("a", torch.zeros(3, 2), torch.tensor([[0.0, value]]))
