from __future__ import annotations

import numpy as np
import torch

from fedbicross.evaluate.protocols import TestSet
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


def test_a_run_answers_under_the_estimated_mix() -> None:
    """The row differs from that of the stored models only in the mix."""
    method = {"primum": {**TINY_METHODS["primum"], "batch": 8}}
    results = runner.run(tiny(methods=["primum:estimated", "primum:student"], method=method))
    rows = {row["method"]: row for row in results["rows"]}
    assert rows["primum:estimated"]["settings"]["prior"] == "estimated"
    assert rows["primum:estimated"]["reply_bytes"] == rows["primum:student"]["reply_bytes"]
