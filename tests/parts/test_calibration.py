"""One temperature for a finished model: fitted on images it has not seen, kept in its file, changing no answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedbicross.bundle import validate
from fedbicross.engine.combine import temper
from fedbicross.errors import UploadError
from fedbicross.evaluate.metrics import expected_calibration_error
from fedbicross.messages import Predictor
from fedbicross.parts.calibration import LEAST_IMAGES, calibrate
from fedbicross.parts.class_mix import adapt_prior
from small import packed_unchecked, tiny_clients, tiny_context


def model(sharpness: float = 1.0) -> Predictor:
    """A trained network whose logits are so many times larger."""
    ctx = tiny_context(epochs=3)
    state = dict(ctx.local_model(tiny_clients(1, per_client=60)[0]).state)
    for name in ("head.weight", "head.bias"):
        state[name] = state[name] * sharpness
    return Predictor(ctx.task, ("resnet8",), (state,))


def surprise(probabilities: np.ndarray, labels: np.ndarray) -> float:
    return float(-np.log(probabilities[np.arange(len(labels)), labels].clip(1e-38)).mean())


@pytest.mark.usefixtures("float64")
def test_no_other_temperature_is_less_surprised() -> None:
    images, labels = tiny_clients(1, per_client=80, seed=5)[0].images, tiny_clients(1, per_client=80, seed=5)[0].labels
    labels = np.where(np.arange(80) % 4 == 0, (labels + 1) % 3, labels)  # every fourth label is wrong
    found = calibrate(model(3.0), images, labels)
    assert found.temperature > 1.5, "a model three times too sure"
    least = surprise(found.probabilities(images), labels)
    plain = replace(found, temperature=1.0).probabilities(images)
    for other in np.linspace(0.5, 10, 96):
        powers = plain ** (1 / other)
        assert surprise(powers / powers.sum(1, keepdims=True), labels) >= least - 1e-6
    assert (found.probabilities(images).argmax(1) == plain.argmax(1)).all(), "which class stays the same"
    ours, theirs = (expected_calibration_error(p, labels) for p in (found.probabilities(images), plain))
    assert ours is not None and theirs is not None and ours < theirs


def test_too_few_images_and_constant_answers_change_nothing() -> None:
    client, given = tiny_clients(1)[0], model()
    few = LEAST_IMAGES - 1
    assert calibrate(given, client.images[:few], client.labels[:few]) is given
    constant = Predictor(given.task, constant=torch.tensor([0.2, 0.3, 0.5]))
    assert calibrate(constant, client.images, client.labels) is constant


def test_the_temperature_travels_with_the_model() -> None:
    given, images = model(), tiny_clients(1)[0].images
    warm = replace(given, temperature=2.5)
    back = Predictor.unpack(warm.pack())
    assert back.temperature == 2.5 and np.array_equal(back.probabilities(images), warm.probabilities(images))
    assert replace(warm, temperature=1.0).pack() == given.pack(), "without one the file is as before"
    expected = temper(torch.from_numpy(given.probabilities(images)), 2.5).numpy()
    assert np.allclose(warm.probabilities(images), expected, atol=1e-6)


@pytest.mark.parametrize("value", [0.0, -1.0, 1e9, float("nan")])
def test_a_stranger_s_temperature_is_refused(value: float) -> None:
    odd = Predictor(model().task, constant=torch.tensor([0.2, 0.3, 0.5]), temperature=value)
    with pytest.raises((UploadError, ValueError)):
        validate.check_predictor(Predictor.unpack(packed_unchecked(odd)))


def test_another_class_mix_does_without_it() -> None:
    given, images = model(), tiny_clients(1)[0].images
    mixed = replace(
        given,
        combine="consensus",
        class_weights=torch.ones(1, 3),
        log_prior=torch.tensor([0.8, 0.1, 0.1]).log(),
        temperature=3.0,
    )
    adapted = adapt_prior(mixed, images)
    assert adapted.temperature == 1.0
    assert torch.equal(adapted.log_prior, adapt_prior(replace(mixed, temperature=1.0), images).log_prior)
