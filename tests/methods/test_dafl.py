"""DAFL with an ensemble as its teacher, against its algorithm written out in plain torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import slow
import slow_generators as plainly
import torch
import torch.nn.functional as F
from torch import Tensor

from fedbicross.context import Context
from fedbicross.messages import Upload
from fedbicross.methods import create
from fedbicross.methods.dafl import describe_missing, generator_loss
from fedbicross.parts.teachers import load_ensemble
from small import TINY_METHODS, first_in_check, tiny_clients, tiny_context

SETTINGS = {**TINY_METHODS["dafl"], "steps": 2, "lr": 0.02, "lr_generator": 2e-3}


def made(variant: str = "", **settings: Any) -> Any:
    return create(f"dafl{variant}", {**TINY_METHODS, "dafl": {**SETTINGS, **settings}})


def loss_of(config: Any, clients: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """L_oh + α L_a + β L_ie image by image, and the mean logits."""
    features = [network.features(x) for network in clients]
    logits = sum(network.head(feature) for network, feature in zip(clients, features, strict=True)) / len(clients)
    one_hot = sum(-F.log_softmax(row, 0)[row.argmax()] for row in logits) / len(x)
    mean = F.softmax(logits, 1).mean(0)
    if config.losses == "written":
        entropy = sum(p * p.log() for p in mean) / len(mean)
        activation = -sum(feature.abs().sum(1).mean() for feature in features) / len(clients)
    else:
        entropy = sum(p * p.log() / math.log(10) for p in mean)
        activation = -sum(feature.abs().mean() for feature in features) / len(clients)
    total = config.weight_onehot * one_hot + config.weight_entropy * entropy + config.weight_activation * activation
    return total, logits.detach()


def plain(config: Any, uploads: list[Upload], ctx: Context) -> dict[str, Tensor]:
    clients, pupil = slow.networks(uploads, ctx), slow.Pupil(config, ctx)
    maker = plainly.Maker(config, ctx, ("generator",), output=config.output, eps=0.8, init="uniform")
    total = config.epochs * config.steps
    for step in range(total):
        z = torch.randn((config.batch, config.latent), generator=ctx.torch_rng("latent", f"step-{step}"))
        x = maker.network(z)
        loss, logits = loss_of(config, clients, x)
        maker.step(loss)
        progress = step / total
        factor = 0.01 if progress >= 0.8 else 0.1 if progress >= 0.4 else 1.0
        if config.schedule == "cosine":
            factor = 0.5 * (1 + math.cos(math.pi * progress))
        plainly.teach(pupil, config, x.detach(), logits, config.lr * factor)
    return pupil.network.state_dict()


CASES: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("", {"output": "standardised", "schedule": "cosine", "clip": 0.5}),
    (":written", {"weight_activation": 0.001}),
    (":no_activation", {}),
    (":cmi", {}),
]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("variant", "settings"), first_in_check(CASES))
def test_equals_the_algorithm_in_plain_torch(variant: str, settings: dict[str, Any], uploads: list[Upload]) -> None:
    slow.assert_fuses_as(plain, made(variant, **settings), uploads)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("losses", ["released", "written"])
def test_the_loss_and_its_gradient_for_mixed_architectures(losses: str, uploads: list[Upload]) -> None:
    """Features of 64 and of 128 numbers: each client has its own activation term."""
    other = tiny_context(model="wrn16_2")
    mixed = [*uploads[:2], create("dafl").upload(tiny_clients(3)[2], other)]
    config, ctx = made(losses=losses).config, tiny_context()
    x = torch.randn((12, 3, 12, 12), generator=torch.Generator().manual_seed(0), requires_grad=True)
    expected, logits = loss_of(config, slow.networks(mixed, ctx), x)
    found = generator_loss(config, load_ensemble(mixed, ctx, batch=12, at_once=None, passes={}), x)
    torch.testing.assert_close(found[0], expected)
    torch.testing.assert_close(found[4].detach(), logits, rtol=0, atol=1e-9)
    gradients = [torch.autograd.grad(loss, x)[0] for loss in (found[0], expected)]
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-12)


def test_clients_need_no_batch_normalisation() -> None:
    ctx = tiny_context(model="cnn")
    sent = [create("dafl").upload(client, ctx) for client in tiny_clients(2)]
    assert made().needs == {"weights"}
    assert torch.isfinite(made().fuse(sent, ctx)[0].tensors["head.weight"]).all()


def test_classes_that_nobody_makes_are_said() -> None:
    ctx = tiny_context(classes=4)
    describe_missing(ctx, torch.eye(4)[[0, 1, 1, 0]])
    assert ctx.record.diagnosis["scalars"]["classes that the generator makes"] == "2 of 4"
    assert any("no image of class-2, class-3" in warning for warning in ctx.record.warnings)
    ctx = tiny_context(classes=2)
    describe_missing(ctx, torch.eye(2))
    assert ctx.record.warnings == []


def test_the_authors_values() -> None:
    config = create("dafl").config
    assert (config.weight_onehot, config.weight_activation, config.weight_entropy) == (1.0, 0.1, 5.0)
    assert (config.steps, config.batch, config.latent) == (120, 512, 100)
    script = create("dafl:cifar10").config
    assert (script.weight_onehot, script.weight_entropy, script.weight_activation) == (0.05, 5.0, 0.01)
    assert (script.epochs, script.batch, script.latent, script.lr, script.lr_generator) == (2000, 1024, 1000, 0.1, 0.02)
