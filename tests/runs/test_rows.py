from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from fedbicross.data import Dataset
from fedbicross.engine import predict
from fedbicross.evaluate import clinical
from fedbicross.evaluate.protocols import TestSet
from fedbicross.messages import Predictor
from fedbicross.parts.class_mix import adapt_prior, calibrated
from fedbicross.parts.local import own_model
from fedbicross.runs import runner
from fedbicross.runs.rows import adapt_all, choose_alone, choose_thresholds
from small import TINY_METHODS, tiny_clients, tiny_context

from .test_runner import TINY, tiny


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


@pytest.mark.slow
def test_each_network_of_a_run_is_asked_once_about_the_test_images(monkeypatch: pytest.MonkeyPatch) -> None:
    about = []
    real = predict.member_logits
    monkeypatch.setattr(predict, "member_logits", lambda *given: about.append(len(given[1])) or real(*given))
    shared = runner.run(tiny())["rows_sha256"]
    assert about.count(60) == 5  # three clients' own, FedAvg's and the centralised one: two ensembles need no more
    monkeypatch.setattr(predict.Answers, "probabilities", lambda self, model, store: model.probabilities(self.images))
    assert runner.run(tiny())["rows_sha256"] == shared


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


def test_thresholds_come_from_validation_images_and_not_from_what_all_were_trained_on() -> None:
    results = runner.run(tiny(methods=["fedavg"], training={**TINY["training"], "validation": 0.4}))
    rows = {row["method"]: row for row in results["rows"]}
    for method, row in rows.items():
        cuts = [client["thresholds"] for client in row["clients"]]
        if method in ("centralised", "majority"):  # trained on all images; a constant has no threshold
            assert not any(cut is not None for found in cuts for cut in found or [])
            assert row["clinical"]["matched"]["at_threshold"] is None
            continue
        assert all(len(found) == 8 and all(cut is None or 0 < cut < 1 for cut in found) for found in cuts)
        assert any(cut is not None for found in cuts for cut in found), "40 % of 120 images are enough for some"
        counted = row["clinical"]["matched"]["at_threshold"]["clients"]
        assert counted == [sum(found[c] is not None for found in cuts) for c in range(8)]


def test_thresholds_are_those_of_the_held_back_images() -> None:
    client, ctx = tiny_clients(1, per_client=60)[0], tiny_context(validation=0.5)
    model = own_model(client, ctx, None)
    choose_thresholds({client.name: model}, [client], ctx)
    rows = ctx.validation_rows(client)
    expected = clinical.thresholds(model.probabilities(client.images[rows]), client.labels[rows])
    stored = ctx.store.load(f"thresholds/{ctx.scope}.json")
    assert stored is not None and json.loads(stored) == {"clients": {client.name: expected}}
    assert any(cut is not None for cut in expected) and len(rows) == 30


def test_rows_have_clinical_measures_and_scores_by_patient_where_patients_are_known() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(90) % 2
    images = (rng.integers(0, 80, (90, 8, 8, 3)) + 120 * labels[:, None, None, None]).astype(np.uint8)
    patients = np.array([f"p{i // 6}-{i % 2}" for i in range(90)])  # three images each
    sites = np.array(["Nord", "Süd"])[np.arange(90) // 6 % 2]
    data = Dataset.from_arrays(
        "mine",
        images[:60],
        labels[:60],
        images[60:],
        labels[60:],
        train_patients=patients[:60],
        test_patients=patients[60:],
        train_sites=sites[:60],
        test_sites=sites[60:],
    )
    config = tiny(data={"name": "python:mine"}, clients=2, partition={"kind": "natural"}, methods=["fedavg"])
    row = runner.run(config, dataset=data)["rows"][-1]
    assert [client["client"] for client in row["clients"]] == ["Nord", "Süd"], "sites keep their names"
    images_seen = [client["test_images"]["global"] for client in row["clients"]]
    patients_seen = [client["patients"]["test_patients"]["global"] for client in row["clients"]]
    assert images_seen == [30, 30] and patients_seen == [10, 10]
    matched = [client["patients"]["accuracy"]["matched"] for client in row["clients"]]
    assert row["patients"]["accuracy"]["matched"] == pytest.approx(np.mean(matched))
    assert sum(row["clinical"]["global"]["classes"]["tp"]) + sum(row["clinical"]["global"]["classes"]["fn"]) == 60
    assert len(row["clinical"]["matched"]["curves"]["roc"]) == 2


def test_training_alone_is_chosen_by_the_metric_of_the_run() -> None:
    clients = tiny_clients(2)
    owners = {client.name: i for i, client in enumerate(clients)}
    labels = np.arange(40) % 2
    test = TestSet(labels, np.repeat([0, 1], 20))
    right = np.eye(3)[labels]
    ranked = np.stack([0.3 + 0.1 * (labels == 0), 0.1 + 0.1 * (labels == 1), np.full(40, 0.5)], 1)  # never right
    sure = np.where(np.arange(40)[:, None] % 5 == 0, 1 - right, right)  # mostly right, and badly ranked where not
    found = {"local_only": dict.fromkeys(owners, ranked), "local_only:balanced": dict.fromkeys(owners, sure)}
    chosen = {m: choose_alone(found, clients, test, owners, 3, m) for m in ("accuracy", "macro_auc")}
    assert [alone.spec for alone in chosen.values() if alone] == ["local_only:balanced", "local_only"]
