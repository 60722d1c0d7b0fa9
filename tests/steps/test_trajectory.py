from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedbicross.bundle import pack, unpack
from fedbicross.engine.combine import combine_logits
from fedbicross.engine.ensemble import Ensemble
from fedbicross.steps.inversion import Inversion, InversionSettings, balanced_labels
from fedbicross.steps.trajectory import Teacher, Trajectory

from .tiny import Tiny, randomised

pytestmark = pytest.mark.usefixtures("float64")

SETTINGS = InversionSettings(steps=5, batch=8, jitter=1)


def ensemble():
    return Ensemble([randomised(Tiny(width=4 + i), seed=i).float() for i in range(2)])


def teacher(adaptation="batch", **settings):
    return Teacher(ensemble(), temperature=3.0, adaptation=adaptation, **settings)


def start(teacher, convention="paper"):
    return Trajectory.start(teacher, SETTINGS, (3, 6, 6), 4, torch.Generator().manual_seed(5), convention)


def images():
    """x(1), …, x(T) by the inversion alone."""
    inversion = Inversion.start(
        ensemble(), balanced_labels(8, 4), (3, 6, 6), SETTINGS, torch.Generator().manual_seed(5)
    )
    made = []
    for _ in range(5):
        inversion.step()
        made.append(inversion.images)
    return made


def soft(logits):
    return (logits.mean(0) / 3.0).softmax(-1)


@pytest.mark.parametrize(
    ("convention", "levels"), [("paper", [0.8, 0.6, 0.4, 0.2, 0.0]), ("released", [1.0, 0.8, 0.6, 0.4, 0.2])]
)
def test_batch_adaptation_labels_every_batch_by_its_own_statistics(convention, levels):
    samples = list(start(teacher(), convention))
    assert [sample.t for sample in samples] == [1, 2, 3, 4, 5]
    assert [sample.lam for sample in samples] == pytest.approx(levels)
    for sample, x, level in zip(samples, images(), levels, strict=True):
        assert torch.equal(sample.images, x)
        by_batch, by_store = soft(ensemble().batch_logits(x)), soft(ensemble().logits(x))
        if level > 0:
            torch.testing.assert_close(sample.adapted, by_batch)
        if level < 1:
            torch.testing.assert_close(sample.original, by_store)
        assert not torch.allclose(by_batch, by_store, atol=1e-3)
        assert torch.isfinite(sample.loss.total)


@pytest.mark.parametrize("fast", [False, True])
def test_several_batches_asked_together_are_answered_as_one_by_one(fast):
    batches, lams = images()[:3], [0.7, 0.3, 0.0]
    expected = [teacher().soft_labels(x, lam) for x, lam in zip(batches, lams, strict=True)]
    clients = [randomised(Tiny(width=4 + i), seed=i).float() for i in range(2)]
    found = replace(teacher(), ensemble=Ensemble(clients, fast=fast)).soft_labels_of_batches(batches, lams)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours[0], theirs[0])
        torch.testing.assert_close(ours[1], theirs[1])
        assert ours[2] == theirs[2]


def moved_statistics(trajectory, momentum):
    """Eq. 3 by hand: over x(T), …, x(1), for each client and layer, measured as in train mode."""
    found = ensemble().initial_statistics()
    for x in reversed(trajectory):
        measured = ensemble().update_statistics(ensemble().initial_statistics(), x, 0.0)
        for client, layers in enumerate(measured):
            for layer, (mean, var) in layers.items():
                old_mean, old_var = found[client][layer]
                found[client][layer] = (
                    momentum * old_mean + (1 - momentum) * mean,
                    momentum * old_var + (1 - momentum) * var,
                )
    return found


@pytest.mark.parametrize("momentum", [0.9, 0.5, 0.0])
def test_ema_adaptation_is_one_teacher_for_the_whole_trajectory(momentum):
    statistics = moved_statistics(images(), momentum)
    samples = list(start(teacher("ema", momentum=momentum)))
    for sample, x in zip(samples[:-1], images()[:-1], strict=True):
        assert torch.equal(sample.images, x)
        torch.testing.assert_close(sample.adapted, soft(ensemble().adapted_logits(x, statistics)))
        torch.testing.assert_close(sample.original, soft(ensemble().logits(x)))
    in_order = moved_statistics(images()[::-1], momentum)
    wrong = soft(ensemble().adapted_logits(images()[0], in_order))
    assert not torch.allclose(samples[0].adapted, wrong, atol=1e-4), "the order of the pass can be told"


def test_without_adaptation_the_original_teacher_speaks_alone():
    for sample, x in zip(start(teacher("none")), images(), strict=True):
        assert sample.lam == 0 and sample.adapted is sample.original
        torch.testing.assert_close(sample.original, soft(ensemble().logits(x)))


@pytest.mark.parametrize(
    ("adaptation", "lam", "asked"),
    [
        ("batch", 1.0, ["batch"]),
        ("batch", 0.5, ["stored", "batch"]),
        ("batch", 0.0, ["stored"]),
        ("none", 1.0, ["stored"]),
    ],
)
def test_a_teacher_whose_weight_is_zero_is_not_asked(adaptation, lam, asked, monkeypatch):
    speaker, calls = teacher(adaptation), []
    for name, word in [("logits", "stored"), ("batch_logits", "batch")]:
        function = getattr(speaker.ensemble, name)
        monkeypatch.setattr(speaker.ensemble, name, lambda x, *more, f=function, w=word: calls.append(w) or f(x, *more))
    speaker.soft_labels(images()[0], lam)
    assert calls == asked


@pytest.mark.parametrize("combine", ["mean_logits", "mean_probs", "class_weighted"])
def test_the_teacher_combines_as_it_is_told(combine):
    weights = torch.tensor([[0.25, 0.5, 1.0, 0.0], [0.75, 0.5, 0.0, 0.0]])
    speaker = Teacher(ensemble(), 3.0, combine, weights)
    x = images()[0]
    expected = combine_logits(ensemble().logits(x), combine, 3.0, weights)
    torch.testing.assert_close(speaker.original(x), expected)
    assert (expected[:, 3] == 0).all() == (combine == "class_weighted")
    assert not speaker.original(x).requires_grad


@pytest.mark.parametrize("adaptation", ["batch", "ema", "none"])
@pytest.mark.parametrize("stop", [1, 3, 4])
def test_stopped_after_any_sample_the_rest_is_the_same(adaptation, stop):
    whole = list(start(teacher(adaptation)))
    first = start(teacher(adaptation))
    for sample in first:
        if sample.t == stop:
            kept, _ = unpack(pack("stage", first.tensors(), {}), "stage")
            break
    rest = list(Trajectory.from_tensors(teacher(adaptation), SETTINGS, kept))
    assert [sample.t for sample in rest] == list(range(stop + 1, 6))
    for sample, expected in zip(rest, whole[stop:], strict=True):
        for left, right in [(sample.images, expected.images), (sample.adapted, expected.adapted)]:
            assert torch.equal(left, right)
        assert sample.lam == expected.lam and torch.equal(sample.loss.total, expected.loss.total)


@pytest.mark.parametrize("adaptation", ["batch", "ema", "none"])
@pytest.mark.parametrize("done", [0, 1, 4, 5])
def test_the_beginning_is_enough_to_go_on_from(adaptation, done, monkeypatch):
    """What was handed out already is made again, but no teacher is asked about it."""
    expected = list(start(teacher(adaptation)))[done:]
    place = {**start(teacher(adaptation)).tensors(), "done": torch.tensor(done)}
    resumed = Trajectory.from_tensors(teacher(adaptation).on("cpu"), SETTINGS, place)
    spoken, speak = [], Teacher.soft_labels
    monkeypatch.setattr(Teacher, "soft_labels", lambda self, *args: spoken.append(1) or speak(self, *args))
    found = list(resumed)
    assert [sample.t for sample in found] == list(range(done + 1, 6)) and len(spoken) == 5 - done
    for left, right in zip(found, expected, strict=True):
        assert all(torch.equal(left[k], right[k]) for k in (1, 2, 3)) and left.lam == right.lam
        assert all(torch.equal(a, b) for a, b in zip(left.loss, right.loss, strict=True))


def test_a_copied_teacher_keeps_its_weights_and_words():
    weights = torch.tensor([[0.2, 0.5, 0.5, 1.0], [0.8, 0.5, 0.5, 0.0]])
    first = teacher(combine="class_weighted", class_weights=weights)
    second, x = first.on("cpu"), images()[2]
    assert second.ensemble is not first.ensemble and second.momentum == first.momentum
    assert torch.equal(second.original(x), first.original(x)) and torch.equal(second.adapted(x), first.adapted(x))


def test_labels_are_those_of_the_synthesis():
    assert start(teacher()).labels.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
