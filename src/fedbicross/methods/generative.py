"""What DAFL, DENSE and Co-Boosting share: settings, teachers, the student's step, replay, and the diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field, model_validator

from fedbicross import engine, steps
from fedbicross.context import Context
from fedbicross.errors import MethodError
from fedbicross.exchange import Client, Predictor, Reply, Upload
from fedbicross.methods.base import Method, MethodConfig
from fedbicross.methods.synthesis import Watch, image_shape, new_student, rate

if TYPE_CHECKING:
    from torch import Tensor

    from fedbicross.engine.ensemble import Ensemble
    from fedbicross.engine.norm import BNDistance
    from fedbicross.engine.student import Student
    from fedbicross.steps.generators import ImageGenerator


WORST = 3e38  # a loss that every other one is lower than; finite, so that a checkpoint can hold it


class GenerativeConfig(MethodConfig):
    """The generator and the student's optimiser."""

    epochs: int = Field(200, ge=1, description="T: rounds of generating and distilling")
    steps: int = Field(30, ge=1, description="T_G: steps of the generator per epoch (paper: 30)")
    batch: int = Field(256, ge=2, description="B: images per generated batch")
    latent: int = Field(256, ge=1, description="length of the latent vector z")
    width: int = Field(128, ge=2, description="channels of the generator (authors' code: 128); fewer are faster")
    lr_generator: float = Field(1e-3, gt=0, description="η_G: Adam's rate on the generator")
    temperature: float = Field(20.0, gt=0, description="τ of teacher and student in the distillation, with τ²")
    lr: float = Field(1e-2, gt=0, description="η_S: the student's SGD rate")
    momentum: float = Field(0.9, ge=0, lt=1, description="of the student's SGD")
    weight_decay: float = Field(0.0, ge=0, description="of the student's SGD")
    teachers_at_once: int | None = Field(
        None, ge=1, description="clients in memory at once during generation; none: as many as fit (ours, for large N)"
    )
    clip: float | None = Field(None, gt=0, description="largest norm of a gradient of generator or student; none: any")

    def learn(self, student: Student, images: Tensor, soft: Tensor, lr: float) -> Tensor:
        """One SGD step of the student towards soft labels: τ² KL(teacher ‖ student)."""

        def step(*tensors: Tensor) -> list[Tensor]:
            images, soft, rate = tensors
            loss_of = partial(steps.distill.soft_kd_loss, teacher_soft=soft, temperature=self.temperature)
            loss, gradients = student.gradient(images, loss_of)
            if self.clip is not None:
                gradients = tuple(steps.generators.clipped(gradients, self.clip))
            student.update(gradients, rate, self.momentum, self.weight_decay)
            return [loss]

        inputs = (images, soft, engine.fast.scalar(lr, student.device))
        return engine.fast.recorded(student.captured, "learn", step, student.in_place, student.fast)(*inputs)[0]


class ReplayConfig(GenerativeConfig):
    """A generator that is trained for a few steps per epoch, and a pool of all that it made."""

    alpha_bn: float = Field(1.0, ge=0, description="weight of the batch-norm term, the mean over clients")
    bn_distance: Literal["absolute", "relative"] = Field(
        "absolute", description="a layer's batch-norm distances as they are (papers), or over its own spread (ours)"
    )
    reset: bool = Field(True, description="start every epoch with a new generator; false: one for the whole run")
    learn_latent: bool = Field(False, description="train the latent vectors too (authors' code: yes); needs reset")
    keep: Literal["last", "best"] = Field(
        "last", description="which images of an epoch are kept: by the trained generator, or those of the lowest loss"
    )
    augment: Literal["none", "flip", "crop_flip"] = Field(
        "none",
        description="mirror images and crops before anyone looks (authors' code: flip, and crop on CIFAR)",
    )
    pool: int = Field(200, ge=1, description="generated batches kept to be distilled again; 1: each only once")
    storage: Literal["uint8", "bf16", "fp32"] = Field("uint8", description="how the pool keeps images, on the device")
    steps_distil: int | None = Field(
        None, ge=1, description="student steps per epoch; none: one pass over the pool (authors' code)"
    )
    schedule: Literal["step", "cosine", "constant"] = Field("constant", description="of the student's rate")

    @model_validator(mode="after")
    def _latents_need_a_new_optimiser(self) -> ReplayConfig:
        if self.learn_latent and not self.reset:
            raise ValueError("learn_latent needs reset = true: new latent vectors need a new optimiser")
        return self

    def steps_of(self, epoch: int) -> int:
        """Student steps of this epoch (from 0)."""
        return self.steps_distil or min(epoch + 1, self.pool)


GenerativeT = TypeVar("GenerativeT", bound=GenerativeConfig)


class GenerativeMethod(Method[GenerativeT]):
    """A method whose server trains a generator against the uploaded networks, and one student for everyone."""

    personal = False

    @property
    def needs_batchnorm(self) -> bool:
        """Whether the generator matches batch-normalisation statistics."""
        return False

    @property
    def needs(self) -> frozenset[str]:
        """Weights, with batch-normalisation statistics where these are matched."""
        return frozenset({"weights", *(["bn_stats"] if self.needs_batchnorm else [])})

    @property
    def refuses_mixed_models(self) -> str:
        """Clients of any architecture can teach: only their logits are combined."""
        return ""

    @property
    def leaves(self) -> str:
        """What leaves the hospital, in words."""
        return "The trained network; the server trains a generator of images against it."

    def upload(self, client: Client, ctx: Context, previous: Reply | None = None) -> Upload:
        """What leaves the hospital: the network."""
        return Upload(client.name, ctx.task_of(client), ctx.local_model(client).state)

    def personalize(self, client: Client, reply: Reply, ctx: Context) -> Predictor:
        """The global student as it is."""
        return Predictor(ctx.task, (str(reply.info["architecture"]),), (dict(reply.tensors),))

    def load_teachers(self, uploads: Sequence[Upload], ctx: Context, bn_distance: BNDistance = "absolute") -> Ensemble:
        """All clients, frozen; damaged uploads are refused here, before any work."""
        names = [upload.client for upload in uploads]
        architectures = [upload.task.model for upload in uploads]
        tensors = [upload.tensors for upload in uploads]
        shape = ctx.architecture[1:]
        ensemble = steps.teachers.load_teachers(
            names, architectures, tensors, shape, ctx.device, ctx.precision, ctx.fast, bn_distance
        )
        ensemble.at_once = self.config.teachers_at_once or steps.inversion.clients_that_fit(
            architectures, shape, self.config.batch, ctx.device
        )
        made = self.config.epochs * self.config.steps
        ensemble.expect(architectures, {"match": made, "stored": made, "features": made})
        if self.needs_batchnorm:
            steps.teachers.need_batchnorm(ensemble, names, self.name)
        return ensemble


class GeneratorWatch(Watch):
    """Progress, curves and pictures of a generator and its student, and at the end what there is to say."""

    moment = "epoch"

    def __init__(self, ctx: Context, epochs: int, made: int, learned: int) -> None:
        super().__init__("student", ctx, epochs, learned)
        self.generator_curves, self.made = steps.diagnosis.Curves(made), 0

    def generated(self, **losses: Tensor) -> None:
        """After a step of the generator."""
        self.made += 1
        self.generator_curves.add(self.made, **losses)

    def learned(self, loss: Tensor) -> None:
        """After a step of the student."""
        self.step += 1
        self.curves.add(self.step, distillation=loss)

    def show(self, epoch: int, images: Tensor, labels: Tensor) -> None:
        """One image per class at the end of an epoch; white where there is none."""
        if epoch not in self.strip.moments:
            return
        shown = first_of_each_class(images, labels, len(self.ctx.task.classes))
        self.strip.add(steps.trajectory.Sample(epoch, shown, labels, labels, 0.0, None))

    def describe(
        self, images: Tensor, labels: Tensor, logits: Tensor, student: Student, hints: Mapping[str, str]
    ) -> None:
        """Numbers, curves, the strip of pictures, and warnings in words; ``logits`` are the teacher's."""
        if not student.finite:
            hint = "lower the student's lr, or lr_generator"
            raise MethodError("diverged", f"{self.title}: the student's weights are no longer finite; {hint}")
        record, classes, diagnosis = self.ctx.record, self.ctx.task.classes, steps.diagnosis
        soft = logits.softmax(-1)
        diagnosis.describe_images(record, self.title, logits, soft, images, labels, classes, hints)
        variety = steps.adversarial.variety(images, labels, len(classes)).tolist()
        diagnosis.describe_variety(record, self.title, variety, classes, hints["variety"])
        diagnosis.describe_student(record, self.title, student.eval_logits(images), soft)
        names = list(self.generator_curves.values)
        record.add("curves", f"{self.title}: generator loss", self.generator_curves.plot(names, "loss"))
        record.add("curves", f"{self.title}: distillation loss", self.curves.plot(["distillation"], "loss"))
        self.picture()

    def tensors(self) -> dict[str, Tensor]:
        """State for a checkpoint."""
        import torch

        curves = {f"generator/{name}": value for name, value in self.generator_curves.tensors().items()}
        return {**super().tensors(), **curves, "made": torch.tensor(self.made)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        super().load(tensors)
        prefix = "generator/"
        self.generator_curves.load({n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)})
        self.made = int(tensors["made"])


def first_of_each_class(images: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The first image of every class [C,...]; white for a class without one. Waits for no device."""
    import torch

    member = labels == torch.arange(classes, device=labels.device)[:, None]
    shown = images.index_select(0, member.int().argmax(1))
    return torch.where(member.any(1).view(-1, 1, 1, 1), shown, torch.ones_like(shown))


class Replay:
    """The server of DENSE and Co-Boosting: a generator, its pool and a student, resumable between any two steps.

    A method walks through ``epochs()``; in each through ``synthesis()``, then ``store()``, then ``distillation()``.
    """

    def __init__(self, method: str, config: ReplayConfig, ensemble: Ensemble, ctx: Context) -> None:
        import torch

        self.config, self.ensemble, self.ctx = config, ensemble, ctx
        self.learning = sum(config.steps_of(epoch) for epoch in range(config.epochs))
        self.student, self.pool = new_student(ctx, 0, self.learning), steps.pool.Pool(config.pool, config.storage)
        settings = generator_settings(config)
        self.generator: ImageGenerator = steps.generators.ImageGenerator(
            settings, image_shape(ctx), config.batch, ctx.device, ctx.precision, config.learn_latent
        )
        self.labels = steps.inversion.balanced_labels(config.batch, len(ctx.task.classes), ctx.device)
        self.weights = torch.full((len(ensemble),), 1 / len(ensemble), device=ctx.device)  # of the clients
        self.best = torch.full((), WORST, device=ctx.device)
        self.candidate = torch.zeros((config.batch, *image_shape(ctx)), device=ctx.device)
        self.watch = GeneratorWatch(ctx, config.epochs, config.epochs * config.steps, self.learning)
        self.history = [self.weights.clone()]  # of the weights, one entry per finished epoch
        self.epoch = self.made = self.taught = 0
        self.stored = False
        self.captured: dict[str, Any] = {}
        label, total = f"{method}: generating and distilling", config.epochs * config.steps + self.learning
        generator, student, pool, watch = self.generator, self.student, self.pool, self.watch
        self.stage = ctx.stage(
            "replay", label, total, generator=generator, student=student, pool=pool, watch=watch, own=self
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
        self.changes = steps.generators.Changes(self.config.augment, self.config.steps, self.config.batch, rng)
        while self.made < self.config.steps:
            yield self.made
            self.made += 1
            self.stage.advance()

    def generate(self, loss_of: Callable[[Tensor], Sequence[Tensor]], names: Sequence[str]) -> None:
        """One step of the generator on the first of the terms that ``loss_of`` gives for the images."""
        import torch

        augment = self.config.augment

        def step(flips: Tensor, offsets: Tensor) -> list[Tensor]:
            seen = lambda x: loss_of(steps.generators.changed(x, augment, flips, offsets))  # noqa: E731
            images, terms = self.generator.step(seen)
            return [images, *terms]

        run = engine.fast.recorded(self.captured, "generate", step, self.generator.in_place, self.ctx.fast)
        images, *terms = run(*self.changes.of(self.made))
        if self.config.keep == "best":
            better = terms[0] < self.best
            self.candidate = torch.where(better, images, self.candidate)
            self.best = torch.where(better, terms[0], self.best)
        self.watch.generated(**dict(zip(names, terms, strict=True)))

    def store(self, **extra: Callable[[Tensor], Tensor]) -> bool:
        """Keep this epoch's images once, with what ``extra`` says of them; False if that was done before a kill."""
        import torch

        if self.stored:
            return False
        with torch.no_grad():
            images = self.candidate if self.config.keep == "best" else self.generator.images()
            seen = steps.pool.decode(steps.pool.encode(images, self.config.storage))
            self.pool.add(images, self.labels, **{name: of(seen) for name, of in extra.items()})
        self.watch.show(self.epoch + 1, seen, self.labels)
        self.stored = True
        return True

    def distillation(self) -> Iterator[dict[str, Tensor]]:
        """Batches of the pool in random order; call ``teach`` on each."""
        import torch

        config, device = self.config, self.ctx.device
        count = config.steps_of(self.epoch)
        rng = self.ctx.torch_rng("replay", f"epoch-{self.epoch}", device=device)
        passes = -(-count // len(self.pool))
        order = torch.cat([torch.randperm(self.pool.images, generator=rng, device=device) for _ in range(passes)])
        rng = self.ctx.torch_rng("augment", "distillation", f"epoch-{self.epoch}", device=device)
        changes = steps.generators.Changes(config.augment, count, config.batch, rng)
        while self.taught < count:
            rows = order[self.taught * config.batch : (self.taught + 1) * config.batch]
            taken = self.pool.take(rows)
            changed = steps.generators.changed(taken["images"], config.augment, *changes.of(self.taught))
            yield {**taken, "images": changed}
            self.taught += 1
            self.stage.advance()

    def teach(self, images: Tensor, soft: Tensor) -> None:
        """One step of the student."""
        config = self.config
        progress = (self.epoch + self.taught / config.steps_of(self.epoch)) / config.epochs
        loss = config.learn(self.student, images, soft, config.lr * rate(config.schedule, progress))
        self.watch.learned(loss)

    def ask(self, images: Tensor) -> Tensor:
        """The clients' logits [N,B,C], without gradients."""
        import torch

        def step(x: Tensor) -> list[Tensor]:
            with torch.no_grad():
                return [self.ensemble.logits(x)]

        return engine.fast.recorded(self.captured, f"ask {tuple(images.shape)}", step, [], self.ctx.fast)(images)[0]

    def describe(self, hints: Mapping[str, str]) -> None:
        """At the end: what there is to say of the last batch, and of the student."""
        last = self.pool.batch(-1)
        logits = steps.adversarial.weighted_logits(self.ask(last["images"]), self.weights)
        self.watch.describe(last["images"], last["labels"], logits, self.student, hints)

    def tensors(self) -> dict[str, Tensor]:
        """State for a checkpoint, beside student, generator, pool and watch."""
        import torch

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


def generator_settings(config: GenerativeConfig, **changes: Any) -> Any:
    """The generator as a method's settings have it."""
    values = {"latent": config.latent, "width": config.width, "lr": config.lr_generator, "clip": config.clip}
    return steps.generators.GeneratorSettings(**{**values, **changes})


def flops(uploads: Sequence[Upload], ctx: Context, settings: Any) -> tuple[int, int, int]:
    """Operations per image of one forward pass of all clients, of the student, and of the generator."""
    from fedbicross import models

    shape = ctx.architecture[1:]
    clients = sum(models.forward_flops(upload.task.model, *shape) for upload in uploads)
    made = steps.generators.forward_flops(settings, ctx.task.channels, ctx.task.image_size)
    return clients, models.forward_flops(ctx.task.model, *shape), made
