"""What must hold for every method, so that a new one is complete when these pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedbicross.context import Context
from fedbicross.errors import ConfigError
from fedbicross.federation import Reply, Upload, check_needs, records, simulate
from fedbicross.methods import METHODS, create, method_names
from small import TINY_METHODS, tiny_clients, tiny_context

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


@pytest.mark.parametrize("spec", method_names())
def test_declared_needs_are_met_by_its_own_uploads(spec: str, shared: Context) -> None:
    method = create(spec, TINY_METHODS)
    if method.pools_data:
        return
    uploads = [method.upload(client, shared) for client in tiny_clients(2)]
    check_needs(method, uploads)
    for upload in uploads:
        if "class_counts" not in method.needs:
            assert upload.class_counts is None, "sends class counts that nobody asked for"
        if "num_samples" not in method.needs:
            assert upload.num_samples is None, "sends its size though nobody asked for it"


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


@pytest.mark.parametrize("spec", method_names())
def test_every_variant_runs_and_answers(spec: str, shared: Context) -> None:
    clients = tiny_clients(3)
    ctx = replace(shared, scope=f"seed-0/{spec.replace(':', '-')}")
    predictors = simulate(create(spec, TINY_METHODS), clients, ctx)
    assert list(predictors) == [client.name for client in clients]
    for predictor in predictors.values():
        answers = predictor.probabilities(clients[0].images)
        assert np.isfinite(answers).all()
        assert np.allclose(answers.sum(1), 1, atol=1e-4)
    kept = records(ctx, list(predictors), create(spec, TINY_METHODS).rounds)
    assert sum(record["flops"] for record in kept) > 0 or spec == "majority"


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'fedavg'"):
        create("fedavgg")
    with pytest.raises(ConfigError, match="did you mean 'class_weighted'"):
        create("ensemble:class_weight")
    with pytest.raises(ConfigError, match="did you mean 'rounds'"):
        create("fedavg", {"fedavg": {"round": 3}})


def test_settings_of_the_name_yield_to_the_variant_and_its_own_win() -> None:
    table = {"fedavg": {"rounds": 7, "weighting": "size"}, "fedavg:uniform": {"local_epochs": 3}}
    config = create("fedavg:uniform", table).config
    assert (config.rounds, config.weighting, config.local_epochs) == (7, "uniform", 3)
    assert create("fedavg", table).config.local_epochs == 1


def test_bundles_are_what_the_verbs_exchange() -> None:
    method = create("fedavg")
    ctx = tiny_context()
    uploads = [Upload.unpack(method.upload(client, ctx).pack()) for client in tiny_clients(2)]
    replies = [Reply.unpack(reply.pack()) for reply in method.fuse(uploads, ctx)]
    assert len(replies) == 2
