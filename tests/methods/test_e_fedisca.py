"""E-FedISCA against its algorithm written out in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import slow
import torch
from torch import Tensor

from fedbicross.context import Context
from fedbicross.messages import Upload
from fedbicross.methods import create
from fedbicross.methods.e_fedisca import DistillationBatches, MixupBatches
from fedbicross.steps.noise import structured_noise
from fedbicross.steps.trajectory import Teacher
from small import TINY_METHODS, tiny_context

SETTINGS = {**TINY_METHODS["e_fedisca"], "lr": 0.2}


def kept(images: list[Tensor], losses: list[float], config: Any) -> list[Tensor]:
    """The latest batches with a low loss; where these are too few, the latest others before them."""
    low = [i for i, loss in enumerate(losses) if loss < config.threshold][-config.memory :]
    high = [i for i, loss in enumerate(losses) if loss >= config.threshold]
    missing = config.memory - len(low)
    return [images[i] for i in [*(high[-missing:] if missing else []), *low]]


def plain(config: Any, uploads: list[Upload], ctx: Context) -> dict[str, Tensor]:
    """Algorithm 2 with loops."""
    clients = slow.networks(uploads, ctx)
    memory = kept(*slow.synthesise(clients, config, ctx, 0, 0), config) if config.synthesis else [None]
    shape = (config.noise_images, 3, 12, 12)
    noise = structured_noise(config.noise, shape, ctx.torch_rng("structured-noise", "0"))
    pupil, total, adapted = slow.Pupil(config, ctx), config.epochs * config.steps_distil, clients
    for epoch in range(config.epochs):
        draws = {}
        for use in ("adaptation", "distillation"):
            rng = ctx.torch_rng("mixing", use, f"epoch-{epoch}")
            which = torch.randint(len(memory), (config.steps_distil, 1), generator=rng)
            draws[use] = (
                which,
                torch.randint(len(noise) if config.mixing else 1, (config.steps_distil, 12), generator=rng),
            )

        def mixture(use: str, s: int, lam: float, draws: dict[str, tuple[Tensor, Tensor]] = draws) -> Tensor:
            image, texture = memory[draws[use][0][s - 1].item()], noise[draws[use][1][s - 1]]
            if image is None:
                return texture
            return lam * texture + (1 - lam) * image if config.mixing else image

        rounds, every = range(1, config.steps_distil + 1), config.steps_distil
        if config.adaptation == "ema":
            rising = [mixture("adaptation", s, s / every) for s in rounds]
            adapted = slow.by_moving_average(clients, rising, config.momentum_adaptation, start=adapted)
        teachers = adapted if config.adaptation == "ema" else slow.in_train_mode(clients)
        for s in rounds:
            lam = 1 - s / every
            x = mixture("distillation", s, lam)
            lam = 0.0 if config.adaptation == "none" else lam
            answer = pupil.network(x)
            loss = lam * slow.divergence(slow.mean_logits(teachers, x), answer, config.temperature)
            loss = loss + (1 - lam) * slow.divergence(slow.mean_logits(clients, x), answer, config.temperature)
            pupil.step(loss, slow.rate(config, epoch * every + s - 1, total))
    return pupil.network.state_dict()


SPECS = ["", ":ema", ":synthesis_only", ":noise_only", ":no_adaptation", ":no_synthesis"]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("variant", [SPECS[0], *(pytest.param(spec, marks=pytest.mark.slow) for spec in SPECS[1:])])
def test_equals_the_algorithm_in_plain_torch(variant: str, uploads: list[Upload]) -> None:
    method = create(f"e_fedisca{variant}", {"e_fedisca": SETTINGS})
    found = slow.assert_fuses_as(plain, method, uploads)
    if not variant:
        other = create("e_fedisca", {"e_fedisca": {**SETTINGS, "epochs": 3}})
        with pytest.raises(AssertionError):  # the comparison is fine enough to notice
            slow.assert_same_state(found, plain(other.config, uploads, tiny_context()))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("threshold", [1e-3, 1e9])
def test_memory_counts_batches_below_the_threshold(threshold: float, uploads: list[Upload]) -> None:
    method = create("e_fedisca", {"e_fedisca": {**SETTINGS, "threshold": threshold}})
    ctx = tiny_context()
    reply = method.fuse(uploads, ctx)[0]
    said = ctx.record.diagnosis["scalars"][f"stored batches with a loss below {threshold:g}"]
    assert said == ("0 of 2" if threshold < 1 else "2 of 2")
    slow.assert_same_state(reply.tensors, plain(method.config, uploads, tiny_context()))


@pytest.mark.usefixtures("float64")
def test_a_memory_in_which_only_some_qualify(uploads: list[Upload]) -> None:
    method = create("e_fedisca", {"e_fedisca": {**SETTINGS, "steps": 6, "memory": 4}})
    ctx = tiny_context()
    _, losses = slow.synthesise(slow.networks(uploads, ctx), method.config, ctx, 0, 0)
    assert losses[-1] < losses[0]
    threshold = (losses[-1] + losses[-2]) / 2
    method = create("e_fedisca", {"e_fedisca": {**SETTINGS, "steps": 6, "memory": 4, "threshold": threshold}})
    reply = method.fuse(uploads, ctx)[0]
    below = sum(loss < threshold for loss in losses)
    assert ctx.record.diagnosis["scalars"][f"stored batches with a loss below {threshold:g}"] == f"{below} of 4"
    assert 0 < below < 4
    slow.assert_same_state(reply.tensors, plain(method.config, uploads, tiny_context()))


def test_mixtures_are_equation_9_and_drawn_afresh_every_epoch() -> None:
    ctx, config = tiny_context(), create("e_fedisca", {"e_fedisca": SETTINGS}).config
    stored = torch.arange(2.0).view(2, 1, 1, 1, 1).expand(2, 12, 3, 12, 12)
    noise = torch.full((20, 3, 12, 12), 5.0) + torch.arange(20.0).view(20, 1, 1, 1)
    mixtures = MixupBatches(0, stored, noise, config, ctx)
    for use in ("adaptation", "distillation"):
        for s in mixtures.steps:
            image, texture = mixtures.at(s, 0.0, use), mixtures.at(s, 1.0, use)
            assert image.unique().numel() == 1, "one stored batch for the whole mixture"
            assert texture.flatten(1).unique(dim=1).shape[1] == 1, "each image has its own noise image"
            assert (texture[:, 0, 0, 0] >= 5).all()
            torch.testing.assert_close(mixtures.at(s, 0.25, use), 0.25 * texture + 0.75 * image)
    assert torch.equal(
        mixtures.at(2, 1.0, "adaptation"), MixupBatches(0, stored, noise, config, ctx).at(2, 1.0, "adaptation")
    )
    assert not torch.equal(mixtures.at(2, 1.0, "adaptation"), mixtures.at(2, 1.0, "distillation"))
    assert not torch.equal(
        mixtures.at(2, 1.0, "adaptation"), MixupBatches(1, stored, noise, config, ctx).at(2, 1.0, "adaptation")
    )


@pytest.mark.parametrize("done", [0, 3, 4, 6])
def test_lessons_go_on_in_the_groups_that_were_begun(done: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Teachers are asked for four steps at once; which four may not depend on where a run was stopped."""
    ctx, config = tiny_context(), create("e_fedisca", {"e_fedisca": {**SETTINGS, "steps_distil": 7}}).config
    noise = torch.randn(20, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    groups: list[list[float]] = []

    def answer(self: Teacher, batches: list[torch.Tensor], lams: list[float]) -> list[tuple[int, int, float]]:
        groups.append(lams)
        return [(0, 0, lam) for lam in lams]

    monkeypatch.setattr(Teacher, "soft_labels_of_batches", answer)
    teacher = object.__new__(Teacher)
    seen = list(DistillationBatches(MixupBatches(0, None, noise, config, ctx), teacher, None, done))
    assert [sample.t for sample in seen] == list(range(done + 1, 8))
    assert [sample.lam for sample in seen] == [1 - t / 7 for t in range(done + 1, 8)]
    whole = [[1 - t / 7 for t in (1, 2, 3, 4)], [1 - t / 7 for t in (5, 6, 7)]]
    assert groups == (whole if done < 4 else whole[1:])


def test_mixtures_without_noise_or_without_images() -> None:
    ctx, config = tiny_context(), create("e_fedisca", {"e_fedisca": SETTINGS}).config
    stored, noise = torch.zeros(2, 12, 3, 12, 12), torch.ones(20, 3, 12, 12)
    assert (MixupBatches(0, stored, None, config, ctx).at(1, 0.9, "distillation") == 0).all()
    assert (MixupBatches(0, None, noise, config, ctx).at(1, 0.1, "distillation") == 1).all()


@pytest.mark.parametrize("kind", ["oriented", "pink", "dead_leaves"])
def test_every_kind_of_noise_runs(kind: str, uploads: list[Upload]) -> None:
    settings = {**SETTINGS, "noise": kind, "epochs": 1, "synthesis": False}
    reply = create("e_fedisca", {"e_fedisca": settings}).fuse(uploads, tiny_context())[0]
    assert all(torch.isfinite(value).all() for value in reply.tensors.values())


def test_large_pools_of_noise_are_made_in_pieces() -> None:
    ctx = tiny_context()
    pool = create("e_fedisca", {"e_fedisca": {"noise": "pink", "noise_images": 1001}})._noise(ctx)
    assert pool.shape == (1001, 3, 12, 12)
    piece = structured_noise("pink", (1, 3, 12, 12), ctx.torch_rng("structured-noise", "1000"))
    assert torch.equal(pool[1000:], piece)
