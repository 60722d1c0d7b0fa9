from __future__ import annotations

import numpy as np
import pytest
import torch

from fedbicross.bundle import pack, unpack
from fedbicross.engine.ensemble import Ensemble
from fedbicross.steps.inversion import InversionSettings
from fedbicross.steps.sources import Batches, FinishedOnly, NoiseOnly, SampleMemory
from fedbicross.steps.trajectory import Sample, Teacher, Trajectory

from .tiny import Tiny, randomised

SETTINGS = InversionSettings(steps=4, batch=8, jitter=1)


def teacher(adaptation="batch"):
    return Teacher(Ensemble([randomised(Tiny(), seed=0).float()]), 3.0, adaptation=adaptation)


def trajectory(epoch):
    return Trajectory.start(teacher("none"), SETTINGS, (3, 6, 6), 4, torch.Generator().manual_seed(epoch))


def stream(step):
    return torch.Generator().manual_seed(100 + step)


def kept(source):
    return unpack(pack("stage", source.tensors(), {}), "stage")[0]


# --- noise only ------------------------------------------------------------------------------------------


def test_noise_is_fresh_standard_normal_with_the_levels_of_a_trajectory():
    samples = list(NoiseOnly(teacher(), (512, 3, 6, 6), 4, stream))
    assert [sample.lam for sample in samples] == pytest.approx([0.75, 0.5, 0.25, 0.0])
    for sample in samples:
        assert torch.equal(sample.images, torch.randn((512, 3, 6, 6), generator=stream(sample.t)))
        assert sample.images.mean().abs() < 0.02 and (sample.images.std() - 1).abs() < 0.02
        assert sample.loss is None
    assert not torch.equal(samples[0].images, samples[1].images)
    torch.testing.assert_close(samples[0].adapted, teacher().adapted(samples[0].images))
    torch.testing.assert_close(samples[0].original, teacher().original(samples[0].images))


@pytest.mark.parametrize("stop", [1, 3])
def test_stopped_noise_goes_on(stop):
    whole, first = list(NoiseOnly(teacher(), (8, 3, 6, 6), 4, stream)), NoiseOnly(teacher(), (8, 3, 6, 6), 4, stream)
    iterator = iter(first)
    for _ in range(stop):
        next(iterator)
    rest = list(NoiseOnly(teacher(), (8, 3, 6, 6), 4, stream, int(kept(first)["done"])))
    assert len(rest) == 4 - stop
    for sample, expected in zip(rest, whole[stop:], strict=True):
        assert sample.t == expected.t and torch.equal(sample.images, expected.images)


# --- finished images only --------------------------------------------------------------------------------


def finished(epoch):
    made = trajectory(epoch)
    for _ in range(4):
        made.inversion.step()
    return made.inversion.images


def order(epoch):
    return lambda size: [(epoch + step) % size for step in range(4)]


def test_every_sample_is_a_finished_batch_of_this_or_an_earlier_epoch():
    pool = Batches()
    for epoch in range(3):
        samples = list(FinishedOnly(trajectory(epoch), pool, order(epoch)))
        assert len(pool) == epoch + 1 and torch.equal(pool.images[-1], finished(epoch))
        for sample, index in zip(samples, order(epoch)(len(pool)), strict=True):
            assert torch.equal(sample.images, finished(index))
            assert sample.lam == 0 and sample.adapted is sample.original
            torch.testing.assert_close(sample.original, teacher().original(finished(index)))
        assert [sample.t for sample in samples] == [1, 2, 3, 4]


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_stopped_draws_go_on_with_the_same_pool(stop):
    pool, again = Batches(), Batches()
    pool.add(finished(0))
    first = FinishedOnly(trajectory(1), pool, order(1))
    iterator = iter(first)
    for _ in range(stop):
        next(iterator)
    tensors = kept(first)
    again.load(kept(pool))
    assert len(again) == 2 and all(torch.equal(again.images[i], finished(i)) for i in range(2))
    continued = FinishedOnly(
        Trajectory.from_tensors(teacher("none"), SETTINGS, tensors), again, order(1), int(tensors["drawn"])
    )
    rest = list(continued)
    assert [sample.t for sample in rest] == list(range(stop + 1, 5))
    for sample, index in zip(rest, order(1)(2)[stop:], strict=True):
        assert torch.equal(sample.images, finished(index))
    assert len(again) == 2, "the batch is not made a second time"


# --- memory of samples -----------------------------------------------------------------------------------


def numbered(t):
    value = torch.full((1,), float(t))
    return Sample(t, value, value, value, 1 / t, None)


def memory(capacity, seed=0, draws=2):
    return SampleMemory(capacity, draws, lambda seen: np.random.default_rng((seed, seen)))


def test_memory_hands_out_earlier_samples_only_and_keeps_at_most_so_many():
    kept_samples = memory(3)
    assert kept_samples.replay_and_keep(numbered(1)) == []
    for t in range(2, 40):
        earlier = kept_samples.replay_and_keep(numbered(t))
        assert len(earlier) == 2 and all(sample.t < t for sample in earlier)
        assert len(kept_samples.kept) == min(t, 3)
    assert memory(0).replay_and_keep(numbered(1)) == []


def test_every_sample_is_as_likely_to_be_kept_as_any_other():
    counts = np.zeros(20)
    for seed in range(2000):
        kept_samples = memory(5, seed)
        for t in range(1, 21):
            kept_samples.replay_and_keep(numbered(t))
        for sample in kept_samples.kept:
            counts[sample.t - 1] += 1
    assert counts.sum() == 10_000
    assert np.abs(counts - 500).max() < 6 * np.sqrt(2000 * 0.25 * 0.75)  # six standard deviations


@pytest.mark.parametrize("stop", [2, 9])
def test_stopped_memory_goes_on(stop):
    whole, first = memory(4), memory(4)
    expected = [whole.replay_and_keep(numbered(t)) for t in range(1, 20)]
    found = [first.replay_and_keep(numbered(t)) for t in range(1, stop + 1)]
    second = memory(4)
    second.load(kept(first))
    found += [second.replay_and_keep(numbered(t)) for t in range(stop + 1, 20)]
    assert [[(s.t, s.lam) for s in drawn] for drawn in found] == [[(s.t, s.lam) for s in drawn] for drawn in expected]
