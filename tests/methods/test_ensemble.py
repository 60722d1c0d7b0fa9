from __future__ import annotations

import numpy as np
import pytest
import torch

from fedbicross.engine.predict import load_model
from fedbicross.federation import simulate
from fedbicross.methods import create
from small import tiny_clients, tiny_context


def slow(kind: str) -> np.ndarray:
    """Image by image, model by model, in plain Python."""
    clients, ctx = tiny_clients(3), tiny_context()
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
    [("ensemble", "mean_logits"), ("ensemble:mean_probs", "mean_probs"), ("ensemble:class_weighted", "class_weighted")],
)
def test_combination_rules_against_plain_loops(spec: str, kind: str) -> None:
    clients = tiny_clients(3)
    predictor = simulate(create(spec), clients, tiny_context())["client-1"]
    assert np.allclose(predictor.probabilities(clients[0].images[:6]), slow(kind))


def test_a_class_that_nobody_has_gets_no_weight() -> None:
    clients = tiny_clients(2, classes=2)
    predictor = simulate(create("ensemble:class_weighted"), clients, tiny_context(classes=3))["client-0"]
    probabilities = predictor.probabilities(clients[0].images)
    assert np.isfinite(probabilities).all()
    assert (probabilities[:, 2] == 0).all()
