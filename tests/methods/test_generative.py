"""What DAFL, DENSE and Co-Boosting share, beside what test_synthesis.py tests for them: costs, and the diagnosis."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import slow
import torch
from PIL import Image

from fedbicross import models
from fedbicross.context import Context
from fedbicross.errors import ConfigError
from fedbicross.federation import simulate
from fedbicross.messages import Client, Upload
from fedbicross.methods import create
from fedbicross.steps import generators
from small import TINY_METHODS, tiny_clients, tiny_context

NAMES = ["dafl", "dense", "co_boosting"]
each = pytest.mark.parametrize("name", NAMES)
SMALL = {"epochs": 2, "steps": 2}


def tiny(spec: str, **settings: Any) -> Any:
    name = spec.partition(":")[0]
    return create(spec, {name: {**TINY_METHODS[name], **SMALL, **settings}})


# --- bad input -------------------------------------------------------------------------------------------


@each
def test_bad_settings_are_refused_by_name(name: str) -> None:
    wrong = {"steps": 0, "batch": 1, "latent": 0, "width": 1, "temperature": 0.0, "lr": -1.0, "lr_generator": 0.0}
    pool = {"pool": 0, "storage": "png", "keep": "first", "augment": "rotate", "steps_distil": 0}
    for key, value in {**wrong, "clip": 0.0, "schedule": "never", **({} if name == "dafl" else pool)}.items():
        with pytest.raises(ConfigError, match=f"method.{name}.{key}"):
            create(name, {name: {key: value}})


PARTS: dict[str, list[dict[str, Any]]] = {
    "dafl": [{"weight_onehot": 0.0}, {"weight_entropy": 0.0}, {"weight_activation": 0.0}, {"losses": "written"}],
    "dense": [
        {"alpha_bn": 0.0}, {"alpha_adv": 0.0}, {"reset": True}, {"pool": 1}, {"keep": "best"}, {"augment": "flip"},
    ],
    "co_boosting": [
        {"weight_step": "gradient"}, {"hardness": 0.0}, {"alpha_adv": 0.0}, {"epsilon": 0.0}, {"weight_step": "none"},
    ],
}  # fmt: skip


@pytest.mark.slow
@each
def test_every_part_of_the_algorithm_matters(name: str, uploads: list[Upload]) -> None:
    def head(**settings: Any) -> torch.Tensor:
        storage = {} if name == "dafl" else {"storage": "fp32"}
        return tiny(name, lr=0.02, **storage, **settings).fuse(uploads, tiny_context())[0].tensors["head.weight"]

    usual = head()
    for other in PARTS[name]:
        assert (head(**other) - usual).abs().max() > 1e-6, other


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("spec", ["dafl", "dense", "co_boosting"])
@pytest.mark.parametrize("at_once", [1, 2])
def test_clients_a_few_at_a_time_give_the_same(spec: str, at_once: int, uploads: list[Upload]) -> None:
    whole = tiny(spec).fuse(uploads, tiny_context())[0].tensors
    parts = tiny(spec, teachers_at_once=at_once).fuse(uploads, tiny_context())[0].tensors
    slow.assert_same_state(parts, whole)


@each
def test_more_classes_than_images_in_a_batch(name: str) -> None:
    ctx, clients = tiny_context(classes=6), tiny_clients(2, classes=2)
    predictors = simulate(tiny(name, batch=4), clients, ctx)
    assert np.isfinite(predictors["client-0"].probabilities(clients[0].images)).all()


# --- costs and diagnosis ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_costs_count_forward_passes(uploads: list[Upload]) -> None:
    one = models.forward_flops("resnet8", 3, 3, 12)

    def spent(spec: str, **settings: Any) -> int:
        ctx = tiny_context()
        tiny(spec, **settings).fuse(uploads, ctx)
        return ctx.record.flops

    def generator(**kind: Any) -> int:
        return generators.forward_flops(generators.GeneratorSettings(latent=8, width=8, lr=1e-3, **kind), 3, 12)

    made, learned, epochs = 4, 3, 2  # two epochs of two steps; pools of one and of two batches
    step = 2 * 3 * one + 2 * one + 3 * generator()
    assert spent("dense") == 12 * (made * step + epochs * 3 * one + learned * 3 * one)
    assert spent("dense", augment="flip") == 12 * (made * step + learned * (3 + 3) * one)
    assert spent("co_boosting") == 12 * (made * step + learned * (9 + 3) * one)
    assert spent("co_boosting", epsilon=0.0) == 12 * (made * step + learned * (3 + 3) * one)
    assert spent("dafl") == 12 * 4 * (2 * 3 * one + 3 * one + 3 * generator(output="tanh", eps=0.8, init="uniform"))


@each
def test_a_record_tells_what_happened(name: str, trained: Context) -> None:
    ctx = replace(trained, scope=f"seed-0/{name}")
    long = [Client("n" * 500 + str(i), c.images, c.labels) for i, c in enumerate(tiny_clients(3))]
    simulate(tiny(name), long, ctx)
    found = json.loads(ctx.store.load(f"records/fuse/seed-0/{name}/server.json"))
    assert "n" * 50 not in json.dumps(found), "long names appear shortened"
    diagnosis = found["diagnosis"]
    assert 0 <= diagnosis["scalars"]["student: soft-label entropy (0 sure, 1 uniform)"] <= 1
    assert 0 <= diagnosis["scalars"]["student: student agrees with its teacher on synthetic images"] <= 1
    rows = diagnosis["tables"]["student: variety of the images"]["rows"]
    assert all(row[0].startswith("class-") and row[1] >= 0 for row in rows)
    terms = {
        "dafl": {"generator", "one-hot", "entropy", "activation"},
        "dense": {"generator", "cross-entropy", "batch norm", "boundary support"},
        "co_boosting": {"generator", "hard cross-entropy", "batch norm", "adversarial"},
    }
    made, learned = (diagnosis["curves"][f"student: {what} loss"] for what in ("generator", "distillation"))
    assert set(made["series"]) == terms[name] and made["x"] == [1, 2, 3, 4]
    assert learned["x"] == ([1, 2, 3, 4] if name == "dafl" else [1, 2, 3])
    assert all(len(values) == len(curve["x"]) for curve in (made, learned) for values in curve["series"].values())
    strip = diagnosis["image_strips"]["student: synthetic images"]
    assert strip["rows"] == ["class-0", "class-1", "class-2"] and strip["columns"] == ["epoch 1", "epoch 2"]
    picture = Image.open(io.BytesIO(ctx.store.load(strip["images"])))
    assert picture.format == "PNG" and picture.height >= 36


@each
def test_a_generator_that_collapsed_is_noticed(
    name: str, uploads: list[Upload], monkeypatch: pytest.MonkeyPatch
) -> None:
    def grey(self: generators.ImageGenerator, z: torch.Tensor | None = None) -> torch.Tensor:
        return torch.zeros(12, 3, 12, 12) + 0 * sum(value.sum() for value in self._learned)

    monkeypatch.setattr(generators.ImageGenerator, "images", grey)
    ctx = tiny_context()
    tiny(name).fuse(uploads, ctx)
    assert any("the generator collapsed" in warning for warning in ctx.record.warnings)
    assert any("no structure" in warning for warning in ctx.record.warnings)
