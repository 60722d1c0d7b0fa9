"""DENSE against its algorithm written out in plain torch, and its batch-norm term, which the released code lacks."""

from __future__ import annotations

from typing import Any

import pytest
import slow
import slow_generators as plainly
import torch
import torch.nn.functional as F
from torch import Tensor

from fedbicross.context import Context
from fedbicross.errors import ConfigError, MethodError
from fedbicross.messages import Upload
from fedbicross.methods import create
from fedbicross.methods.base import check_needs
from fedbicross.methods.dense import generator_loss
from fedbicross.parts.students import new_student
from fedbicross.parts.teachers import load_ensemble
from fedbicross.runs.config import load_config
from small import TINY_METHODS, first_in_check, refuses, tiny_clients, tiny_context

SETTINGS = {**TINY_METHODS["dense"], "epochs": 2, "steps": 2, "storage": "fp32", "lr": 0.02}


def made(variant: str = "", **settings: Any) -> Any:
    return create(f"dense{variant}", {"dense": {**SETTINGS, **settings}})


def loss_of(config: Any, clients: Any, pupil: slow.Pupil, x: Tensor, labels: Tensor) -> Tensor:
    """L_CE + λ₁ L_BN + λ₂ L_div, image by image."""
    teacher, student = sum(network(x) for network in clients) / len(clients), plainly.judged(pupil, x)
    boundary = torch.zeros(())
    for each, a, b in zip(plainly.divergences(teacher, student, 1.0), teacher, student, strict=True):
        boundary = boundary - (each if a.argmax() != b.argmax() else 0) / config.batch
    loss = F.cross_entropy(teacher, labels) + config.alpha_adv * boundary
    if config.alpha_bn and not config.authors_code:
        loss = loss + config.alpha_bn * plainly.matching(clients, x)
    return loss


def plain(config: Any, uploads: list[Upload], ctx: Context) -> dict[str, Tensor]:
    """Algorithm 1 with loops."""
    clients, pupil, labels = slow.networks(uploads, ctx), slow.Pupil(config, ctx), slow.labels_of(config, ctx)
    return plainly.replay(
        config,
        ctx,
        pupil,
        lambda x: loss_of(config, clients, pupil, x, labels),
        lambda x, *_: (x, slow.mean_logits(clients, x)),
    )


CASES: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("", {"reset": True, "steps_distil": 3, "schedule": "cosine", "pool": 1, "clip": 0.5}),
    (":authors_code", {}),
    (":one_pass", {}),
    (":no_bn", {}),
    (":no_adversarial", {}),
]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("variant", "settings"), first_in_check(CASES))
def test_equals_the_algorithm_in_plain_torch(variant: str, settings: dict[str, Any], uploads: list[Upload]) -> None:
    slow.assert_fuses_as(plain, made(variant, **settings), uploads)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("settings", [{}, {"alpha_adv": 30.0, "alpha_bn": 0.01}, {"authors_code": True}])
def test_the_loss_of_the_generator_and_its_gradient(settings: dict[str, Any], uploads: list[Upload]) -> None:
    config, ctx = made(**settings).config, tiny_context()
    x = torch.randn((12, 3, 12, 12), generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels, pupil, student = slow.labels_of(config, ctx), slow.Pupil(config, ctx), new_student(ctx, 0, passes=0)
    expected = loss_of(config, slow.networks(uploads, ctx), pupil, x, labels)
    found = generator_loss(config, load_ensemble(uploads, ctx, batch=12, at_once=None, passes={}), student, x, labels)
    assert found[3] < 0, "student and teacher disagree somewhere"
    torch.testing.assert_close(found[0], expected)
    gradients = [torch.autograd.grad(loss, x)[0] for loss in (found[0], expected)]
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-12)


# --- the batch-norm term ---------------------------------------------------------------------------------


def terms(config: Any, uploads: list[Upload], x: Tensor) -> tuple[list[Tensor], Tensor]:
    ctx = tiny_context()
    ensemble = load_ensemble(uploads, ctx, batch=12, at_once=None, passes={})
    leaf = x.clone().requires_grad_(True)
    found = generator_loss(config, ensemble, new_student(ctx, 0, passes=0), leaf, slow.labels_of(config, ctx))
    return found, torch.autograd.grad(found[2], leaf, allow_unused=True)[0] if found[2].requires_grad else leaf * 0


@pytest.mark.usefixtures("float64")
def test_the_batch_norm_term_reaches_the_images_through_every_client(uploads: list[Upload]) -> None:
    config = made().config
    x = torch.randn((12, 3, 12, 12), generator=torch.Generator().manual_seed(0))
    (total, cross_entropy, batch_norm, boundary), gradient = terms(config, uploads, x)
    assert batch_norm > 0.1 and gradient.abs().max() > 0
    torch.testing.assert_close(total, cross_entropy + batch_norm + 0.5 * boundary)
    torch.testing.assert_close(batch_norm, plainly.matching(slow.networks(uploads, tiny_context()), x))
    alone = [terms(config, [upload], x) for upload in uploads]
    assert all(part[2] > 0.1 and pixels.abs().max() > 0 for part, pixels in alone), "every client has a part"
    torch.testing.assert_close(batch_norm, sum(part[2] for part, _ in alone) / 3)
    torch.testing.assert_close(gradient, sum(pixels for _, pixels in alone) / 3)


@pytest.mark.usefixtures("float64")
def test_the_released_code_has_no_batch_norm_term(uploads: list[Upload]) -> None:
    config = made(authors_code=True, alpha_bn=1000.0).config
    x = torch.randn((12, 3, 12, 12), generator=torch.Generator().manual_seed(0))
    (total, cross_entropy, batch_norm, boundary), gradient = terms(config, uploads, x)
    assert batch_norm == 0 and (gradient == 0).all()
    torch.testing.assert_close(total, cross_entropy + 0.5 * boundary)
    weight = made(authors_code=True).fuse(uploads, tiny_context())[0].tensors["head.weight"]
    heavy = made(authors_code=True, alpha_bn=1000.0).fuse(uploads, tiny_context())[0].tensors["head.weight"]
    assert torch.equal(weight, heavy), "whatever its weight"


@pytest.mark.parametrize("settings", [{"alpha_bn": 0.0}, {"authors_code": True}])
def test_clients_without_batch_normalisation_need_a_term_less(settings: dict[str, Any]) -> None:
    ctx = tiny_context(model="cnn")
    sent = [create("dense").upload(client, ctx) for client in tiny_clients(2)]
    with pytest.raises(MethodError) as refused:
        made().fuse(sent, ctx)
    with pytest.raises(MethodError) as checked:
        check_needs(made(), sent)
    assert refused.value.code == checked.value.code == "needs_bn_stats" and "'client-0'" in str(refused.value)
    with refuses(ConfigError, "needs_batchnorm"):
        load_config(flags={"model": "cnn", "methods": ["dense"]})
    load_config(flags={"model": "cnn", "methods": ["dense:no_bn", "dense:authors_code"]})
    check_needs(made(**settings), sent)
    reply = made(**settings).fuse(sent, ctx)[0]
    assert all(torch.isfinite(value).all() for value in reply.tensors.values())


def test_the_papers_values_are_the_defaults() -> None:
    config = create("dense").config
    assert (config.epochs, config.steps, config.alpha_bn, config.alpha_adv) == (200, 30, 1.0, 0.5)
    assert (config.lr_generator, config.lr, config.latent, config.width) == (1e-3, 1e-2, 256, 128)
    code = create("dense:authors_code").config
    assert (code.alpha_adv, code.lr, code.reset, code.learn_latent, code.keep) == (1.0, 0.005, True, True, "best")


def test_latents_are_learned_only_by_a_generator_that_starts_anew() -> None:
    with pytest.raises(ConfigError, match="learn_latent needs reset = true"):
        create("dense", {"dense": {"learn_latent": True}})
