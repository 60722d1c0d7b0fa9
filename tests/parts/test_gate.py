"""The gate's model: the mixture that was chosen, and the shared model for what is referred to it."""

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
from fedbicross.federation import simulate
from fedbicross.messages import Client, Predictor
from fedbicross.methods import create
from fedbicross.parts import gate
from fedbicross.parts.local import own_model
from fedbicross.steps.gate import Choice, referral
from small import refuses, tiny_clients, tiny_context

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
    with refuses(MethodError, "no_gate", rule):
        gate.log_linear(shared)


@pytest.mark.parametrize("made", ["with a referral", "without a network"])
def test_nor_has_an_answer_that_hangs_on_the_image_or_on_no_network(made: str) -> None:
    ctx = tiny_context()
    if made == "without a network":
        odd = Predictor(ctx.task, constant=torch.tensor([0.2, 0.3, 0.5]))
    else:
        odd = replace(own_model(tiny_clients(1)[0], ctx, None), referral=torch.tensor([1e4, 1e4, 2.0]))
    with pytest.raises(MethodError) as caught:
        gate.log_linear(odd)
    assert caught.value.code == "no_gate" and made in caught.value.args[0]


# --- the model that a client ends with --------------------------------------------------------------------


def decided(monkeypatch: pytest.MonkeyPatch, share: float, referred: list[float] | None = None) -> list[Any]:
    """Both rules replaced by decisions; what the first was asked is kept, and what the second."""
    asked: list[Any] = []

    def choice(own: Tensor, shared: Tensor, labels: Tensor, counts: Tensor) -> Choice:
        asked.append((own, shared, labels, counts))
        return Choice(share, len(labels))

    def threshold(shared: Tensor, labels: Tensor, counts: Tensor) -> Tensor | None:
        asked.append((shared, labels, counts))
        return None if referred is None else torch.tensor(referred)

    monkeypatch.setattr(gate, "choose", choice)
    monkeypatch.setattr(gate, "referral", threshold)
    return asked


def lacking(client: Client, label: int = 0) -> Client:
    """The same client without this class."""
    return replace(client, labels=np.where(client.labels == label, (label + 1) % 3, client.labels))


def slow_mixture(mine: np.ndarray, theirs: np.ndarray, counts: list[int], w: float) -> np.ndarray:
    """p_own^w (p_shared pi_e)^(1-w), renormalised, number by number."""
    out = np.zeros_like(mine)
    for image in range(len(mine)):
        scores = []
        for c, count in enumerate(counts):
            prior = 0.7 * count / sum(counts) + 0.3 / len(counts)
            scores.append(w * math.log(max(mine[image, c], 1e-300)))
            scores[-1] += (1 - w) * (math.log(max(theirs[image, c], 1e-300)) + math.log(prior))
        total = sum(math.exp(score - max(scores)) for score in scores)
        out[image] = [math.exp(score - max(scores)) / total for score in scores]
    return out


def slow_referred(answers: np.ndarray, shared: np.ndarray, referred: list[float]) -> tuple[np.ndarray, list[int]]:
    """The shared model's answer where it is surer of a marked class than of every other, by enough."""
    out, rows = answers.copy(), []
    for image, row in enumerate(np.log(shared)):
        likeliest = max((c for c in range(3) if referred[c] < 1e4), key=lambda c: row[c])
        if row[likeliest] - max(row[c] for c in range(3) if referred[c] == 1e4) > referred[likeliest]:
            out[image] = shared[image]
            rows.append(image)
    return out, rows


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("loss", ["balanced", "cross_entropy", "both"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
def test_the_model_answers_by_the_chosen_mixture(
    share: float, loss: Any, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients, ctx = tiny_clients(3), tiny_context(validation=0.3)
    client = lacking(clients[0])
    own, shared = own_model(client, ctx, loss), shared_model(ctx, clients, rule)
    asked = decided(monkeypatch, share)
    model = gate.gated(client, own, shared, ctx)
    validate.check_predictor(model)
    assert len(model.states) == (share > 0) * len(own.states) + 2, "a network without a say is not kept"
    images, counts = clients[1].images[:5], client.class_counts(3)
    expected = slow_mixture(own.probabilities(images), shared.probabilities(images), counts, share)
    assert np.allclose(model.probabilities(images), expected, atol=1e-7)

    # What the rule was shown: both models on the images that training held back.
    assert len(asked) == 1, "several networks cannot answer a referral"
    (own_scores, shared_scores, labels, given), rows = asked[0], ctx.validation_rows(client)
    assert len(rows) == 7 and labels.tolist() == client.labels[rows].tolist() and given.tolist() == counts
    for scores, predictor in ((own_scores, own), (shared_scores, shared)):
        assert scores.dtype == torch.float64
        answers = torch.from_numpy(predictor.probabilities(client.images[rows]))
        torch.testing.assert_close(scores.exp(), answers, rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("loss", ["balanced", "cross_entropy", "both"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_images_beyond_the_threshold_are_answered_by_the_shared_model(
    share: float, loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients, ctx = tiny_clients(2), tiny_context(validation=0.3)
    client, images = lacking(clients[0]), clients[1].images
    own, shared = own_model(client, ctx, loss), own_model(clients[1], ctx, "cross_entropy")
    theirs = shared.probabilities(images)
    middle = float(np.median(np.log(theirs[:, 0]) - np.log(theirs[:, 1:].max(1)))) + 1e-6  # refers about half
    referred = [middle, 1e4, 1e4]
    asked = decided(monkeypatch, share, referred)
    model = gate.gated(client, own, shared, ctx)
    validate.check_predictor(model)
    assert len(model.states) == (share > 0) * len(own.states) + 1
    assert all(torch.equal(model.states[-1][name], value) for name, value in shared.states[0].items())
    alone = slow_mixture(own.probabilities(images), theirs, client.class_counts(3), share)
    expected, rows = slow_referred(alone, theirs, referred)
    assert 0 < len(rows) < len(images)
    assert np.allclose(model.probabilities(images), expected, atol=1e-7)

    # The threshold was asked for on all of the client's images, of its training too.
    shown, labels, counts = asked[1]
    assert torch.equal(labels, torch.from_numpy(client.labels)) and counts.tolist() == client.class_counts(3)
    torch.testing.assert_close(shown.exp(), torch.from_numpy(shared.probabilities(client.images)), rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("loss", ["balanced", "both"])
@pytest.mark.parametrize("case", ["a class missing", "one class", "no validation images"])
def test_where_nothing_was_accepted_every_image_that_is_not_referred_is_the_own_models(case: str, loss: Any) -> None:
    """With the rules as they are, whoever the client is."""
    clients = tiny_clients(2)
    ctx = tiny_context(validation=0.1)
    few = Client("few", clients[0].images[:9], clients[0].labels[:9])
    one = replace(clients[0], labels=np.full_like(clients[0].labels, 1))
    client = {"a class missing": lacking(clients[0]), "one class": one, "no validation images": lacking(few)}[case]
    own, shared = own_model(client, ctx, loss), own_model(clients[1], ctx, "cross_entropy")
    model = gate.gated(client, own, shared, ctx)
    counts = torch.tensor(client.class_counts(3))
    scores = torch.from_numpy(shared.probabilities(client.images)).log()
    expected = referral(scores, torch.from_numpy(client.labels), counts)
    assert expected is not None and model.referral is not None
    torch.testing.assert_close(model.referral, expected, rtol=0, atol=1e-9)
    assert np.allclose(model.probabilities(client.images), own.probabilities(client.images), atol=1e-9), "no own image"
    rng = np.random.default_rng(0)
    images = rng.normal(rng.integers(0, 256, (60, 1, 1, 1)), 30, (60, 12, 12, 3)).clip(0, 255).astype(np.uint8)
    mine, theirs = own.probabilities(images), shared.probabilities(images)
    answers, _ = slow_referred(mine, theirs, expected.tolist())
    assert np.allclose(model.probabilities(images), answers, atol=1e-7)
    told = any("no validation images" in text for text in ctx.record.warnings)
    assert told == (case == "no validation images")


def test_a_mixture_that_did_not_earn_its_place_leaves_the_own_model(monkeypatch: pytest.MonkeyPatch) -> None:
    clients, ctx = tiny_clients(3), tiny_context(validation=0.3)
    decided(monkeypatch, 1.0)
    own = own_model(clients[0], ctx, "both")
    assert gate.gated(clients[0], own, shared_model(ctx, clients, "mean_logits"), ctx) is own


@pytest.mark.parametrize("referred", [None, [1e4, 2.54, 3.0]])
def test_the_report_says_what_was_decided(referred: list[float] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    clients, ctx = tiny_clients(2), tiny_context(validation=0.3)
    decided(monkeypatch, 0.5, referred)
    gate.gated(clients[0], own_model(clients[0], ctx, None), own_model(clients[1], ctx, None), ctx)
    ((title, table),) = ctx.record.diagnosis["tables"].items()
    assert "client-0" in title
    row = dict(zip(table["columns"], table["rows"][0], strict=True))
    assert row["validation images"] == 7 and row["own model's share"] == 0.5
    expected = "none" if referred is None else "class-1 2.5, class-2 3.0"
    assert row["classes referred, from odds"] == expected


@pytest.mark.parametrize("model", ["resnet8", "vgg8", "wrn16_2"])
def test_too_few_images_for_validation_keep_the_own_model_and_say_so(model: str) -> None:
    clients, ctx = tiny_clients(3), tiny_context(model=model)
    few = Client("few", clients[0].images[:9], np.arange(9) % 3)  # no class is seldom
    assert len(ctx.validation_rows(few)) == 0
    own = own_model(few, ctx, "both")
    assert gate.gated(few, own, own_model(clients[1], ctx, None), ctx) is own
    assert any("few" in text and "no validation images" in text for text in ctx.record.warnings)


def test_a_client_of_another_architecture_may_be_gated(monkeypatch: pytest.MonkeyPatch) -> None:
    clients, ctx = tiny_clients(2), tiny_context(validation=0.3)
    other = replace(ctx, client_models={"client-0": "wrn16_2"})
    decided(monkeypatch, 0.5, [0.0, 1e4, 1e4])
    model = gate.gated(clients[0], own_model(clients[0], other, "both"), own_model(clients[1], ctx, None), other)
    validate.check_predictor(model)
    assert model.architectures == ("wrn16_2", "wrn16_2", "resnet8")


def test_a_shared_model_with_impossible_numbers_is_refused_before_it_is_asked() -> None:
    clients, ctx = tiny_clients(2), tiny_context()
    own, other = (own_model(client, ctx, "balanced") for client in clients)
    state = {**other.states[0], "head.weight": torch.full((3, 64), 1e30)}
    with refuses(UploadError, "magnitude"):
        gate.gated(clients[0], own, replace(other, states=(state,)), ctx)


def test_a_model_of_several_networks_may_be_gated() -> None:
    """The whole ensemble as the shared model: what a method that sends everything could do."""
    clients, ctx = tiny_clients(3), tiny_context(loss="balanced", validation=0.3)
    everyone = simulate(create("ensemble:consensus"), clients, ctx)["client-0"]
    model = gate.gated(lacking(clients[0]), own_model(lacking(clients[0]), ctx, None), everyone, ctx)
    validate.check_predictor(model)
    assert model.referral is None, "several networks cannot answer a referral"
    found = model.probabilities(clients[0].images)
    assert np.isfinite(found).all() and np.allclose(found.sum(1), 1, atol=1e-5)
