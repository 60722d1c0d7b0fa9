"""What methods on frozen features share: resumable training, features kept by content, encoders that must agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedbicross import models
from fedbicross.context import Context, MemoryStore
from fedbicross.errors import ConfigError, MethodError, UploadError
from fedbicross.exchange import Predictor, Upload
from fedbicross.methods.features import EncoderConfig, Fit, check_tensors, fit_head, same_encoder, seeded, split_rows
from fedbicross.models.encoders import EncoderSpec
from fedbicross.runs.config import load_config
from fedbicross.settings import parse
from small import tiny_clients, tiny_context


def head_and_data(hidden: int = 4) -> tuple[nn.Module, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (40,), generator=rng)
    tokens = torch.randn(40, 2, 6, generator=rng) + labels.view(-1, 1, 1)
    head = models.heads.build("attention", 6, 3, hidden, 0.3)
    models.initialise(head, torch.Generator().manual_seed(1))
    return head, tokens, labels


def trained(ctx: Context, epochs: int = 6, **options: Any) -> dict[str, Tensor]:
    head, tokens, labels = head_and_data()
    validation = (tokens[30:], labels[30:])
    fit_head(
        "h", head, tokens[:30], labels[:30], ctx, epochs=epochs, batch=8, lr=1e-2, validation=validation, **options
    )
    return head.state_dict()


class Killed(Exception):
    pass


def test_training_killed_anywhere_ends_with_the_same_bytes() -> None:
    before = torch.get_rng_state()
    whole = trained(tiny_context())
    for kill_after in (1, 3, 5):
        ctx = replace(tiny_context(), seconds_between_stages=0.0)
        save, saves = ctx.save_stage, []

        def mortal(
            name: str,
            tensors: Mapping[str, Tensor],
            info: Mapping[str, Any],
            save: Callable[..., None] = save,
            saves: list[str] = saves,
            limit: int = kill_after,
        ) -> None:
            save(name, tensors, info)
            saves.append(name)
            if len(saves) == limit:
                raise Killed

        ctx.save_stage = mortal  # type: ignore[method-assign]
        with pytest.raises(Killed):
            trained(ctx)
        again = trained(replace(ctx))  # a new context on the same store
        assert all(torch.equal(whole[name], again[name]) for name in whole), kill_after
    assert torch.equal(before, torch.get_rng_state()), "dropout comes from named streams"


@pytest.mark.parametrize("optimiser", ["adam", "adamw", "sgd"])
def test_a_head_learns_with_every_optimiser(optimiser: str) -> None:
    head, tokens, labels = head_and_data()
    history = fit_head("h", head, tokens, labels, tiny_context(), epochs=15, batch=8, lr=1e-2, optimiser=optimiser)  # type: ignore[arg-type]
    assert history[-1] < history[0] and len(history) == 15 and not head.training


def test_the_best_epoch_on_validation_is_kept_or_the_last() -> None:
    ctx = tiny_context()
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)

    def loss(rows: Tensor, generator: torch.Generator) -> Tensor:
        return -module.weight.sum()  # grows by lr every step

    def fit(score: Callable[[], float] | None, name: str) -> float:
        nn.init.zeros_(module.weight)
        optimiser = torch.optim.SGD(module.parameters(), lr=1.0)
        Fit(name, module, optimiser, loss, 1, batch=1, epochs=5, ctx=ctx, score=score).run(name)
        return float(module.weight.detach())

    assert fit(None, "last") == 5
    assert fit(lambda: abs(float(module.weight.detach()) - 3), "best") == 3


def test_patience_stops_and_keeps_the_best() -> None:
    ctx, module = tiny_context(), nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)

    def loss(rows: Tensor, generator: torch.Generator) -> Tensor:
        return (module.weight.sum() - 2).abs()  # down to 0 at step 2, then oscillates between 0 and 1

    fit = Fit(
        "p", module, torch.optim.SGD(module.parameters(), lr=1.0), loss, 1, batch=1, epochs=50, ctx=ctx, patience=4
    )
    assert len(fit.run("p")) == 7, "best in epoch 3, four more in vain"


def test_a_loss_that_explodes_is_named() -> None:
    module = nn.Linear(1, 1)
    fit = Fit(
        "bad",
        module,
        torch.optim.SGD(module.parameters(), lr=1.0),
        lambda rows, generator: module.weight.sum() * float("nan"),
        3,
        batch=2,
        epochs=2,
        ctx=tiny_context(),
    )
    with pytest.raises(MethodError, match="no longer finite in epoch 1") as caught:
        fit.run("bad")
    assert caught.value.code == "diverged"


def test_seeded_dropout_depends_on_the_stream_alone() -> None:
    def draw(seed: int) -> Tensor:
        with seeded(torch.Generator().manual_seed(seed)):
            return nn.functional.dropout(torch.ones(100), 0.5)

    before = torch.get_rng_state()
    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
    assert torch.equal(before, torch.get_rng_state())


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


def test_split_is_the_same_for_all_and_whole_patients_stay_together() -> None:
    client = tiny_clients(1, per_client=40)[0]
    rows, held_out = split_rows(client, tiny_context())
    assert sorted([*rows.tolist(), *held_out.tolist()]) == list(range(40)) and len(held_out) == 4
    assert torch.equal(rows, split_rows(client, tiny_context())[0])
    people = np.array([f"p{i // 4}" for i in range(40)])
    rows, held_out = split_rows(replace(client, patients=people), tiny_context())
    assert not set(people[rows.numpy()]) & set(people[held_out.numpy()]) and len(held_out)


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
    expected = {"a": (2, 3), "n": (2,)}
    check_tensors(Upload("c", task, good), expected, whole=("n",))
    for bad, code in (
        ({**good, "b": torch.zeros(1)}, "tensor_names"),
        ({"a": good["a"]}, "tensor_names"),
        ({**good, "a": torch.zeros(3, 2)}, "tensor_shape"),
        ({**good, "a": torch.zeros(2, 3, dtype=torch.float64)}, "tensor_shape"),
        ({**good, "n": torch.zeros(2)}, "tensor_shape"),
        ({**good, "a": torch.full((2, 3), float("inf"))}, "non_finite"),
    ):
        with pytest.raises(UploadError) as caught:
            check_tensors(Upload("c", task, bad), expected, whole=("n",))
        assert caught.value.code == code and "'c'" in str(caught.value)


# --- a predictor on frozen features -------------------------------------------------------------------


def predictor(ctx: Context, count: int = 1, **options: Any) -> Predictor:
    config = parse(EncoderConfig, {"encoder": "tiny"})
    states = []
    for seed in range(count):
        head = models.heads.build("attention", 128, 3, 8)
        models.initialise(head, torch.Generator().manual_seed(seed))
        states.append(head.state_dict())
    return Predictor(ctx.task, ("attention",) * count, tuple(states), encoder=config.description(ctx), **options)


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
