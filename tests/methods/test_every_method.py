"""What must hold for every method, so that a new one is complete when these pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedbicross import pipeline
from fedbicross.bundle import validate
from fedbicross.context import Context
from fedbicross.errors import MethodError
from fedbicross.federation import records, simulate
from fedbicross.messages import Client, Upload
from fedbicross.methods import METHODS, create, method_names
from small import TINY_METHODS, tiny_clients, tiny_context, variants_later

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def shared() -> Context:
    """One store for all tests here, so that the clients are trained once."""
    return tiny_context()


@pytest.mark.parametrize("name", METHODS)
def test_same_stem_everywhere(name: str) -> None:
    for file in (f"src/fedbicross/methods/{name}.py", f"tests/methods/test_{name}.py", f"docs/methods/{name}.md"):
        assert (ROOT / file).exists(), file
    assert METHODS[name].name == name
    page = (ROOT / f"docs/methods/{name}.md").read_text()
    for heading in ("What leaves the hospital", "When not to use it"):
        assert heading in page
    for variant in METHODS[name].variants:
        assert f"{name}:{variant}" in page, variant
    for setting in METHODS[name].Config.model_fields:
        assert f"`{setting}`" in page, setting


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_says_what_it_is(name: str) -> None:
    for setting, field in METHODS[name].Config.model_fields.items():
        assert field.description, setting
    assert set(METHODS[name].variant_notes) == set(METHODS[name].variants)


@pytest.mark.parametrize("spec", variants_later(method_names()))
def test_its_own_uploads_pass_the_door_of_the_server(spec: str, shared: Context) -> None:
    method = create(spec, TINY_METHODS)
    if method.pools_data:
        return
    first, second = tiny_clients(2)
    for client in (first, second, *(Client("few", first.images[:n], first.labels[:n]) for n in (1, 2))):
        upload = Upload.unpack(method.upload(client, shared).pack())
        pipeline.check_upload(method, upload, shared.task)  # where it sends no plain network: by a check of its own
        if "class_counts" not in method.needs:
            assert upload.class_counts is None, "sends class counts that nobody asked for"
        if "num_samples" not in method.needs:
            assert upload.num_samples is None, "sends its size though nobody asked for it"


@pytest.mark.parametrize("name", METHODS)
def test_what_a_client_has_alone(name: str, shared: Context) -> None:
    """A model of the same kind that nobody else had a part in; some images are kept from it."""
    method, client = create(name, TINY_METHODS), tiny_clients(1)[0]
    own = method.alone(client, shared)
    validate.check_predictor(own)
    on_features = "encoder" in type(method.config).model_fields
    assert (own.encoder is not None) == on_features
    rows = method.held_back(client, shared)
    assert 0 < len(rows) < len(client.labels) and len(set(rows.tolist())) == len(rows)
    if on_features:
        expected = create("local_head", TINY_METHODS).held_back(client, shared)
    else:
        expected = shared.validation_rows(client)
    assert np.array_equal(rows, expected)


@pytest.mark.parametrize("spec", method_names())
def test_no_upload_holds_an_image(spec: str, shared: Context) -> None:
    method = create(spec, TINY_METHODS)
    if method.pools_data:
        return
    client = tiny_clients(1)[0]
    upload = method.upload(client, shared)
    sent = b"".join(
        value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for value in upload.tensors.values()
    )
    for image in client.images:
        assert image.tobytes() not in sent
        assert (image.astype("float32") / 127.5 - 1).tobytes() not in sent


LEAST = {"steps": 2, "batch": 6, "epochs": 2, "steps_distil": 2}  # two, so that something goes from one to the next
SHORTEST = {
    name: {key: min(value, LEAST[key]) if key in LEAST else value for key, value in table.items()}
    for name, table in TINY_METHODS.items()
}


@pytest.mark.parametrize("spec", variants_later(method_names()))
def test_every_variant_runs_and_answers(spec: str, shared: Context) -> None:
    clients = tiny_clients(3)
    ctx = replace(shared, scope=f"seed-0/{spec.replace(':', '-')}")
    predictors = simulate(create(spec, SHORTEST), clients, ctx)
    assert list(predictors) == [client.name for client in clients]
    for predictor in predictors.values():
        answers = predictor.probabilities(clients[0].images)
        assert np.isfinite(answers).all()
        assert np.allclose(answers.sum(1), 1, atol=1e-4)
    kept = records(ctx, list(predictors), create(spec, SHORTEST).rounds)
    assert sum(record["flops"] for record in kept) > 0 or spec == "majority"


ARCHITECTURES = {"client-1": "wrn16_2"}  # the others have the server's
NEED_ONE = {spec for spec in method_names() if create(spec, TINY_METHODS).mixed_models_error}


@pytest.mark.parametrize("spec", method_names())
def test_it_says_whether_clients_may_have_different_architectures(spec: str) -> None:
    assert "does not say" not in (create(spec, TINY_METHODS).mixed_models_error or ""), (
        "that is what the base class says"
    )


@pytest.mark.parametrize("spec", sorted(NEED_ONE))
def test_clients_of_different_architectures_are_refused_before_any_work(spec: str, shared: Context) -> None:
    ctx, events = replace(shared, client_models=ARCHITECTURES), list[str]()
    ctx.event = lambda **fields: events.append(fields["event"])
    with pytest.raises(MethodError, match="architecture") as caught:
        simulate(create(spec, TINY_METHODS), tiny_clients(3), ctx)
    assert caught.value.code == "mixed_models" and events == []


# Variants differ in nothing that depends on an architecture.
@pytest.mark.slow
@pytest.mark.parametrize("spec", [name for name in METHODS if name not in NEED_ONE])
def test_clients_of_different_architectures_take_part(spec: str, shared: Context) -> None:
    clients, method = tiny_clients(3), create(spec, SHORTEST)
    ctx = replace(shared, scope=f"seed-0/mixed-{spec}", client_models=ARCHITECTURES)
    for predictor in simulate(method, clients, ctx).values():
        answers = predictor.probabilities(clients[0].images)
        assert np.isfinite(answers).all() and np.allclose(answers.sum(1), 1, atol=1e-4)
        assert predictor.task.model == "resnet8", "the task stays the server's"
    if not method.pools_data and method.needs:
        manifests = [Upload.unpack(method.upload(client, ctx).pack()).task.model for client in clients]
        assert manifests == ["resnet8", "wrn16_2", "resnet8"]


HUNDRED = {  # the other methods' hundred clients are in tests/runs/test_runner.py
    "fedisca": {"steps": 1, "batch": 6, "epochs": 2, "teachers_at_once": 7},
    "primum": {"steps": 1, "batch": 6, "steps_distil": 2},
    "fedbicross": {"steps": 1, "batch": 6, "trajectories": 1, "probes": 4, "epochs_personal": 1, "clusters": 3},
}


@pytest.fixture(scope="module")
def crowd() -> Context:
    return tiny_context(size=8, epochs=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", HUNDRED)
def test_a_hundred_clients(name: str, crowd: Context) -> None:
    clients = tiny_clients(100, per_client=3, size=8)
    predictors = simulate(create(name, HUNDRED), clients, replace(crowd, scope=f"seed-0/{name}"))
    assert len(predictors) == 100
    for client in ("client-0", "client-99"):
        assert np.isfinite(predictors[client].probabilities(clients[0].images)).all()


def test_settings_of_the_name_yield_to_the_variant_and_its_own_win() -> None:
    table = {"fedavg": {"rounds": 7, "weighting": "size"}, "fedavg:uniform": {"local_epochs": 3}}
    config = create("fedavg:uniform", table).config
    assert (config.rounds, config.weighting, config.local_epochs) == (7, "uniform", 3)
    assert create("fedavg", table).config.local_epochs == 1


def _numbers(tensors: object) -> set[bytes]:
    """Every tensor of more than a few numbers, as bytes: what could be somebody's network."""
    return {value.numpy().tobytes() for value in tensors.values() if value.numel() > 8}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", METHODS)
def test_what_other_sites_receive_is_what_it_says(name: str, shared: Context) -> None:
    """Whoever says that uploads are not handed on hands none on; and the ensemble does."""
    method = create(name, SHORTEST)
    if method.pools_data:
        return
    clients = tiny_clients(3)
    ctx = replace(shared, scope=f"receives/{name}")
    uploads = [method.upload(client, ctx) for client in clients]
    replies = pipeline.fuse(method, uploads, ctx, f"receives/{name}")
    theirs = set.union(*(_numbers(upload.tensors) for upload in uploads[1:])) - _numbers(uploads[0].tensors)
    found = _numbers(replies[0].tensors) & theirs
    if method.others_receive == "every_upload":
        assert found == theirs != set()
    else:
        assert not found
    assert replies[0].empty == (method.others_receive == "nothing")
