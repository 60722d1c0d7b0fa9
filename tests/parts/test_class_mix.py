"""A student under the class mix of the images that it is asked about, against loops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedbicross.bundle import validate
from fedbicross.errors import MethodError, UploadError
from fedbicross.messages import Client, Predictor
from fedbicross.parts.class_mix import adapt_prior, calibrated
from fedbicross.parts.local import own_model
from fedbicross.steps import prior_shift
from small import refuses, tiny_clients, tiny_context


def lopsided(client: Client) -> Client:
    """Without class 0, and with few of class 2."""
    labels = np.where(client.labels == 0, 1, client.labels)
    return replace(client, labels=labels)


def powers(probabilities: np.ndarray, tau: float, prior: list[float]) -> np.ndarray:
    """p^(1/tau) pi, renormalised, number by number."""
    out = np.zeros_like(probabilities)
    for image, row in enumerate(probabilities):
        scores = [p ** (1 / tau) * pi for p, pi in zip(row, prior, strict=True)]
        out[image] = [score / sum(scores) for score in scores]
    return out


def slow_mix(probabilities: np.ndarray) -> list[float]:
    """Saerens' two steps for posteriors under a uniform mix, then one image more of every class."""
    mix, (images, classes) = [1 / 3] * 3, probabilities.shape
    for _ in range(1000):
        moved = [[p * pi for p, pi in zip(row, mix, strict=True)] for row in probabilities.tolist()]
        mix = [sum(row[c] / sum(row) for row in moved) / images for c in range(classes)]
    return [(images * share + 1) / (images + classes) for share in mix]


@pytest.mark.usefixtures("float64")
def test_the_student_is_as_sure_as_the_validation_images_allow() -> None:
    clients, ctx = tiny_clients(2), tiny_context(validation=0.4, epochs=4)
    client, student = lopsided(clients[0]), own_model(clients[1], ctx, "cross_entropy")
    model = calibrated(client, student, ctx)
    validate.check_predictor(model)
    rows, counts = ctx.validation_rows(client), client.class_counts(3)
    own = torch.tensor([max(n / 24, 1e-300) for n in counts]).log()
    scores = torch.from_numpy(student.probabilities(client.images[rows])).log()
    tau = prior_shift.fit_temperature(scores, torch.from_numpy(client.labels[rows]), own)
    assert tau != 1 and len(rows) == 9
    prior = [0.7 * n / 24 + 0.1 for n in counts]
    images = clients[1].images
    expected = powers(student.probabilities(images), tau, prior)
    assert np.allclose(model.probabilities(images), expected, atol=1e-6)
    ((title, table),) = ctx.record.diagnosis["tables"].items()
    assert "client-0" in title and table["rows"] == [[9, round(tau, 4)]]


def test_without_validation_images_it_stays_as_sure_as_it_is() -> None:
    clients, ctx = tiny_clients(2), tiny_context(validation=0.0)
    model = calibrated(clients[0], own_model(clients[1], ctx, "cross_entropy"), ctx)
    assert model.class_weights is not None and torch.equal(model.class_weights, torch.ones(1, 3))
    assert any("client-0" in text and "calibrate" in text for text in ctx.record.warnings)


def test_impossible_numbers_are_refused_before_the_student_is_asked() -> None:
    clients, ctx = tiny_clients(1), tiny_context()
    student = own_model(clients[0], ctx, "cross_entropy")
    state = {**student.states[0], "head.weight": torch.full((3, 64), 1e30)}
    with refuses(UploadError, "magnitude"):
        calibrated(clients[0], replace(student, states=(state,)), ctx)


@pytest.mark.usefixtures("float64")
def test_another_mix_is_the_one_that_a_loop_finds() -> None:
    clients, ctx = tiny_clients(2, per_client=40), tiny_context(validation=0.3, epochs=4)
    model = calibrated(lopsided(clients[0]), own_model(clients[1], ctx, "balanced"), ctx)
    assert model.class_weights is not None
    tau, images = 1 / float(model.class_weights[0, 0]), clients[0].images[clients[0].labels != 1]
    uniform = powers(
        replace(model, class_weights=torch.ones(1, 3), log_prior=None).probabilities(images), tau, [1.0] * 3
    )
    mix = slow_mix(uniform)
    adapted = adapt_prior(model, images)
    validate.check_predictor(adapted)
    assert adapted.log_prior is not None
    assert adapted.log_prior.exp().tolist() == pytest.approx(mix, abs=1e-5)
    assert np.allclose(adapted.probabilities(images), powers(uniform, 1.0, mix), atol=1e-5)
    assert max(abs(a - 1 / 3) for a in mix) > 0.05, "there was something to find"


def test_the_mix_that_a_model_had_does_not_matter_and_the_model_stays_as_it_was() -> None:
    clients, ctx = tiny_clients(2), tiny_context(validation=0.3)
    model = calibrated(clients[0], own_model(clients[1], ctx, "balanced"), ctx)
    before = model.pack()
    other = replace(model, log_prior=torch.tensor([-1.0, -20.0, -0.5]))
    images = clients[1].images
    first, second = (adapt_prior(given, images).log_prior for given in (model, other))
    assert first is not None and second is not None and torch.equal(first, second)
    assert model.pack() == before


@pytest.mark.parametrize("made", ["plain", "both", "a referral", "a constant"])
def test_a_model_with_its_class_mix_inside_cannot_be_given_another(made: str) -> None:
    clients, ctx = tiny_clients(1), tiny_context()
    odd = {
        "plain": lambda: own_model(clients[0], ctx, "cross_entropy"),
        "both": lambda: own_model(clients[0], ctx, "both"),
        "a referral": lambda: replace(own_model(clients[0], ctx, "balanced"), referral=torch.tensor([1e4, 1e4, 2.0])),
        "a constant": lambda: Predictor(ctx.task, constant=torch.ones(3) / 3),
    }[made]()
    with refuses(MethodError, "no_class_mix"):
        adapt_prior(odd, clients[0].images)


def test_no_images_tell_no_mix() -> None:
    clients, ctx = tiny_clients(1), tiny_context()
    with refuses(MethodError, "no_images"):
        adapt_prior(own_model(clients[0], ctx, "balanced"), clients[0].images[:0])
