"""A model as one graph, by every rule of combining networks; from a reply to a file: cli/test_cli_exchange.py."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedbicross.deploy.graphs import Whole, as_onnx, as_torch
from fedbicross.errors import MethodError
from fedbicross.messages import Predictor
from fedbicross.parts import gate
from fedbicross.parts.local import own_model
from small import refuses, tiny_clients, tiny_context

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


@pytest.mark.usefixtures("float64")
def test_the_module_of_a_calibrated_model_answers_as_the_predictor() -> None:
    model, images = replace(predictor("consensus", prior=True), temperature=1.7), tiny_clients(1)[0].images
    found = Whole(model).eval()(torch.from_numpy(images)).detach().numpy()
    assert np.allclose(found, model.probabilities(images), atol=1e-12)
    assert not np.allclose(found, replace(model, temperature=1.0).probabilities(images), atol=1e-3)


def test_what_is_no_graph_is_refused() -> None:
    task = predictor("mean_logits").task
    for odd, code in (
        (Predictor(task, constant=torch.tensor([0.2, 0.3, 0.5])), "no_network"),
        (Predictor(task, ("linear",), ({},), encoder={"name": "tiny"}), "no_graph"),
    ):
        for write in (as_torch, as_onnx):
            with refuses(MethodError, code):
                write(odd)


@pytest.mark.slow
def test_a_graph_for_torch_needs_nothing_of_ours(tmp_path: Path) -> None:
    model, images = replace(predictor("consensus", prior=True), temperature=1.7), tiny_clients(1)[0].images
    (tmp_path / "model.pt2").write_bytes(as_torch(model))
    np.save(tmp_path / "images.npy", images)
    code = (
        "import sys, numpy, torch; model = torch.export.load('model.pt2').module();"
        "images = torch.from_numpy(numpy.load('images.npy'));"
        "numpy.save('one.npy', model(images[:1]).detach()); numpy.save('all.npy', model(images).detach());"
        "assert not [name for name in sys.modules if name.startswith('fedbicross')]"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = model.probabilities(images)
    assert np.allclose(np.load(tmp_path / "all.npy"), expected, atol=1e-5)
    assert np.allclose(np.load(tmp_path / "one.npy"), expected[:1], atol=1e-5)


def gated(images: np.ndarray) -> Predictor:
    """A class mix, a network that answers only what is referred to it, and odds that some of the images pass."""
    model = predictor("consensus", prior=True)
    scores = np.log(Predictor(model.task, ("resnet8",), model.states[1:]).probabilities(images))
    odds = np.sort(scores[:, 2] - scores[:, :2].max(1))
    at = 6 + int(np.diff(odds)[6:18].argmax())  # where no rounding can change which images are referred
    threshold = float(odds[at] + odds[at + 1]) / 2
    weights = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    return replace(model, class_weights=weights, referral=torch.tensor([1e4, 1e4, threshold]))


def referred(model: Predictor, images: np.ndarray) -> np.ndarray:
    """Images whose answer hangs on the referral."""
    difference = np.abs(model.probabilities(images) - replace(model, referral=None).probabilities(images))
    return np.flatnonzero(difference.max(1) > 1e-3)


@pytest.mark.usefixtures("float64")
def test_the_module_of_a_gated_model_answers_as_the_predictor() -> None:
    images = tiny_clients(1)[0].images
    model = gated(images)
    found = Whole(model).eval()(torch.from_numpy(images)).detach().numpy()
    assert np.allclose(found, model.probabilities(images), atol=1e-12)
    assert 0 < len(referred(model, images)) < len(images)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["drawn", "primum"])
def test_a_graph_of_a_gated_model_gives_the_same_answers(spec: str) -> None:
    """Of weights put in by hand, and of what primum's gate made of a client that lacks a class."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    images = tiny_clients(1)[0].images
    model = gated(images)
    if spec == "primum":
        client = tiny_clients(1)[0]
        client = replace(client, labels=np.where(client.labels == 2, 1, client.labels))
        ctx = tiny_context(epochs=1)
        shared = Predictor(ctx.task, ("resnet8",), model.states[1:])
        made = gate.gated(client, own_model(client, ctx, "both"), shared, ctx)
        assert len(made.states) == 3 and made.referral is not None and model.referral is not None
        model = replace(made, referral=model.referral)  # of the same class, with odds that some images pass
    session = runtime.InferenceSession(as_onnx(model))
    for some in (images, images[:1]):
        (answers,) = session.run(None, {"images": some})
        assert np.allclose(answers, model.probabilities(some), atol=1e-5)
    assert 0 < len(referred(model, images)) < len(images)


@pytest.mark.slow
def test_a_graph_with_a_class_mix_gives_the_same_answers() -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, images = predictor("consensus", prior=True), tiny_clients(1)[0].images[:5]
    (answers,) = runtime.InferenceSession(as_onnx(model)).run(None, {"images": images})
    assert np.allclose(answers, model.probabilities(images), atol=1e-5)
    assert (answers[:, 2] == 0).all()
