"""One door before the server: what is refused between sites is refused in a simulation too, and by the same code."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedbicross import pipeline
from fedbicross.bundle import sign
from fedbicross.errors import ConfigError, FedBiCrossError, MethodError, UploadError
from fedbicross.federation import simulate
from fedbicross.messages import Predictor, Reply, Upload
from fedbicross.methods import create
from fedbicross.methods.analytic import Analytic
from fedbicross.methods.fedavg import FedAvg
from fedbicross.parts import gate, local
from fedbicross.transport import files
from imports import SOURCE
from small import code_of, refuses, tiny_clients, tiny_context, with_tensor
from transport.sites import Sites, make_sites


def overflowing(upload: Upload) -> Upload:
    """Every weight is within its limits, and the answers are none."""
    full = {name: torch.full_like(value, 1e6) for name, value in upload.tensors.items() if name.endswith("weight")}
    flat = {
        name: torch.full_like(value, 1e-12) for name, value in upload.tensors.items() if name.endswith("running_var")
    }
    return replace(upload, tensors={**upload.tensors, **full, **flat})


FORGERIES: dict[str, Callable[[Upload], Upload]] = {
    "extra_tensor": lambda upload: with_tensor(upload, "a_patient", torch.ones(3)),
    "missing_tensor": lambda upload: replace(
        upload, tensors={name: value for name, value in upload.tensors.items() if name != "head.bias"}
    ),
    "magnitude": lambda upload: with_tensor(upload, "head.bias", torch.full((3,), 1e9)),
    "answers": overflowing,
    "manifest": lambda upload: replace(upload, extra={"patients": "A, B and C"}),
    "class_counts": lambda upload: replace(upload, class_counts=[10, 20], num_samples=30),
    "needs_num_samples": lambda upload: replace(upload, num_samples=None),
    "task_classes": lambda upload: replace(upload, task=replace(upload.task, classes=("x", "y", "z"))),
    "task_preprocessing": lambda upload: replace(upload, preprocessing="x/255"),
}


@pytest.fixture(scope="module")
def sites() -> Sites:
    return make_sites(class_counts={"smallest": 0})


@pytest.fixture(scope="module")
def honest(sites: Sites) -> dict[str, Upload]:
    ctx = sites.simulation()
    return {client.name: sites.federation.build().upload(client, ctx) for client in sites.clients}


@pytest.mark.parametrize("name", FORGERIES)
def test_every_carrier_has_the_same_door(
    name: str, sites: Sites, honest: dict[str, Upload], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    agreed, client = sites.federation, sites.clients[1]
    key = sites.client_keys[client.name]
    forged = FORGERIES[name](honest[client.name])
    sent = {**honest, client.name: forged}
    monkeypatch.setattr(FedAvg, "upload", lambda self, client, ctx, previous=None: sent[client.name])
    monkeypatch.setattr(FedAvg, "fuse", lambda *given: pytest.fail("was fused"))

    signed = sign(replace(forged, run_id=agreed.run, agreement=agreed.agreement).pack(), key)
    assert code_of(FedBiCrossError, files.verify_upload, agreed, signed) == name  # at the server
    assert code_of(FedBiCrossError, files.make_upload, agreed, client, key, tmp_path) == name  # at the site
    with refuses(FedBiCrossError, name, client.name):  # in a simulation
        simulate(agreed.build(), sites.clients, sites.simulation())


def test_who_differs_from_the_others_is_told_the_same_by_every_carrier(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not one file shows it, but all of them together: each is taken by itself."""
    sites = make_sites("analytic", settings={"encoder": "tiny"}, class_counts={"smallest": 0})
    agreed, ctx, bad = sites.federation, sites.simulation(), sites.clients[1].name
    sent = {client.name: agreed.build().upload(client, ctx) for client in sites.clients}
    other = {**sent[bad].extra["encoder"], "digest": "0" * 64}
    sent[bad] = replace(sent[bad], extra={**sent[bad].extra, "encoder": other})
    monkeypatch.setattr(Analytic, "upload", lambda self, client, ctx, previous=None: sent[client.name])
    monkeypatch.setattr(Analytic, "fuse", lambda *given: pytest.fail("was fused"))
    paths = [tmp_path / f"{name}.safetensors" for name in sent]
    for (name, upload), path in zip(sent.items(), paths, strict=True):
        same = {"run_id": agreed.run, "agreement": agreed.agreement}
        path.write_bytes(sign(replace(upload, **same).pack(), sites.client_keys[name]))
        files.verify_upload(agreed, path.read_bytes())

    looked_at = {path.stem: error for path, _, error in files.verify_files(agreed, paths) if error}
    received = files.receive(agreed, {path.stem: path for path in paths}).refused
    for refused in (looked_at, {name: one.error for name, one in received.items()}):  # at the server
        assert {name: error.code for name, error in refused.items()} == {bad: "encoder_mismatch"}
    with refuses(UploadError, "encoder_mismatch", bad):  # in a simulation
        simulate(agreed.build(), sites.clients, ctx)


def test_an_architecture_that_the_method_cannot_mix_is_refused_at_the_door(honest: dict[str, Upload]) -> None:
    upload = next(iter(honest.values()))
    other = replace(upload, task=replace(upload.task, model="wrn16_2"))
    with refuses(MethodError, "mixed_models"):
        pipeline.check_upload(create("fedavg"), other, upload.task)


def test_a_model_that_no_site_would_take_is_refused_in_a_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: FedAvg, client: Any, reply: Reply, ctx: Any) -> Predictor:
        return Predictor(ctx.task, ("wrn16_2",), (dict(reply.tensors),))

    monkeypatch.setattr(FedAvg, "personalize", wrong)
    with pytest.raises(UploadError, match="weights of a resnet8"):
        simulate(create("fedavg"), tiny_clients(2), tiny_context(epochs=1))


def test_verbs_are_run_in_one_place() -> None:
    calls = {
        file.relative_to(SOURCE).as_posix()
        for file in SOURCE.rglob("*.py")
        if file.parent.name != "methods" and re.search(r"\bmethod\.(upload|fuse)\b", file.read_text())
    }
    assert calls == {"pipeline.py"}


def test_any_model_for_all_can_be_put_before_the_gate() -> None:
    clients, ctx = tiny_clients(2), tiny_context()
    plain, gated = create("fedavg"), create("fedavg:personal")
    assert gated.gated and not plain.gated and gated.config == plain.config
    uploads = [gated.upload(client, ctx) for client in clients]
    (reply, _) = gated.fuse(uploads, ctx)
    personal = pipeline.personalize(gated, clients[0], reply, ctx, "a")
    own = local.own_model(clients[0], ctx, None)
    expected = gate.gated(clients[0], own, plain.personalize(clients[0], reply, ctx), ctx)
    assert personal.pack() == expected.pack()


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        ("local_only:personal", "no_gate"),
        ("fedbicross:personal", "no_gate"),
        ("centralised:personal", "no_gate"),
        ("ensemble:class_weighted:personal", "no_gate"),
        ("nothing:personal", "unknown_method"),
    ],
)
def test_what_has_no_model_for_all_has_no_gate(spec: str, code: str) -> None:
    with refuses(ConfigError, code):
        create(spec)


def test_the_gate_makes_a_model_for_each_client_in_a_simulation() -> None:
    models = simulate(create("ensemble:consensus:personal"), tiny_clients(3), tiny_context())
    assert len({id(model) for model in models.values()}) == 3
