"""A model as one ONNX graph, by every rule of combining networks; from a reply to a file: cli/test_cli_exchange.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedbicross.exchange import Predictor
from fedbicross.transport.onnx_export import Whole, export
from small import tiny_clients, tiny_context

RULES = ["mean_logits", "mean_probs", "class_weighted", "consensus"]


def predictor(rule: Any, prior: bool = False) -> Predictor:
    """Two networks; nobody has the last class."""
    ctx = tiny_context(epochs=1)
    states = tuple(ctx.local_model(client).state for client in tiny_clients(2))
    weights = torch.tensor([[0.9, 0.2, 0.0], [0.1, 0.8, 0.0]])
    log_prior = torch.tensor([-0.1, -2.5, -1e4]) if prior else None
    return Predictor(ctx.task, ("resnet8", "resnet8"), states, rule, weights, log_prior=log_prior)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("prior", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_the_module_that_is_exported_answers_as_the_predictor(rule: str, prior: bool) -> None:
    model, images = predictor(rule, prior), tiny_clients(1)[0].images
    found = Whole(model).eval()(torch.from_numpy(images)).detach().numpy()
    assert np.allclose(found, model.probabilities(images), atol=1e-12)


@pytest.mark.slow
def test_a_graph_with_a_class_mix_gives_the_same_answers() -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, images = predictor("consensus", prior=True), tiny_clients(1)[0].images[:5]
    (answers,) = runtime.InferenceSession(export(model)).run(None, {"images": images})
    assert np.allclose(answers, model.probabilities(images), atol=1e-5)
    assert (answers[:, 2] == 0).all()
