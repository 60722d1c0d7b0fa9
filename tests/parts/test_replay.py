from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fedbicross.messages import Upload
from fedbicross.methods import create
from fedbicross.parts.replay import Replay
from fedbicross.parts.teachers import send_network
from small import TINY_METHODS, tiny_clients, tiny_context


@pytest.fixture(scope="module")
def uploads() -> list[Upload]:
    ctx = tiny_context()
    return [send_network(client, ctx) for client in tiny_clients(3)]


def replay(uploads: Sequence[Upload], **settings: Any) -> Replay:
    config = create("dense", {"dense": {**TINY_METHODS["dense"], "epochs": 2, "steps": 2, **settings}}).config
    return Replay("dense", config, uploads, tiny_context())


@pytest.mark.parametrize("reset", [False, True])
def test_a_generator_lives_on_or_starts_anew_with_new_latents_either_way(reset: bool, uploads: list[Upload]) -> None:
    server = replay(uploads, reset=reset, epochs=3)
    weights, latents, counts = [], [], []
    for _ in server.epochs():
        weights.append(server.generator.params["end.weight"].detach().clone())
        latents.append(server.generator.latent.clone())
        counts.append(float(server.generator.count))
        for _ in server.synthesis():
            server.generate(lambda x: [x.square().mean()], ["generator"])
        after = server.generator.params["end.weight"].detach().clone()
        server.store()
        for batch in server.distillation():
            server.teach(batch["images"], torch.full((12, 3), 1 / 3))
        weights.append(after)
    assert torch.equal(weights[2], weights[1]) != reset, "the second epoch starts where the first ended, or not"
    assert counts == ([0, 0, 0] if reset else [0, 2, 4])
    assert not torch.equal(latents[0], latents[1]) and not torch.equal(latents[1], latents[2])


@pytest.mark.parametrize(("capacity", "expected"), [(200, [1, 2, 3]), (2, [1, 2, 2]), (1, [1, 1, 1])])
def test_an_epoch_is_one_pass_over_a_bounded_pool(capacity: int, expected: list[int], uploads: list[Upload]) -> None:
    server = replay(uploads, pool=capacity, epochs=3)
    passes = []
    for epoch in server.epochs():
        for _ in server.synthesis():
            server.generate(lambda x: [x.square().mean()], ["generator"])
        assert server.store(number=lambda x, epoch=epoch: torch.full((12,), epoch) * 12 + torch.arange(12))
        assert not server.store(), "once an epoch"
        seen = []
        for batch in server.distillation():
            seen += batch["number"].tolist()
            assert batch["images"].shape == (12, 3, 12, 12) and batch["images"].abs().max() <= 1
            server.teach(batch["images"], torch.full((12, 3), 1 / 3))
        oldest = max(0, epoch + 1 - capacity)
        assert sorted(seen) == list(range(12 * oldest, 12 * (epoch + 1))), "every image once"
        assert seen != sorted(seen), "in random order"
        passes.append(len(seen) // 12)
    assert passes == expected and server.learning == sum(expected)


def test_a_fixed_number_of_student_steps(uploads: list[Upload]) -> None:
    server = replay(uploads, steps_distil=5, epochs=2)
    for _ in server.epochs():
        list(server.synthesis())
        server.store()
        assert len(list(server.distillation())) == 5
    assert server.learning == 10


def test_the_best_images_are_kept_where_asked(uploads: list[Upload]) -> None:
    """A loss that gets worse with every step: the first images are the best."""
    for keep in ("best", "last"):
        server, losses = replay(uploads, keep=keep, steps=4, epochs=1, lr_generator=0.05, storage="fp32"), []
        for _ in server.epochs():
            first = server.generator.images().detach()

            def worse(x: torch.Tensor, losses: list[float] = losses) -> list[torch.Tensor]:
                losses.append(0.0)
                return [x.mean() * 0.1 + len(losses)]

            for _ in server.synthesis():
                server.generate(worse, ["generator"])
            server.store()
            kept = server.pool.batch(0)["images"]
            assert torch.equal(kept, first) == (keep == "best")
            if keep == "last":
                assert torch.equal(kept, server.generator.images().detach())
            list(server.distillation())
