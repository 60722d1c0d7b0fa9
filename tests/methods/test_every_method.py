"""What must hold for every method, so that a new one is complete when these pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conftest import tiny_clients, tiny_context
from fedbicross.errors import ConfigError
from fedbicross.federation import Reply, Upload, check_needs
from fedbicross.methods import METHODS, create, method_names

ROOT = Path(__file__).parents[2]


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
def test_declared_needs_are_met_by_its_own_uploads(spec: str) -> None:
    method = create(spec, quick=True)
    if method.pools_data:
        return
    uploads = [method.upload(client, tiny_context()) for client in tiny_clients(2)]
    check_needs(method, uploads)
    for upload in uploads:
        if "class_counts" not in method.needs:
            assert upload.class_counts is None, "sends class counts that nobody asked for"
        if "num_samples" not in method.needs:
            assert upload.num_samples is None, "sends its size though nobody asked for it"


@pytest.mark.parametrize("spec", method_names())
def test_no_upload_holds_an_image(spec: str) -> None:
    method = create(spec, quick=True)
    if method.pools_data:
        return
    client = tiny_clients(1)[0]
    upload = method.upload(client, tiny_context())
    sent = b"".join(
        value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for value in upload.tensors.values()
    )
    for image in client.images:
        assert image.tobytes() not in sent
        assert (image.astype("float32") / 127.5 - 1).tobytes() not in sent


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
