from __future__ import annotations

import pytest
import torch

from fedbicross.errors import MethodError, UploadError
from fedbicross.messages import Upload
from fedbicross.methods import create
from fedbicross.methods.base import check_needs
from small import refuses, tiny_context


def test_an_upload_without_what_the_method_needs_is_refused_by_name() -> None:
    upload = Upload("a", tiny_context().task, {"w": torch.ones(1)})
    with refuses(MethodError, "needs_class_counts", "'a' did not send"):
        check_needs(create("ensemble:class_weighted"), [upload])
    check_needs(create("ensemble"), [upload])


@pytest.mark.parametrize("spec", ["fedavg:multi_round", "e_fedisca:two_shots", "falcon", "fedpft", "fedcgs", "fedlmg"])
def test_words_that_a_method_would_not_read_are_refused_whatever_else_it_says(spec: str) -> None:
    method = create(spec)
    spoken: dict[str, object] = {key: {} if key == "encoder" else 1 for key in method.extra_keys}
    upload = Upload("a", tiny_context().task, extra={**spoken, "name of the patient": "x"})
    with refuses(UploadError, "manifest", "name of the patient"):
        method.check_upload(upload)
    method.check_extra(Upload("a", tiny_context().task, extra=spoken))


@pytest.mark.parametrize("number", [0, 101, "1", 1.0, True, None])
def test_a_round_that_does_not_exist_is_refused(number: object) -> None:
    method, ctx = create("fedavg:multi_round"), tiny_context()
    state = ctx.new_model(ctx.torch_rng("x")).state_dict()
    state = {k: torch.ones_like(v) if k.endswith("num_batches_tracked") else v for k, v in state.items()}
    method.check_upload(Upload("a", ctx.task, state, num_samples=3, extra={"round": 2}))
    with pytest.raises(UploadError, match="there is no round"):
        method.check_upload(Upload("a", ctx.task, state, num_samples=3, extra={"round": number}))


def test_what_methods_on_features_say_must_make_sense() -> None:
    task = tiny_context().task
    for spec, extra, code in (
        ("local_head", {"encoder": {}}, "manifest"),
        ("fedpft", {"covariance": {"any": "thing"}}, "manifest"),
        ("fedpft", {"encoder": "text"}, "encoder_mismatch"),
    ):
        with refuses(UploadError, code):
            create(spec).check_upload(Upload("a", task, class_counts=[0, 0, 0], extra=extra))


def test_a_variant_that_is_called_like_the_gate_stays_a_variant() -> None:
    assert not create("falcon:personal").gated and create("fedisca:ema:personal").gated
