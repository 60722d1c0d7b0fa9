"""Features of frozen encoders: kept by content, of one encoder for all, and predictors that go through it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedbicross import models
from fedbicross.context import Context, MemoryStore
from fedbicross.errors import ConfigError, MethodError, UploadError
from fedbicross.messages import Predictor, Upload
from fedbicross.models.encoders import EncoderSpec
from fedbicross.parts.features import check_tensors, describe, same_encoder
from fedbicross.parts.settings import EncoderConfig
from fedbicross.runs.config import load_config
from fedbicross.settings import parse
from small import tiny_clients, tiny_context


def test_settings_become_views() -> None:
    config = parse(EncoderConfig, {"encoder": "tiny"})
    assert config.spec(28) == EncoderSpec("tiny", 28, 14, 14)
    assert config.spec(448) == EncoderSpec("tiny", 28, 224, 224), "the paper's 224 at 448 px"
    assert parse(EncoderConfig, {"encoder": "tiny", "hierarchy": False}).spec(28) == EncoderSpec("tiny", 28)
    values = {"encoder": "tiny", "encoder_size": 32, "window": 12, "stride": 8}
    assert parse(EncoderConfig, values).spec(28) == EncoderSpec("tiny", 32, 12, 8)
    assert parse(EncoderConfig, {}).encoder == "dinov2_base", "the paper's"
    with pytest.raises(ConfigError, match="did you mean 'tiny'"):
        parse(EncoderConfig, {"encoder": "tinny"})


def test_a_missing_encoder_is_noticed_before_any_work(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBICROSS_ENCODERS", str(tmp_path))
    with pytest.raises(ConfigError, match="dinov2_base"):
        load_config(None, {"methods": ["falcon"]})
    load_config(None, {"methods": ["falcon"], "method": {"falcon": {"encoder": "tiny"}}})


def test_features_are_shared_timed_once_and_charged_to_all() -> None:
    ctx, events = tiny_context(), []
    ctx.event = lambda **fields: events.append(fields)
    client, spec = tiny_clients(1)[0], EncoderSpec("tiny", 28, 6, 6)
    first = ctx.features(client, spec)
    flops, files = ctx.record.flops, len(ctx.store._names)  # type: ignore[attr-defined]
    assert first.shape == (24, 5, 128) and flops > 0
    assert torch.equal(first, ctx.features(client, spec)) and ctx.record.flops == 2 * flops
    assert torch.equal(first[:3], ctx.features(client.images[:3], spec))
    assert len(ctx.store._names) == files  # type: ignore[attr-defined]
    keys = [event["key"] for event in events if event["event"] == "encoded"]
    assert len(keys) == 10 and len(set(keys)) == 5 and ctx.record.local_models == keys[:5]
    ctx.features(client, EncoderSpec("tiny", 28, None, None))  # a method without windows pays for the whole image
    assert events[-1]["key"] == keys[0] and len(ctx.store._names) == files  # type: ignore[attr-defined]


def test_uploads_of_two_encoders_are_not_mixed() -> None:
    task = tiny_context().task
    one, other = ({"encoder": {"name": "tiny", "digest": d}} for d in "ab")
    uploads = [Upload("a", task, extra=one), Upload("b", task, extra=one)]
    assert same_encoder(uploads) == one["encoder"]
    for bad in (other, {}, {"encoder": "tiny"}):
        with pytest.raises(UploadError, match="'c' used another encoder than 'a'"):
            same_encoder([*uploads, Upload("c", task, extra=bad)])


def test_tensors_of_an_upload_are_exactly_those_declared() -> None:
    task = tiny_context().task
    good = {"a": torch.zeros(2, 3), "n": torch.zeros(2, dtype=torch.int64)}
    expected = {"a": (torch.float32, (2, None)), "n": (torch.int64, (2,))}
    check_tensors(Upload("c", task, good), expected)
    check_tensors(Upload("c", task, {**good, "a": torch.zeros(2, 5)}), expected)
    for bad, code in (
        ({**good, "b": torch.zeros(1)}, "tensor_names"),
        ({"a": good["a"]}, "tensor_names"),
        ({**good, "a": torch.zeros(3, 2)}, "tensor_shape"),
        ({**good, "a": torch.zeros(2, 3, dtype=torch.float64)}, "tensor_type"),
        ({**good, "n": torch.zeros(2)}, "tensor_type"),
        ({**good, "a": torch.zeros(2, 3, 1)}, "tensor_type"),
        ({**good, "a": torch.full((2, 3), float("inf"))}, "non_finite"),
    ):
        with pytest.raises(UploadError) as caught:
            check_tensors(Upload("c", task, bad), expected)
        assert caught.value.code == code and "'c'" in str(caught.value)


# --- a predictor on frozen features -------------------------------------------------------------------


def predictor(ctx: Context, count: int = 1, **options: Any) -> Predictor:
    config = parse(EncoderConfig, {"encoder": "tiny"})
    states = []
    for seed in range(count):
        head = models.heads.build("attention", 128, 3, 8)
        models.initialise(head, torch.Generator().manual_seed(seed))
        states.append(head.state_dict())
    return Predictor(ctx.task, ("attention",) * count, tuple(states), encoder=describe(config, ctx), **options)


def test_predictor_travels_with_its_encoder_and_answers_through_it() -> None:
    ctx, client = tiny_context(), tiny_clients(1)[0]
    made = predictor(ctx)
    again = Predictor.unpack(made.pack())
    assert again.encoder == made.encoder and made.encoder is not None
    tokens = ctx.features(client, EncoderSpec("tiny", 28, 6, 6))
    with torch.no_grad():
        head = models.heads.load("attention", made.states[0], 3)
        expected = head(tokens).softmax(1).numpy()
    store = MemoryStore()
    for answer in (again.probabilities(client.images), again.probabilities(client.images, store=store)):
        np.testing.assert_allclose(answer, expected, atol=1e-6)
    assert again.probabilities(client.images[:0]).shape == (0, 3)


def test_predictor_mixes_heads() -> None:
    ctx, images = tiny_context(), tiny_clients(1)[0].images
    shares = torch.tensor([[0.25] * 3, [0.75] * 3])
    mixed = predictor(ctx, 2, combine="class_weighted", class_weights=shares).probabilities(images)
    pair = predictor(ctx, 2)
    alone = [replace(pair, architectures=("attention",), states=(s,)).probabilities(images) for s in pair.states]
    np.testing.assert_allclose(mixed, 0.25 * alone[0] + 0.75 * alone[1], atol=1e-6)


def test_predictor_refuses_other_weights_under_the_same_name() -> None:
    ctx = tiny_context()
    made = predictor(ctx)
    forged = replace(made, encoder={**(made.encoder or {}), "digest": "0" * 64})
    with pytest.raises(MethodError, match="other weights"):
        forged.probabilities(tiny_clients(1)[0].images)
