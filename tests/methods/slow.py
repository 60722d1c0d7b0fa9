"""The three papers' loops written out in plain torch, one client, one layer and one optimiser at a time.

Nothing here uses ``fedbicross.steps`` or ``fedbicross.engine.ensemble``; only the random draws are the product's own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbicross import models
from fedbicross.context import Context
from fedbicross.messages import Upload
from small import tiny_context


def networks(uploads: Sequence[Upload], ctx: Context) -> list[nn.Module]:
    """The clients' networks in evaluation mode."""
    found = []
    for upload in uploads:
        network = models.build(upload.task.model, *ctx.architecture[1:])
        network.load_state_dict(dict(upload.tensors))
        found.append(network.eval())
    return found


def norms(network: nn.Module) -> list[nn.BatchNorm2d]:
    return [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]


class Inputs:
    """Mean and biased variance of every BN layer's input, by forward hooks."""

    def __init__(self, network: nn.Module) -> None:
        self.seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self.handles = [norm.register_forward_hook(self._keep) for norm in norms(network)]

    def _keep(self, norm: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        x = inputs[0]
        self.seen[norm] = (x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False))

    def __enter__(self) -> Inputs:
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()


def inversion_loss(clients: Sequence[nn.Module], x: Tensor, labels: Tensor, config: Any) -> Tensor:
    """FedISCA Eq. 1, E-FedISCA Eqs. 5-6, FedBiCross Eq. 2."""
    answers, distances = [], []
    for network in clients:
        with Inputs(network) as inputs:
            answers.append(network(x))
        for norm, (mean, var) in inputs.seen.items():
            distances += [(mean - norm.running_mean).norm(), (var - norm.running_var).norm()]
    if config.ce == "mean_logits":
        entropy = F.cross_entropy(sum(answers) / len(answers), labels)
    else:
        entropy = sum(F.cross_entropy(answer, labels) for answer in answers) / len(answers)
    matching = sum(distances) / (len(clients) if config.bn_reduction == "mean" else 1)
    variation = (
        (x[:, :, :, 1:] - x[:, :, :, :-1]).norm()
        + (x[:, :, 1:, :] - x[:, :, :-1, :]).norm()
        + (x[:, :, 1:, 1:] - x[:, :, :-1, :-1]).norm()
        + (x[:, :, 1:, :-1] - x[:, :, :-1, 1:]).norm()
    )
    return entropy + config.alpha_tv * variation + config.alpha_bn * matching


def labels_of(config: Any, ctx: Context) -> Tensor:
    return torch.tensor([i % len(ctx.task.classes) for i in range(config.batch)])


def synthesise(
    clients: Sequence[nn.Module], config: Any, ctx: Context, cluster: int, trajectory: int
) -> tuple[list[Tensor], list[float]]:
    """x(1), …, x(T) and the losses at x(0), …, x(T-1): Adam on the pixels, ``torch.roll`` as jitter."""
    rng = ctx.torch_rng("synthesis", f"cluster-{cluster}", f"trajectory-{trajectory}")
    size = ctx.task.image_size
    x = torch.randn((config.batch, ctx.task.channels, size, size), generator=rng)
    shifts = torch.randint(-2, 3, (config.steps, 2), generator=rng).tolist()
    x.requires_grad_(True)
    adam = torch.optim.Adam([x], lr=config.lr_synthesis)
    labels, images, losses = labels_of(config, ctx), [], []
    for shift in shifts:
        loss = inversion_loss(clients, torch.roll(x, shift, dims=(2, 3)), labels, config)
        adam.zero_grad()
        loss.backward()
        adam.step()
        images.append(x.detach().clone())
        losses.append(loss.item())
    return images, losses


@torch.no_grad()
def mean_logits(clients: Sequence[nn.Module], x: Tensor) -> Tensor:
    return sum(network(x) for network in clients) / len(clients)


def in_train_mode(clients: Sequence[nn.Module]) -> list[nn.Module]:
    """The released code's adapted teachers: copies that nobody switched back."""
    return [copy.deepcopy(network).train() for network in clients]


@torch.no_grad()
def by_moving_average(
    clients: Sequence[nn.Module], batches: Sequence[Tensor], momentum: float, start: Sequence[nn.Module] | None = None
) -> list[nn.Module]:
    """The papers' adapted teachers: statistics moved batch by batch, measured while the network trains."""
    adapted = [copy.deepcopy(network).eval() for network in start or clients]
    for original, target in zip(clients, adapted, strict=True):
        probe = copy.deepcopy(original).train()
        for batch in batches:
            with Inputs(probe) as inputs:
                probe(batch)
            for measured, moved in zip(norms(probe), norms(target), strict=True):
                mean, var = inputs.seen[measured]
                moved.running_mean.copy_(momentum * moved.running_mean + (1 - momentum) * mean)
                moved.running_var.copy_(momentum * moved.running_var + (1 - momentum) * var)
    return adapted


def divergence(teacher_logits: Tensor, student_logits: Tensor, temperature: float) -> Tensor:
    """τ² KL(teacher ‖ student), mean over the batch."""
    p = (teacher_logits / temperature).softmax(1)
    log_q = (student_logits / temperature).log_softmax(1)
    return (p * (p.log() - log_q)).sum(1).mean() * temperature**2


def rate(config: Any, done: int, total: int) -> float:
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * done / total)).item())
    return config.lr * (0.01 if done >= 0.75 * total else 0.1 if done >= 0.5 * total else 1.0)


class Pupil:
    """A student and its ``torch.optim.SGD``."""

    def __init__(self, config: Any, ctx: Context, number: int = 0) -> None:
        self.network = ctx.new_model(ctx.torch_rng("student", str(number))).train()
        self.optimiser = torch.optim.SGD(
            self.network.parameters(), lr=1.0, momentum=config.momentum, weight_decay=config.weight_decay
        )

    def step(self, loss: Tensor, lr: float) -> None:
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()


def assert_same_state(found: Any, expected: Any) -> None:
    """The same weights. Adam divides by 1e-8 where a gradient is 0, and so makes 1e-9 of float64's 1e-16."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")


def assert_fuses_as(plain: Any, method: Any, uploads: list[Upload]) -> Any:
    """Everybody gets the one model that ``plain`` makes by the same settings; returned are its tensors."""
    replies = method.fuse(uploads, tiny_context())
    assert len(replies) == 3 and replies[0] is replies[2], "one model for everyone"
    assert_same_state(replies[0].tensors, plain(method.config, uploads, tiny_context()))
    return replies[0].tensors
