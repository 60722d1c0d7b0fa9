from __future__ import annotations

import pytest
import torch

from fedbicross.engine.ensemble import statistics_from_tensors, statistics_to_tensors
from fedbicross.steps import adaptation

from .tiny import noise, tiny_ensemble


def trajectory(length):
    return [noise(4, 3, 5, 5, seed=t) * (1 + 1 / (t + 1)) + 0.1 * t for t in range(length)]


def batch_moments(ensemble, x):
    """μ(x), σ²(x) of every layer: what Eq. 3 with β = 0 leaves."""
    return ensemble.update_statistics(ensemble.initial_statistics(), x, 0.0)


def test_adapt_is_equation_3_in_reverse_order():
    ensemble, images = tiny_ensemble(2), trajectory(5)
    adapted = adaptation.adapt(ensemble, reversed(images), momentum=0.7)
    initial = ensemble.initial_statistics()
    for client in range(2):
        for layer, (mean, var) in adapted[client].items():
            expected_mean, expected_var = initial[client][layer]
            for t in range(1, 6):
                batch_mean, batch_var = batch_moments(ensemble, images[5 - t])[client][layer]
                expected_mean = 0.7 * expected_mean + 0.3 * batch_mean
                expected_var = 0.7 * expected_var + 0.3 * batch_var
            torch.testing.assert_close(mean, expected_mean)
            torch.testing.assert_close(var, expected_var)


def test_adapting_changes_the_teacher_but_not_the_original():
    ensemble, images = tiny_ensemble(2), trajectory(4)
    before = ensemble.logits(images[0])
    adapted = adaptation.adapt(ensemble, reversed(images))
    assert torch.equal(ensemble.logits(images[0]), before)
    assert not torch.allclose(ensemble.adapted_logits(images[0], adapted), before)


def test_a_pass_stopped_and_continued_is_the_same():
    ensemble, images = tiny_ensemble(2), trajectory(6)
    straight = statistics_to_tensors(adaptation.adapt(ensemble, reversed(images)))
    half = statistics_to_tensors(adaptation.adapt(ensemble, reversed(images[3:])))
    continued = adaptation.adapt(ensemble, reversed(images[:3]), statistics=statistics_from_tensors(half))
    for name, tensor in statistics_to_tensors(continued).items():
        assert torch.equal(tensor, straight[name])


def test_only_the_window_matters():
    ensemble, images = tiny_ensemble(1), trajectory(40)
    kept = adaptation.window(0.5, 1e-6)
    assert kept == 20
    full = adaptation.adapt(ensemble, reversed(images), momentum=0.5)
    short = adaptation.adapt(ensemble, reversed(images[:kept]), momentum=0.5)
    for layer in full[0]:
        torch.testing.assert_close(full[0][layer][0], short[0][layer][0], rtol=0, atol=1e-4)


def test_window():
    assert adaptation.window(0.9, 1e-6) == 132
    assert 0.9**132 <= 1e-6 < 0.9**131
    assert adaptation.window(0.0) == 1
    for momentum, tolerance in [(1.0, 1e-6), (-0.1, 1e-6), (0.9, 0.0), (0.9, 1.0)]:
        with pytest.raises(ValueError, match="window needs"):
            adaptation.window(momentum, tolerance)
