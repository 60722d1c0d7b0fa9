from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedbicross.methods import create
from fedbicross.parts.teachers import inversion_settings, load_teacher, send_network
from small import TINY_METHODS, tiny_clients, tiny_context


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
