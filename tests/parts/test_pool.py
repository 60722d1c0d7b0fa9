"""The pool and its student: labels, draws, what is recorded and what it costs. The whole: methods/test_primum.py."""

from __future__ import annotations

import io
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from fedbicross import models
from fedbicross.context import Context
from fedbicross.engine.ensemble import Ensemble
from fedbicross.engine.student import Student
from fedbicross.errors import MethodError
from fedbicross.methods import create
from fedbicross.parts import pool as module
from fedbicross.parts import teachers
from fedbicross.parts.settings import PoolConfig
from fedbicross.steps.inversion import InversionSettings
from fedbicross.steps.pool import Pool
from fedbicross.steps.trajectory import Teacher
from small import refuses, tiny_clients, tiny_context

SETTINGS = InversionSettings(steps=2, batch=8)


def learn(steps: int, **settings: Any) -> PoolConfig:
    return PoolConfig(**{"steps_distil": steps, "batch": 6, "lr": 0.1, "reuse": 2, **settings})


@pytest.fixture(scope="module")
def networks() -> Ensemble:
    ctx = tiny_context()
    uploads = [create("primum").upload(c, ctx) for c in tiny_clients(3)]
    return teachers.load_ensemble(uploads, ctx, batch=8, at_once=None, passes={})


def sources(networks: Ensemble) -> dict[str, Ensemble]:
    return {f"client-{i}": networks.subset([i]) for i in range(3)}


MIXES = {
    "client-0": torch.tensor([1.0, 0.0, 3.0], dtype=torch.float64),
    "client-1": torch.tensor([0.0, 5.0, 0.0], dtype=torch.float64),
    "client-2": torch.tensor([2.0, 2.0, 2.0], dtype=torch.float64),
}


def invert(networks: Ensemble, ctx: Context, each: int = 2) -> Pool:
    return module.invert_each(sources(networks), MIXES, SETTINGS, each, "fp32", ctx)


def teacher(networks: Ensemble) -> Teacher:
    return Teacher(networks, 4.0, "consensus", torch.full((3, 3), 1 / 3), "none")


# --- images -----------------------------------------------------------------------------------------------


def test_every_client_gives_as_many_batches_with_labels_of_its_own_classes(networks: Ensemble) -> None:
    ctx = tiny_context()
    pool = invert(networks, ctx)
    assert (len(pool), pool.images) == (6, 48)
    for number in range(6):
        batch = pool.batch(number)
        name = f"client-{number // 2}"
        assert batch["source"].tolist() == [number // 2] * 8
        expected = ctx.rng("labels", name, f"batch-{number % 2}").choice(
            3, 8, p=(MIXES[name] / MIXES[name].sum()).numpy()
        )
        assert batch["labels"].tolist() == expected.tolist()
    assert set(pool.batch(0)["labels"].tolist()) <= {0, 2} and set(pool.batch(2)["labels"].tolist()) == {1}
    assert not torch.equal(pool.batch(4)["images"], pool.batch(5)["images"]), "each batch from noise of its own"


def test_images_of_a_client_do_not_depend_on_who_else_is_there(networks: Ensemble) -> None:
    everyone, alone = invert(networks, tiny_context()), sources(networks)["client-2"]
    pool = module.invert_each({"client-2": alone}, MIXES, SETTINGS, 2, "fp32", tiny_context())
    assert torch.equal(pool.batch(0)["images"], everyone.batch(4)["images"])


def test_the_labels_follow_the_class_mix() -> None:
    ctx, count = tiny_context(), 0
    for number in range(50):
        drawn = ctx.rng("labels", "client-0", f"batch-{number}").choice(3, 64, p=[0.25, 0.0, 0.75])
        count += int((drawn == 0).sum())
    assert count / 3200 == pytest.approx(0.25, abs=0.04)


# --- pages ------------------------------------------------------------------------------------------------


def pages(pool: Pool, networks: Ensemble, **settings: Any) -> Any:
    plain = {"batch": 4, "turns": False, "zoom": False, "cutmix": 0}
    return module._Pages(pool, teacher(networks), learn(**{"steps": 40, **plain, **settings}), tiny_context())


def numbered(images: int = 5) -> Pool:
    """Image i is i everywhere but for a corner, by which one sees that it was turned."""
    pool = Pool(1, "fp32")
    x = torch.arange(images).view(-1, 1, 1, 1).expand(-1, 3, 12, 12).float().clone()
    x[:, :, 0, 0] = -1
    pool.add(x, torch.zeros(images, dtype=torch.long))
    return pool


def test_any_step_can_be_made_again(networks: Ensemble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE", 3)
    there, back = (pages(numbered(), networks, turns=True, zoom=True, cutmix=2) for _ in range(2))
    forth = {step: there.at(step) for step in (0, 1, 5, 6, 7, 20)}
    for step in (20, 7, 0, 6, 5, 1):
        assert all(torch.equal(a, b) for a, b in zip(back.at(step), forth[step], strict=True))


def test_a_page_is_seen_whole_and_reuse_times_before_the_next(
    networks: Ensemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAGE", 3)
    asked = 0
    original = Teacher.original

    def counted(self: Teacher, x: Tensor) -> Tensor:
        nonlocal asked
        asked += len(x)
        return original(self, x)

    monkeypatch.setattr(Teacher, "original", counted)
    given = pages(numbered(64), networks)
    seen = [given.at(step)[0][:, 0, 1, 1].tolist() for step in range(12)]
    first, again, following = (sorted(chain(*seen[i : i + 3])) for i in (0, 3, 6))
    assert first == again != following, "the same images once more, then others"
    assert seen[:3] != seen[3:6], "in another order"
    assert asked == 2 * 12 == module.labelled(learn(12, batch=4), tiny_context())


def test_labels_are_those_of_what_is_seen(networks: Ensemble) -> None:
    images, soft = pages(invert(networks, tiny_context()), networks, turns=True, zoom=True, cutmix=1).at(0)
    torch.testing.assert_close(soft, teacher(networks).original(images))


@pytest.mark.parametrize(("cutmix", "share"), [(0, 0), (1, 1), (2, 1 / 2), (4, 1 / 4)])
def test_one_image_in_so_many_gets_a_piece_of_another(cutmix: int, share: float, networks: Ensemble) -> None:
    given = pages(numbered(1000), networks, batch=64, steps=4, reuse=1, cutmix=cutmix)
    images = torch.cat([given.at(step)[0] for step in range(4)])[:, 0].flatten(1)[:, 1:]
    mixed = float((images != images[:, :1]).any(1).float().mean())
    # Some boxes are empty, cover all, or hold only what is mirrored at the corner.
    assert mixed <= share + 1e-9 and mixed >= 0.8 * share


def test_without_turns_and_zoom_images_stay_as_they_are(networks: Ensemble) -> None:
    upright = pages(numbered(), networks, batch=64).at(0)[0]
    turned = pages(numbered(), networks, batch=64, turns=True).at(0)[0]
    zoomed = pages(numbered(), networks, batch=64, zoom=True).at(0)[0]
    assert (upright[:, 0, 0, 0] == -1).all() and not (turned[:, 0, 0, 0] == -1).all()
    assert not (zoomed[:, 0, 0, 0] == -1).all()


def test_a_page_holds_no_more_than_memory_allows_and_no_more_than_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx, many = tiny_context(), learn(10_000, batch=4, reuse=4)
    assert module.page_batches(many, ctx) == 64
    assert module.page_batches(learn(10, batch=4, reuse=4), ctx) == 3
    monkeypatch.setattr(module, "PAGE_VALUES", 2 * 4 * 3 * 12 * 12)
    assert module.page_batches(many, ctx) == 2
    monkeypatch.setattr(module, "PAGE_VALUES", 1)
    assert module.page_batches(many, ctx) == 1


# --- the student ------------------------------------------------------------------------------------------


def test_weights_that_are_no_numbers_are_not_handed_out(networks: Ensemble) -> None:
    ctx = tiny_context()
    with refuses(MethodError, "diverged", "lower its lr"):
        module.distil(invert(networks, ctx), teacher(networks), learn(4, lr=1e30), ctx)


@pytest.mark.parametrize("schedule", ["cosine", "step", "constant"])
def test_the_rate_of_every_step(schedule: str, networks: Ensemble, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx, rates = tiny_context(), list[float]()
    plain = Student.update

    def update(self: Student, gradients: Any, rate: Tensor, *rest: float) -> None:
        rates.append(float(rate))
        plain(self, gradients, rate, *rest)

    monkeypatch.setattr(Student, "update", update)
    module.distil(invert(networks, ctx), teacher(networks), learn(8, schedule=schedule), ctx)
    expected = {
        "cosine": [0.05 * (1 + np.cos(np.pi * step / 8)) for step in range(8)],
        "step": [0.1] * 4 + [0.01] * 2 + [0.001] * 2,
        "constant": [0.1] * 8,
    }
    assert rates == pytest.approx(expected[schedule])


# --- what is told of it -----------------------------------------------------------------------------------


def test_the_record_tells_of_images_student_and_loss(networks: Ensemble) -> None:
    ctx = tiny_context()
    pool = invert(networks, ctx)
    student = module.distil(pool, teacher(networks), learn(3), ctx)
    module.describe(pool, sources(networks), teacher(networks), student, ctx)
    found = ctx.record.diagnosis
    rows = found["tables"]["images inverted from the networks"]["rows"]
    agree = []
    for i, (name, source) in enumerate(sources(networks).items()):
        batches = [pool.batch(2 * i), pool.batch(2 * i + 1)]
        right = sum(int((source.logits(b["images"])[0].argmax(1) == b["labels"]).sum()) for b in batches)
        assert rows[i] == [name, pytest.approx(right / 16, abs=1e-4)]
        agree += [
            student.eval_logits(b["images"]).argmax(1) == teacher(networks).original(b["images"]).argmax(1)
            for b in batches
        ]
    (agreement,) = found["scalars"].values()
    assert agreement == pytest.approx(float(torch.cat(agree).double().mean()), abs=1e-4)
    assert "student: distillation loss" in found["curves"]
    (strip,) = found["image_strips"].values()
    picture = Image.open(io.BytesIO(ctx.store.load(strip["images"]) or b""))
    assert picture.size[0] > picture.size[1] > 0 and strip["rows"] == ["class-0", "class-1", "class-2"]


def test_networks_that_do_not_know_their_own_images_are_named(
    networks: Ensemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    for share, told in ((1.1, True), (-0.1, False)):
        monkeypatch.setattr(module, "RECOGNISED", share)
        ctx = tiny_context()
        pool = invert(networks, ctx, each=1)
        student = Student(ctx.new_model(ctx.torch_rng("student", "0")), "cpu", "fp32", False, 1)
        module.describe(pool, sources(networks), teacher(networks), student, ctx)
        assert any("client-0" in text and "alpha_bn" in text for text in ctx.record.warnings) == told


def test_costs_are_forward_passes() -> None:
    ctx = tiny_context()
    small, large = (models.forward_flops(name, 3, 3, 12) for name in ("resnet8", "wrn16_2"))
    # 40 image-steps shared evenly by two networks, 2 passes each; 30 images by both teachers, 70 by the student.
    alone = 40 * (small + large) + 30 * (small + large) + 70 * 3 * small
    assert module.flops(["resnet8", "wrn16_2"], 40, 1, 30, 70, ctx) == alone
    assert module.flops(["resnet8", "wrn16_2"], 40, 2, 30, 70, ctx) == alone + 40 * (small + large)
