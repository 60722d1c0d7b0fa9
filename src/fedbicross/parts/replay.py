"""The server of DENSE and Co-Boosting: a generator, a pool of what it made, and a student that learns from the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedbicross.context import Context
from fedbicross.engine.fast import recorded
from fedbicross.engine.recipe import lr_multiplier
from fedbicross.messages import Upload
from fedbicross.parts.settings import ReplayConfig
from fedbicross.parts.students import learn_soft, new_student
from fedbicross.parts.synthesis_log import GeneratorLog
from fedbicross.parts.teachers import load_ensemble
from fedbicross.steps import adversarial, generators
from fedbicross.steps.inversion import balanced_labels
from fedbicross.steps.pool import Pool, decode, encode

WORST = 3e38  # a loss that every other one is lower than; finite, so that a checkpoint can hold it


class Replay:
    """The server of DENSE and Co-Boosting: a generator, its pool and a student, resumable between any two steps.

    A method walks through ``epochs()``; in each through ``synthesis()``, then ``store()``, then ``distillation()``.
    """

    def __init__(
        self, method: str, config: ReplayConfig, uploads: Sequence[Upload], ctx: Context, batchnorm: bool = False
    ) -> None:
        self.config, self.ctx = config, ctx
        made = config.epochs * config.steps
        self.ensemble = ensemble = load_ensemble(
            uploads,
            ctx,
            batch=config.batch,
            at_once=config.teachers_at_once,
            passes={"match": made, "stored": made, "features": made},
            bn_distance=config.bn_distance,
            batchnorm_for=method if batchnorm else "",
        )
        self.learning = sum(config.steps_of(epoch) for epoch in range(config.epochs))
        self.student, self.pool = new_student(ctx, 0, self.learning), Pool(config.pool, config.storage)
        settings = generators.GeneratorSettings(
            latent=config.latent, width=config.width, lr=config.lr_generator, clip=config.clip
        )
        self.generator = generators.ImageGenerator(
            settings, ctx.task.image_shape, config.batch, ctx.device, ctx.precision, config.learn_latent
        )
        self.labels = balanced_labels(config.batch, len(ctx.task.classes), ctx.device)
        self.weights = torch.full((len(ensemble),), 1 / len(ensemble), device=ctx.device)  # of the clients
        self.best = torch.full((), WORST, device=ctx.device)
        self.candidate = torch.zeros((config.batch, *ctx.task.image_shape), device=ctx.device)
        self.log = GeneratorLog(ctx, config.epochs, made, self.learning)
        self.history = [self.weights.clone()]  # of the weights, one entry per finished epoch
        self.epoch = self.made = self.taught = 0
        self.stored = False
        self.captured: dict[str, Any] = {}
        label, total = f"{method}: generating and distilling", made + self.learning
        student, generator = self.student, self.generator
        self.stage = ctx.stage(
            "replay", label, total, student=student, generator=generator, pool=self.pool, watch=self.log, own=self
        )

    def epochs(self) -> Iterator[int]:
        """Epochs from 0, going on where a killed run stopped."""
        config, rng = self.config, self.ctx.torch_rng
        for epoch in range(self.epoch, config.epochs):
            self.epoch = epoch
            if self.made == 0:
                if config.reset or epoch == 0:
                    self.generator.reset(rng("generator", f"epoch-{epoch}"))
                self.generator.draw(rng("latent", f"epoch-{epoch}"))
                self.best.fill_(WORST)
            self.stage.note = f"epoch {epoch + 1}/{config.epochs}"
            yield epoch
            self.history.append(self.weights.clone())
            self.made, self.taught, self.stored = 0, 0, False

    def synthesis(self) -> Iterator[int]:
        """The generator's steps of this epoch; call ``generate`` in each."""
        rng = self.ctx.torch_rng("augment", "synthesis", f"epoch-{self.epoch}", device=self.ctx.device)
        self.changes = generators.Changes(self.config.augment, self.config.steps, self.config.batch, rng)
        while self.made < self.config.steps:
            yield self.made
            self.made += 1
            self.stage.advance()

    def generate(self, loss_of: Callable[[Tensor], Sequence[Tensor]], names: Sequence[str]) -> None:
        """One step of the generator on the first of the terms that ``loss_of`` gives for the images."""
        augment = self.config.augment

        def step(flips: Tensor, offsets: Tensor) -> list[Tensor]:
            seen = lambda x: loss_of(generators.changed(x, augment, flips, offsets))  # noqa: E731
            images, terms = self.generator.step(seen)
            return [images, *terms]

        run = recorded(self.captured, "generate", step, self.generator.in_place, self.ctx.fast)
        images, *terms = run(*self.changes.of(self.made))
        if self.config.keep == "best":
            better = terms[0] < self.best
            self.candidate = torch.where(better, images, self.candidate)
            self.best = torch.where(better, terms[0], self.best)
        self.log.generated(**dict(zip(names, terms, strict=True)))

    def store(self, **extra: Callable[[Tensor], Tensor]) -> bool:
        """Keep this epoch's images once, with what ``extra`` says of them; False if that was done before a kill."""
        if self.stored:
            return False
        with torch.no_grad():
            images = self.candidate if self.config.keep == "best" else self.generator.images()
            seen = decode(encode(images, self.config.storage))
            self.pool.add(images, self.labels, **{name: of(seen) for name, of in extra.items()})
        self.log.show(self.epoch + 1, seen, self.labels)
        self.stored = True
        return True

    def distillation(self) -> Iterator[dict[str, Tensor]]:
        """Batches of the pool in random order; call ``teach`` on each."""
        config, device = self.config, self.ctx.device
        count = config.steps_of(self.epoch)
        rng = self.ctx.torch_rng("replay", f"epoch-{self.epoch}", device=device)
        passes = -(-count // len(self.pool))
        order = torch.cat([torch.randperm(self.pool.images, generator=rng, device=device) for _ in range(passes)])
        rng = self.ctx.torch_rng("augment", "distillation", f"epoch-{self.epoch}", device=device)
        changes = generators.Changes(config.augment, count, config.batch, rng)
        while self.taught < count:
            rows = order[self.taught * config.batch : (self.taught + 1) * config.batch]
            taken = self.pool.take(rows)
            changed = generators.changed(taken["images"], config.augment, *changes.of(self.taught))
            yield {**taken, "images": changed}
            self.taught += 1
            self.stage.advance()

    def teach(self, images: Tensor, soft: Tensor) -> None:
        """One step of the student."""
        config = self.config
        progress = (self.epoch + self.taught / config.steps_of(self.epoch)) / config.epochs
        loss = learn_soft(
            self.student,
            images,
            soft,
            config.lr * lr_multiplier(config.schedule, progress),
            temperature=config.temperature,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            clip=config.clip,
        )
        self.log.learned(loss)

    def ask(self, images: Tensor) -> Tensor:
        """The clients' logits [N,B,C], without gradients."""

        def step(x: Tensor) -> list[Tensor]:
            with torch.no_grad():
                return [self.ensemble.logits(x)]

        return recorded(self.captured, f"ask {tuple(images.shape)}", step, [], self.ctx.fast)(images)[0]

    def describe(self, hints: Mapping[str, str]) -> None:
        """At the end: diagnosis of the last batch and of the student."""
        last = self.pool.batch(-1)
        logits = adversarial.weighted_logits(self.ask(last["images"]), self.weights)
        self.log.describe(last["images"], last["labels"], logits, self.student, hints)

    def tensors(self) -> dict[str, Tensor]:
        """State for a checkpoint, beside student, generator, pool and log."""
        own = {"weights": self.weights, "best": self.best, "history": torch.stack(self.history)}
        if self.config.keep == "best" and not self.stored:
            own["candidate"] = self.candidate
        return {**own, "place": torch.tensor([self.epoch, self.made, self.taught, self.stored])}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self.weights.copy_(tensors["weights"])
        self.best.copy_(tensors["best"])
        self.history = list(tensors["history"])
        self.candidate = tensors.get("candidate", self.candidate)
        self.epoch, self.made, self.taught, stored = tensors["place"].tolist()
        self.stored = bool(stored)
