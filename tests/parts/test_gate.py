"""The gate's model: what it answers is the mixture that was chosen, whatever the shared model is made of."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedbicross.bundle import validate
from fedbicross.context import Context
from fedbicross.engine.predict import load_model
from fedbicross.errors import MethodError, UploadError
from fedbicross.exchange import Client, Predictor
from fedbicross.federation import simulate
from fedbicross.methods import create
from fedbicross.parts import gate
from fedbicross.parts.local import own_model
from fedbicross.steps.gate import OWN, Choice, Mixture
from small import tiny_clients, tiny_context

RULES = ["mean_logits", "consensus", "consensus with a prior"]


def log_scores(predictor: Predictor, images: np.ndarray) -> Tensor:
    """log p_i(c|x) [N,B,C], image by image."""
    networks = [load_model(a, s, 3, 3, 12) for a, s in zip(predictor.architectures, predictor.states, strict=True)]
    rows = []
    for image in images:
        x = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 127.5 - 1
        rows.append(torch.stack([network(x)[0].detach().log_softmax(0) for network in networks]))
    return torch.stack(rows, 1)


def shared_model(ctx: Context, clients: list[Client], rule: str) -> Predictor:
    """The other clients' networks, combined."""
    models = [ctx.local_model(client) for client in clients[1:]]
    made = Predictor(ctx.task, tuple(m.architecture for m in models), tuple(m.state for m in models))
    if rule == "mean_logits":
        return made
    weights = torch.tensor([[0.9, 0.5, 0.0], [0.1, 0.5, 0.0]])  # nobody has the last class
    prior = torch.tensor([-0.1, -2.0, -1.0]) if rule == "consensus with a prior" else None
    return replace(made, combine="consensus", class_weights=weights, log_prior=prior)


# --- the shared model in logarithms -----------------------------------------------------------------------


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("rule", RULES)
def test_log_linear_gives_what_the_predictor_answers(rule: str) -> None:
    clients, ctx = tiny_clients(3), tiny_context()
    predictor = shared_model(ctx, clients, rule)
    tables, b = gate.log_linear(predictor)
    assert tables.shape == (2, 3) and b.shape == (3,)
    said = log_scores(predictor, clients[0].images[:5])
    expected = np.zeros((5, 3))
    for image in range(5):
        scores = [float(b[c]) + sum(float(tables[i, c] * said[i, image, c]) for i in range(2)) for c in range(3)]
        total = sum(math.exp(score) for score in scores)
        expected[image] = [math.exp(score) / total for score in scores]
    assert np.allclose(predictor.probabilities(clients[0].images[:5]), expected, atol=1e-9)


@pytest.mark.parametrize("rule", ["mean_logits", "mean_probs", "class_weighted"])
def test_one_network_is_itself_by_any_rule(rule: Any) -> None:
    ctx = tiny_context()
    trained = ctx.local_model(tiny_clients(1)[0])
    one = Predictor(ctx.task, (trained.architecture,), (trained.state,), rule)
    tables, b = gate.log_linear(one)
    assert tables.tolist() == [[1, 1, 1]] and b.tolist() == [0, 0, 0]


@pytest.mark.parametrize("rule", ["mean_probs", "class_weighted"])
def test_a_mean_of_probabilities_has_no_such_form(rule: Any) -> None:
    ctx = tiny_context()
    shared = replace(shared_model(ctx, tiny_clients(3), "mean_logits"), combine=rule)
    with pytest.raises(MethodError, match=rule) as caught:
        gate.log_linear(shared)
    assert caught.value.code == "no_gate"


# --- the model that a client ends with --------------------------------------------------------------------


def decided(monkeypatch: pytest.MonkeyPatch, mixture: Mixture, accepted: bool = True) -> list[Any]:
    """The rule replaced by a decision; what it was asked is kept."""
    asked: list[Any] = []

    def rule(own: Tensor, shared: Tensor, labels: Tensor, counts: Tensor, folds: Any, has_prior: bool) -> Choice:
        asked.append((own, shared, labels, counts, folds, has_prior))
        return Choice(mixture, accepted, len(labels))

    monkeypatch.setattr(gate, "choose", rule)
    return asked


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("loss", ["balanced", "cross_entropy"])
@pytest.mark.parametrize("mixture", [Mixture(0.0, 2.0, 0.1), Mixture(0.3, 0.5, 0.0), Mixture(1.0, 1.4, 0.03)])
def test_the_model_answers_by_the_chosen_mixture(
    mixture: Mixture, loss: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients, ctx = tiny_clients(3), tiny_context(loss=loss, validation=0.3)
    client = replace(clients[0], labels=np.where(clients[0].labels == 0, 1, clients[0].labels))
    own, shared = own_model(client, ctx), shared_model(ctx, clients, rule)
    asked = decided(monkeypatch, mixture)
    model = gate.gated(client, own, shared, ctx)
    validate.check_predictor(model)
    w, t, e = mixture.share, mixture.temperature, mixture.flatness
    assert len(model.states) == (w > 0) + 2 * (w < 1), "a network without a say is not kept"

    images, counts = clients[1].images[:5], client.class_counts(3)
    mine, theirs = log_scores(own, images)[0], np.log(np.maximum(shared.probabilities(images), 1e-300))
    expected = np.zeros((5, 3))
    for image in range(5):
        scores = []
        for c in range(3):
            prior = (1 - e) * counts[c] / sum(counts) + e / 3
            of_prior = (1.0 if loss == "balanced" else 1 - w) * (math.log(prior) if prior else -1e4)
            scores.append((w * float(mine[image, c]) + (1 - w) * theirs[image, c]) / t + of_prior)
        total = sum(math.exp(score - max(scores)) for score in scores)
        expected[image] = [math.exp(score - max(scores)) / total for score in scores]
    assert np.allclose(model.probabilities(images), expected, atol=1e-7)

    # What the rule was shown: both models on the images that training held back.
    (own_scores, shared_scores, labels, given, folds, has_prior), rows = asked[0], ctx.validation_rows(client)
    assert len(rows) == 7 and labels.tolist() == client.labels[rows].tolist() and given.tolist() == counts
    assert has_prior == (loss == "cross_entropy")
    torch.testing.assert_close(own_scores, log_scores(own, client.images[rows])[0])
    answers = torch.from_numpy(shared.probabilities(client.images[rows]))
    torch.testing.assert_close(shared_scores.exp(), answers, rtol=0, atol=1e-9)
    assert sorted(torch.cat(folds).tolist()) == list(range(7))


def test_a_mixture_that_did_not_earn_its_place_leaves_the_own_model(monkeypatch: pytest.MonkeyPatch) -> None:
    clients, ctx = tiny_clients(3), tiny_context(loss="balanced", validation=0.3)
    decided(monkeypatch, OWN, accepted=False)
    own = own_model(clients[0], ctx)
    assert gate.gated(clients[0], own, shared_model(ctx, clients, "mean_logits"), ctx) is own
    (title,) = ctx.record.diagnosis["tables"]
    table = ctx.record.diagnosis["tables"][title]
    assert "client-0" in title and len(table["columns"]) == len(table["rows"][0])
    assert "own model" in table["rows"][0]


@pytest.mark.parametrize("model", ["resnet8", "vgg8", "wrn16_2"])
def test_too_few_images_for_validation_keep_the_own_model_and_say_so(model: str) -> None:
    clients, ctx = tiny_clients(3), tiny_context(loss="balanced", model=model)
    few = Client("few", clients[0].images[:9], clients[0].labels[:9])
    assert len(ctx.validation_rows(few)) == 0
    own = own_model(few, ctx)
    assert gate.gated(few, own, own_model(clients[1], ctx), ctx) is own
    assert any("few" in text and "no validation images" in text for text in ctx.record.warnings)


def test_patients_stay_together_in_the_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    clients, ctx = tiny_clients(3), tiny_context(loss="balanced", validation=0.5)
    patients = np.array([f"p{number // 4}" for number in range(24)])
    client = Client("a", clients[0].images, clients[0].labels, patients)
    asked = decided(monkeypatch, OWN, accepted=False)
    gate.gated(client, own_model(client, ctx), own_model(clients[1], ctx), ctx)
    held, folds = patients[ctx.validation_rows(client)], asked[0][4]
    assert len(folds) == len(set(held)) == 3 and all(len(set(held[fold.numpy()])) == 1 for fold in folds)


def test_a_shared_model_with_impossible_numbers_is_refused_before_it_is_asked() -> None:
    clients, ctx = tiny_clients(2), tiny_context(loss="balanced")
    own, other = own_model(clients[0], ctx), own_model(clients[1], ctx)
    state = {**other.states[0], "head.weight": torch.full((3, 64), 1e30)}
    with pytest.raises(UploadError) as caught:
        gate.gated(clients[0], own, replace(other, states=(state,)), ctx)
    assert caught.value.code == "magnitude"


def test_a_model_of_several_networks_may_be_gated() -> None:
    """The whole ensemble as the shared model: what a method that sends everything could do."""
    clients, ctx = tiny_clients(3), tiny_context(loss="balanced", validation=0.3)
    everyone = simulate(create("ensemble:consensus"), clients, ctx)["client-0"]
    model = gate.gated(clients[0], own_model(clients[0], ctx), everyone, ctx)
    validate.check_predictor(model)
    found = model.probabilities(clients[0].images)
    assert np.isfinite(found).all() and np.allclose(found.sum(1), 1, atol=1e-5)
