from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedbicross.engine.predict import load_model
from fedbicross.federation import simulate
from fedbicross.methods import create
from small import tiny_clients, tiny_context


def slow(kind: str) -> np.ndarray:
    """Image by image, model by model, in plain Python."""
    clients, ctx = tiny_clients(3), tiny_context(loss="balanced" if kind == "consensus" else "cross_entropy")
    models = [load_model("resnet8", ctx.local_model(client).state, 3, 3, 12) for client in clients]
    counts = [client.class_counts(3) for client in clients]
    out = []
    for image in clients[0].images[:6]:
        x = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 127.5 - 1
        logits = [model(x)[0].detach() for model in models]
        if kind == "mean_logits":
            answer = sum(logits).div(3).softmax(0)
        elif kind == "mean_probs":
            answer = sum(z.softmax(0) for z in logits) / 3
        elif kind == "consensus":  # weighted by images of the class that could be told from others
            told = [[min(count[c], sum(count) - count[c]) for c in range(3)] for count in counts]
            answer = torch.zeros(3)
            for c in range(3):
                total = sum(count[c] ** 0.5 for count in told)
                parts = [count[c] ** 0.5 / total * z.log_softmax(0)[c] for count, z in zip(told, logits, strict=True)]
                answer[c] = sum(parts).exp()
            answer /= answer.sum()
        else:
            answer = torch.zeros(3)
            for c in range(3):
                total = sum(count[c] for count in counts)
                answer[c] = sum(count[c] / total * z.softmax(0)[c] for count, z in zip(counts, logits, strict=True))
            answer /= answer.sum()
        out.append(answer.numpy())
    return np.array(out)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("ensemble", "mean_logits"),
        ("ensemble:mean_probs", "mean_probs"),
        ("ensemble:class_weighted", "class_weighted"),
        ("ensemble:consensus", "consensus"),
    ],
)
def test_combination_rules_against_plain_loops(spec: str, kind: str) -> None:
    clients = tiny_clients(3)
    predictor = simulate(create(spec), clients, tiny_context())["client-1"]
    assert np.allclose(predictor.probabilities(clients[0].images[:6]), slow(kind))


@pytest.mark.parametrize("spec", ["ensemble:class_weighted", "ensemble:consensus"])
def test_a_class_that_nobody_has_gets_no_weight(spec: str) -> None:
    clients = tiny_clients(2, classes=2)
    predictor = simulate(create(spec), clients, tiny_context(classes=3))["client-0"]
    probabilities = predictor.probabilities(clients[0].images)
    assert np.isfinite(probabilities).all()
    assert (probabilities[:, 2] == 0).all()


def test_weights_by_counts_or_by_contrast() -> None:
    clients = tiny_clients(2)
    clients[0] = replace(clients[0], labels=np.zeros_like(clients[0].labels))  # one class: nothing to tell it from
    weights = {}
    for by in ("counts", "contrast"):
        method = create("ensemble:consensus", {"ensemble:consensus": {"weights": by}})
        weights[by] = simulate(method, clients, tiny_context())["client-0"].class_weights
    assert weights["contrast"].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert weights["counts"][0, 0] > 0.5 and weights["counts"].sum(0).tolist() == pytest.approx([1, 1, 1])


def test_counts_leave_only_where_the_rule_needs_them() -> None:
    ctx, client = tiny_context(), tiny_clients(1)[0]
    for spec in ("ensemble", "ensemble:mean_probs", "ensemble:class_weighted", "ensemble:consensus"):
        method, weighted = create(spec), spec in ("ensemble:class_weighted", "ensemble:consensus")
        assert (method.upload(client, ctx).class_counts is not None) == weighted
        assert ("class_counts" in method.needs) == ("per class" in method.upload_summary) == weighted
