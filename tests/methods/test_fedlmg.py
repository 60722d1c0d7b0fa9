from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedbicross.errors import ConfigError, UploadError
from fedbicross.federation import simulate
from fedbicross.methods import create
from small import TINY_METHODS, refuses, tiny_clients, tiny_context, with_tensor


@pytest.mark.slow
def test_the_student_learns_something_from_steered_noise() -> None:
    clients = tiny_clients(2, per_client=60)
    ctx = tiny_context(epochs=8)
    table = {"fedlmg": {"images_per_class": 16, "steps": 10, "batch_synthesis": 48, "epochs": 15, "guidance": 3.0}}
    predictor = simulate(create("fedlmg", table), clients, ctx)["client-0"]
    everyone = np.concatenate([client.images for client in clients])
    labels = np.concatenate([client.labels for client in clients])
    assert (predictor.probabilities(everyone).argmax(1) == labels).mean() > 0.5  # three classes


def test_the_stand_in_is_named_in_the_results() -> None:
    ctx = tiny_context()
    method = create("fedlmg", TINY_METHODS)
    method.fuse([method.upload(client, ctx) for client in tiny_clients(2)], ctx)
    assert any("stand-in prior" in warning for warning in ctx.record.warnings)


def test_a_kill_after_the_images_gives_the_same_bytes() -> None:
    clients = tiny_clients(2)
    ctx = tiny_context()
    method = create("fedlmg", TINY_METHODS)
    uploads = [method.upload(client, ctx) for client in clients]
    whole = method.fuse(uploads, ctx)[0].pack()
    flops = ctx.record.flops
    ctx.record.flops = 0
    ctx.store.drop(f"stages/{ctx.scope}/images-client-1.safetensors")  # as if killed before the second client
    assert method.fuse(uploads, ctx)[0].pack() == whole
    other = tiny_context()
    fresh = [method.upload(client, other) for client in clients]
    other.record.flops = 0
    method.fuse(fresh, other)
    assert ctx.record.flops == other.record.flops
    assert flops > other.record.flops


@pytest.mark.parametrize(("which", "of"), [("specific_teacher", 0), ("multi_teacher", None)])
def test_soft_labels_come_from_the_right_teacher(which: str, of: int | None) -> None:
    from fedbicross.steps.teachers import load_teachers

    ctx = tiny_context()
    method = create("fedlmg", {"fedlmg": {**TINY_METHODS["fedlmg"], "aggregation": which}})
    states = [method.upload(client, ctx).tensors for client in tiny_clients(2)]
    teachers = load_teachers(["a", "b"], ["resnet8"] * 2, states, (3, 3, 12))
    images = torch.rand(4, 3, 12, 12) * 2 - 1
    owners = torch.tensor([0, 0, 1, 1])
    soft = method._soft_labels(teachers, images, owners)
    logits = teachers.logits(images)
    for i in range(4):
        expected = logits[owners[i], i] if of is not None else logits[:, i].mean(0)
        assert torch.allclose(soft[i], torch.softmax(expected / 4.0, 0), atol=1e-6)
    assert create("fedlmg:fine_tune", TINY_METHODS)._soft_labels(teachers, images, owners) is None


def test_a_missing_diffusion_model_is_named_before_the_server_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FEDBICROSS_PRIORS", str(tmp_path))
    method = create("fedlmg", {"fedlmg": {"prior": "stable_diffusion"}})
    with pytest.raises(ConfigError) as error:
        method.fuse([], tiny_context())
    assert error.value.code in ("prior_folder", "prior_package")


@pytest.mark.parametrize(
    "settings",
    [{"prior": "stable_difusion"}, {"prompt": "an image"}, {"prompt": "{} {}"}, {"prompt": "{0.__class__} {}"}],
)
def test_bad_settings(settings: dict[str, str]) -> None:
    with refuses(ConfigError, "bad_value"):
        create("fedlmg", {"fedlmg": settings})


def test_what_is_no_network_is_refused() -> None:
    method, ctx = create("fedlmg", TINY_METHODS), tiny_context()
    upload = method.upload(tiny_clients(1)[0], ctx)
    method.check_upload(upload)
    variance = next(name for name in upload.tensors if name.endswith("running_var"))
    cases = {
        "extra_tensor": [with_tensor(upload, "images", torch.zeros(2))],
        "class_count": [with_tensor(upload, "head.bias", torch.zeros(7))],
        "tensor_dtype": [with_tensor(upload, "head.bias", torch.zeros(3, dtype=torch.float64))],
        "non_finite": [with_tensor(upload, "head.bias", torch.full((3,), float("inf")))],
        "variance": [with_tensor(upload, variance, -upload.tensors[variance] - 1)],
        "manifest": [replace(upload, extra={"k": 1})],
    }
    for code, uploads in cases.items():
        for bad in uploads:
            with refuses(UploadError, code):
                method.check_upload(bad)
