from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedbicross.evaluate.protocols import TestSet
from fedbicross.messages import Predictor
from fedbicross.parts.class_mix import adapt_prior, calibrated
from fedbicross.parts.local import own_model
from fedbicross.runs import runner
from fedbicross.runs.rows import adapt_all
from small import TINY_METHODS, tiny_clients, tiny_context

from .test_runner import tiny


def test_each_client_takes_the_class_mix_of_the_test_images_dealt_to_it() -> None:
    clients, ctx = tiny_clients(3), tiny_context()
    student = own_model(clients[2], ctx, "balanced")
    models = {client.name: calibrated(client, student, ctx) for client in clients}
    images = clients[2].images
    test = TestSet(clients[2].labels, np.arange(24) % 2)  # none is dealt to the third client
    found = adapt_all(models, images, test, {f"client-{i}": i for i in range(3)}, ctx)
    for i in range(2):
        expected, mix = adapt_prior(models[f"client-{i}"], images[i::2]).log_prior, found[f"client-{i}"].log_prior
        assert expected is not None and mix is not None and torch.equal(mix, expected)
    assert found["client-2"] is models["client-2"]


def test_only_a_method_that_says_so_is_adapted_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    adapted: list[tuple[str, set[str]]] = []

    def spy(predictors: Any, images: Any, test: Any, owners: Any, ctx: Any) -> dict[str, Predictor]:
        out = adapt_all(predictors, images, test, owners, ctx)
        adapted.append((ctx.scope, {name for name, model in out.items() if model is not predictors[name]}))
        return out

    monkeypatch.setattr(runner, "adapt_all", spy)
    method = {"primum": {**TINY_METHODS["primum"], "batch": 8}}
    runner.run(tiny(methods=["primum:estimated", "primum:student"], method=method))
    assert adapted == [("seed-0/primum+estimated", {"client-0", "client-1", "client-2"})]
