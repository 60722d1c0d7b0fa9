"""Co-Boosting against its algorithm written out in plain torch; weights by autograd."""

from __future__ import annotations

from typing import Any

import pytest
import slow
import slow_generators as plainly
import torch
import torch.nn.functional as F
from torch import Tensor

from fedbicross.context import Context
from fedbicross.errors import MethodError
from fedbicross.messages import Upload
from fedbicross.methods import create
from fedbicross.methods.co_boosting import Boosting, describe_weights
from fedbicross.parts.replay import Replay
from small import TINY_METHODS, first_in_check, refuses, tiny_clients, tiny_context

SETTINGS = {**TINY_METHODS["co_boosting"], "epochs": 2, "steps": 2, "storage": "fp32", "lr": 0.02}


def made(variant: str = "", **settings: Any) -> Any:
    return create(f"co_boosting{variant}", {"co_boosting": {**SETTINGS, **settings}})


class Slow:
    """Algorithm 1 with loops; ``weights`` afterwards."""

    def __init__(self, config: Any, uploads: list[Upload], ctx: Context) -> None:
        self.config, self.ctx, self.clients = config, ctx, slow.networks(uploads, ctx)
        self.weights = torch.full((len(uploads),), 1 / len(uploads))

    def ensemble(self, x: Tensor, w: Tensor | None = None) -> Tensor:
        w = self.weights if w is None else w
        return sum(w[k] * network(x) for k, network in enumerate(self.clients)) / w.sum()

    def reweight(self, x: Tensor, labels: Tensor, epoch: int) -> None:
        w = self.weights.clone().requires_grad_(True)
        F.cross_entropy(self.ensemble(x, w), labels).backward()
        step = w.grad.sign() if self.config.weight_step == "sign" else w.grad
        lr = self.config.lr_weights or 0.1 / len(self.clients)
        self.weights = (w.detach() - lr * self.config.decay_weights**epoch * step).clamp(0, 1)

    def perturbed(self, x: Tensor, epoch: int, number: int) -> Tensor:
        rng = self.ctx.torch_rng("directions", f"epoch-{epoch}", f"step-{number}")
        u = 2 * torch.rand((len(x), 3), generator=rng) - 1
        leaf = x.clone().requires_grad_(True)
        (u * F.softmax(self.ensemble(leaf) / self.config.temperature, 1)).sum().backward()
        return x + self.config.epsilon * leaf.grad.sign()

    def generator_loss(self, x: Tensor, labels: Tensor, pupil: slow.Pupil) -> Tensor:
        config, total = self.config, torch.zeros(())
        teacher, student = self.ensemble(x), plainly.judged(pupil, x)
        for row, label in zip(teacher, labels, strict=True):
            p = F.softmax(row, 0)[label]
            total = total - (1 - p.item()) ** config.hardness * p.log() / config.batch
        tau = config.temperature_adv
        total = total - config.alpha_adv * tau**2 * plainly.divergences(teacher, student, tau).mean()
        return total + (config.alpha_bn * plainly.matching(self.clients, x) if config.alpha_bn else 0)

    def run(self) -> dict[str, Tensor]:
        config, pupil, labels = self.config, slow.Pupil(self.config, self.ctx), slow.labels_of(self.config, self.ctx)
        moving, on_stored = config.weight_step != "none", config.reweight_on == "stored"

        def stored(pool: list[Tensor], epoch: int) -> None:
            for x in pool if moving and on_stored and epoch > 0 else []:
                self.reweight(x, labels, epoch)

        def lesson(x: Tensor, rows: Tensor, epoch: int, number: int) -> tuple[Tensor, Tensor]:
            x = self.perturbed(x, epoch, number) if config.epsilon else x
            if moving and not on_stored:
                self.reweight(x, labels[rows % config.batch], epoch)
            with torch.no_grad():
                return x, self.ensemble(x)

        return plainly.replay(config, self.ctx, pupil, lambda x: self.generator_loss(x, labels, pupil), lesson, stored)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("", {"steps_distil": 3, "pool": 1, "reset": False, "learn_latent": False, "schedule": "constant"}),
    ("", {"alpha_bn": 0.5}),
    (":authors_code", {}),
    (":gradient", {"lr_weights": 5.0}),  # so that weights move by more than is rounded off
    (":no_hard", {}),
    (":no_adversarial", {}),
    (":no_perturbation", {}),
    (":no_reweighting", {}),
]


def final_weights(ctx: Context) -> list[float]:
    values = ctx.record.diagnosis["heatmaps_over_time"]["weights of the clients"]["values"]
    return [row[-1] for row in values]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("variant", "settings"), first_in_check(CASES))
def test_equals_the_algorithm_in_plain_torch(variant: str, settings: dict[str, Any], uploads: list[Upload]) -> None:
    method, ctx = made(variant, **settings), tiny_context()
    replies = method.fuse(uploads, ctx)
    assert len(replies) == 3 and replies[0] is replies[2], "one model for everyone"
    expected = Slow(method.config, uploads, tiny_context())
    slow.assert_same_state(replies[0].tensors, expected.run())
    shares = expected.weights / expected.weights.sum()
    assert final_weights(ctx) == pytest.approx(shares.tolist(), abs=1e-4), "shown with four digits"
    assert (final_weights(ctx) == pytest.approx([1 / 3] * 3, abs=1e-4)) == (variant == ":no_reweighting")


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("settings", [{}, {"alpha_adv": 5.0, "hardness": 2.0, "alpha_bn": 0.01}])
def test_the_loss_of_the_generator_and_its_gradient(settings: dict[str, Any], uploads: list[Upload]) -> None:
    config, ctx = made(**settings).config, tiny_context()
    server = Replay("co_boosting", config, uploads, ctx)
    server.weights.copy_(torch.tensor([0.9, 0.1, 0.4]))
    reference = Slow(config, uploads, ctx)
    reference.weights = server.weights.clone()
    x = torch.randn((12, 3, 12, 12), generator=torch.Generator().manual_seed(0), requires_grad=True)
    expected = reference.generator_loss(x, server.labels, slow.Pupil(config, ctx))
    found = Boosting(config, server).generator_loss(x)[0]
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(loss, x)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-12)


@pytest.mark.usefixtures("float64")
def test_perturbations_are_those_of_autograd_and_new_for_every_batch(uploads: list[Upload]) -> None:
    config, ctx = made(epsilon=0.5).config, tiny_context()
    server = Replay("co_boosting", config, uploads, ctx)
    server.weights.copy_(torch.tensor([0.9, 0.1, 0.4]))
    boosting, reference = Boosting(config, server), Slow(config, uploads, ctx)
    reference.weights = server.weights.clone()
    x = torch.randn((12, 3, 12, 12), generator=torch.Generator().manual_seed(0))
    found = boosting.perturb(x, 4)
    torch.testing.assert_close(found, reference.perturbed(x, 0, 4))
    assert not torch.equal(found, boosting.perturb(x, 5))


def test_a_client_that_is_wrong_about_everything_loses_its_weight(uploads: list[Upload]) -> None:
    """The stored images are what the others call them, and it says the opposite."""
    config, ctx = made(batch=12).config, tiny_context()
    server = Replay("co_boosting", config, uploads, ctx)
    right = torch.nn.functional.one_hot(server.labels, 3) * 5.0
    boosting = Boosting(config, server)
    for _ in range(8):
        boosting.reweight(torch.stack([right, -right, right * 0.5]), server.labels)
    assert float(server.weights[1]) == pytest.approx(1 / 3 - 8 * 0.1 / 3, abs=1e-5), "eight steps of 0.1 / N"
    assert int(server.weights.argmax()) == 0


def test_history_of_weights_and_a_warning_when_one_client_has_them_all() -> None:
    ctx = tiny_context()
    history = [torch.tensor([0.5, 0.5]), torch.tensor([0.7, 0.2]), torch.tensor([0.9, 0.0])]
    describe_weights(ctx, ["a" * 50, "b"], history)
    found = ctx.record.diagnosis["heatmaps_over_time"]["weights of the clients"]
    assert found["x"] == [0, 1, 2] and found["rows"] == ["a" * 29 + "...", "b"]
    assert found["values"] == [[0.5, 0.7778, 1.0], [0.5, 0.2222, 0.0]]
    assert any("collapsed onto aaa" in warning and "lr_weights" in warning for warning in ctx.record.warnings)
    ctx = tiny_context()
    describe_weights(ctx, ["a", "b"], history[:2])
    describe_weights(ctx, ["a"], [torch.tensor([1.0])])
    assert ctx.record.warnings == []


def test_a_batch_norm_term_needs_statistics() -> None:
    ctx = tiny_context(model="cnn")
    sent = [create("co_boosting").upload(client, ctx) for client in tiny_clients(2)]
    assert "bn_stats" not in made().needs and "bn_stats" in made(alpha_bn=1.0).needs
    with refuses(MethodError, "needs_bn_stats"):
        made(alpha_bn=1.0).fuse(sent, ctx)
    assert torch.isfinite(made().fuse(sent, ctx)[0].tensors["head.weight"]).all()


def test_the_papers_values_are_the_defaults() -> None:
    config = create("co_boosting").config
    assert (config.steps, config.batch, config.hardness, config.alpha_adv, config.alpha_bn) == (30, 128, 1.0, 1.0, 0.0)
    assert (config.epsilon, config.temperature, config.lr, config.lr_generator) == (8 / 255, 4.0, 0.01, 1e-3)
    assert config.lr_weights is None, "0.1 / N"
    code = create("co_boosting:authors_code").config
    assert (code.lr_weights, code.decay_weights, code.reweight_on, code.keep) == (0.01, 0.99, "stored", "best")
