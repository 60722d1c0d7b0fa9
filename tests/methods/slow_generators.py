"""Generators, pools and their losses in plain torch, for the slow versions of DAFL, DENSE and Co-Boosting.

Only the random draws and the generator's layers are the product's own (tests/steps/test_generators.py checks them).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import slow
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbicross.context import Context
from fedbicross.steps import generators


class Maker:
    """A generator as an ``nn.Module`` with ``torch.optim.Adam``."""

    def __init__(
        self, config: Any, ctx: Context, names: tuple[str, ...], extra: Sequence[Tensor] = (), **kind: Any
    ) -> None:
        settings = generators.GeneratorSettings(latent=config.latent, width=config.width, **kind)
        shape = (ctx.task.channels, ctx.task.image_size, ctx.task.image_size)
        source = generators.ImageGenerator(settings, shape, config.batch)
        source.reset(ctx.torch_rng(*names))
        self.network: nn.Module = source.network
        self.network.load_state_dict({name: p.detach().clone() for name, p in source.params.items()})
        self.parameters = [*self.network.parameters(), *extra]
        self.adam = torch.optim.Adam(self.parameters, lr=config.lr_generator, betas=(0.5, 0.999))
        self.clip = config.clip

    def step(self, loss: Tensor) -> None:
        self.adam.zero_grad()
        loss.backward()
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.adam.step()


def teach(pupil: slow.Pupil, config: Any, images: Tensor, teacher_logits: Tensor, lr: float) -> None:
    """One step of the student, with clipping where there is any."""
    loss = slow.divergence(teacher_logits, pupil.network(images), config.temperature)
    for group in pupil.optimiser.param_groups:
        group["lr"] = lr
    pupil.optimiser.zero_grad()
    loss.backward()
    if config.clip is not None:
        torch.nn.utils.clip_grad_norm_(pupil.network.parameters(), config.clip)
    pupil.optimiser.step()


def judged(pupil: slow.Pupil, x: Tensor) -> Tensor:
    """The student's answer in evaluation mode."""
    pupil.network.eval()
    answer = pupil.network(x)
    pupil.network.train()
    return answer


def matching(clients: Sequence[nn.Module], x: Tensor) -> Tensor:
    """The batch-norm term, mean over clients."""
    total = torch.zeros(())
    for network in clients:
        with slow.Inputs(network) as inputs:
            network(x)
        for norm, (mean, var) in inputs.seen.items():
            total = total + (mean - norm.running_mean).norm() + (var - norm.running_var).norm()
    return total / len(clients)


def flipped(x: Tensor, ctx: Context, config: Any, use: str, epoch: int, batches: int, number: int) -> Tensor:
    """Mirror images where the product's stream says so."""
    if config.augment == "none":
        return x
    rng = ctx.torch_rng("augment", use, f"epoch-{epoch}")
    flips = torch.rand((batches, config.batch), generator=rng)[number] < 0.5
    return torch.stack([image.flip(-1) if flip else image for image, flip in zip(x, flips, strict=True)])


def rows(ctx: Context, config: Any, epoch: int, images: int, count: int) -> list[Tensor]:
    """Which images of the pool make up the student's batches."""
    rng, order = ctx.torch_rng("replay", f"epoch-{epoch}"), []
    while len(order) < count * config.batch:
        order += torch.randperm(images, generator=rng).tolist()
    return [torch.tensor(order[i * config.batch : (i + 1) * config.batch]) for i in range(count)]


def rate(config: Any, epoch: int, done: int, count: int) -> float:
    progress = (epoch + done / count) / config.epochs
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * progress, dtype=torch.float64)).item())
    assert config.schedule == "constant"
    return config.lr


def divergences(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """KL of each image."""
    p, q = F.softmax(teacher / temperature, 1), F.softmax(student / temperature, 1)
    return (p * (p.log() - q.log())).sum(1)


def replay(
    config: Any,
    ctx: Context,
    pupil: slow.Pupil,
    loss_of: Callable[[Tensor], Tensor],
    lesson: Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor]],
    stored: Callable[[list[Tensor], int], None] = lambda pool, epoch: None,
) -> dict[str, Tensor]:
    """DENSE and Co-Boosting with loops. ``lesson``: what the student sees of a batch, and the teacher's logits."""
    pool, maker = list[Tensor](), None
    for epoch in range(config.epochs):
        z = torch.randn((config.batch, config.latent), generator=ctx.torch_rng("latent", f"epoch-{epoch}"))
        z.requires_grad_(config.learn_latent)
        if maker is None or config.reset:
            maker = Maker(config, ctx, ("generator", f"epoch-{epoch}"), [z] if config.learn_latent else [])
        best, kept = float("inf"), None
        for s in range(config.steps):
            x = maker.network(z)
            loss = loss_of(flipped(x, ctx, config, "synthesis", epoch, config.steps, s))
            if loss.item() < best:
                best, kept = loss.item(), x.detach().clone()
            maker.step(loss)
        pool.append(kept if config.keep == "best" else maker.network(z).detach())
        pool = pool[-config.pool :]
        stored(pool, epoch)
        everything, count = torch.cat(pool), config.steps_distil or len(pool)
        for number, chosen in enumerate(rows(ctx, config, epoch, len(everything), count)):
            x = flipped(everything[chosen], ctx, config, "distillation", epoch, count, number)
            teach(pupil, config, *lesson(x, chosen, epoch, number), rate(config, epoch, number, count))
    return pupil.network.state_dict()
