"""FedISCA against its algorithm written out in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import slow
import torch

from fedbicross.context import Context
from fedbicross.messages import Upload
from fedbicross.methods import create
from small import TINY_METHODS, first_in_check, tiny_clients, tiny_context

CASES = [
    ("fedisca", {"epochs": 1}),
    ("fedisca", {"memory": 10, "replays": 2}),
    ("fedisca", {"bn_reduction": "sum", "noise_level": "released", "temperature": 10.0}),
    ("fedisca:ema", {"epochs": 1, "momentum_adaptation": 0.5}),
    ("fedisca:no_adaptation", {"ce": "mean_ce", "schedule": "cosine"}),
]


def small_method(spec: str, settings: dict) -> Any:
    return create(spec, {"fedisca": {**TINY_METHODS["fedisca"], "lr": 0.2, **settings}})


def plain(config, uploads: list[Upload], ctx: Context) -> dict[str, torch.Tensor]:
    """Algorithm 1 with loops."""
    clients = slow.networks(uploads, ctx)
    pupil, total = slow.Pupil(config, ctx), config.epochs * config.steps
    kept: list[tuple[torch.Tensor, float]] = []  # of the memory, which is large enough for all
    for epoch in range(config.epochs):
        images, _ = slow.synthesise(clients, config, ctx, 0, epoch)
        adapted = (
            slow.by_moving_average(clients, images[::-1], config.momentum_adaptation)
            if config.adaptation == "ema"
            else slow.in_train_mode(clients)
        )
        for t, x in enumerate(images, start=1):
            noise = 1 - t / config.steps if config.noise_level == "paper" else 1 - (t - 1) / config.steps
            if config.adaptation == "none":
                noise = 0.0
            rng = ctx.rng("memory", f"sample-{epoch * config.steps + t - 1}")
            again = [kept[int(rng.integers(len(kept)))] for _ in range(config.replays)] if kept else []
            for number, (seen, level) in enumerate([(x, noise), *again]):
                statistics = {name: value.clone() for name, value in pupil.network.named_buffers()}
                answer = pupil.network(seen)
                loss = level * slow.divergence(slow.mean_logits(adapted, seen), answer, config.temperature)
                loss = loss + (1 - level) * slow.divergence(slow.mean_logits(clients, seen), answer, config.temperature)
                pupil.step(loss, slow.rate(config, epoch * config.steps + t - 1, total))
                if number:  # what is learnt again moves no running statistics
                    pupil.network.load_state_dict(statistics, strict=False)
            if config.memory:
                kept.append((x, noise))
    return pupil.network.state_dict()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("spec", "settings"), first_in_check(CASES))
def test_equals_the_algorithm_in_plain_torch(spec: str, settings: dict, uploads: list[Upload]) -> None:
    slow.assert_fuses_as(plain, small_method(spec, settings), uploads)


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("spec", "other"),
    [("", {"adaptation": "ema"}), (":ema", {"momentum_adaptation": 0.9}), (":no_adaptation", {"temperature": 2.0})],
)
def test_the_comparison_is_fine_enough_to_tell_variants_apart(spec: str, other: dict, uploads: list[Upload]) -> None:
    one, two = (
        plain(small_method(f"fedisca{spec}", {"epochs": 1, "momentum_adaptation": 0.5, **more}).config, uploads, ctx)
        for more, ctx in (({}, tiny_context()), (other, tiny_context()))
    )
    with pytest.raises(AssertionError):
        slow.assert_same_state(one, two)


@pytest.mark.usefixtures("float64")
def test_ablation_without_synthesis_sees_standard_normal_noise_only(uploads: list[Upload]) -> None:
    method, ctx = create("fedisca:no_synthesis", TINY_METHODS), tiny_context()
    config, clients, pupil = method.config, slow.networks(uploads, ctx), slow.Pupil(method.config, ctx)
    adapted = slow.in_train_mode(clients)
    for epoch in range(2):
        for t in range(1, 4):
            x = torch.randn((12, 3, 12, 12), generator=ctx.torch_rng("noise", f"epoch-{epoch}", f"step-{t}"))
            answer = pupil.network(x)
            loss = (1 - t / 3) * slow.divergence(slow.mean_logits(adapted, x), answer, 20.0)
            loss = loss + t / 3 * slow.divergence(slow.mean_logits(clients, x), answer, 20.0)
            pupil.step(loss, slow.rate(config, epoch * 3 + t - 1, 6))
    slow.assert_same_state(method.fuse(uploads, tiny_context())[0].tensors, pupil.network.state_dict())


@pytest.mark.usefixtures("float64")
def test_ablation_without_noise_sees_finished_images_only(uploads: list[Upload]) -> None:
    method, ctx = create("fedisca:no_noise", TINY_METHODS), tiny_context()
    config, clients, pupil = method.config, slow.networks(uploads, ctx), slow.Pupil(method.config, ctx)
    pool = []
    for epoch in range(2):
        pool.append(slow.synthesise(clients, config, ctx, 0, epoch)[0][-1])
        for t, index in enumerate(ctx.rng("finished", f"epoch-{epoch}").integers(0, len(pool), 3)):
            loss = slow.divergence(slow.mean_logits(clients, pool[index]), pupil.network(pool[index]), 20.0)
            pupil.step(loss, slow.rate(config, epoch * 3 + t, 6))
    slow.assert_same_state(method.fuse(uploads, tiny_context())[0].tensors, pupil.network.state_dict())


def test_the_predictor_is_the_reply(uploads: list[Upload]) -> None:
    method, ctx = create("fedisca", TINY_METHODS), tiny_context()
    reply = method.fuse(uploads, ctx)[0]
    predictor = method.personalize(tiny_clients(1)[0], reply, ctx)
    assert predictor.architectures == ("resnet8",)
    assert all(torch.equal(predictor.states[0][name], value) for name, value in reply.tensors.items())
