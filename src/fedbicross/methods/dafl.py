"""DAFL (Chen et al., ICCV 2019) with an ensemble as its teacher: a generator of images that the teacher is sure of.

Per step: draw latent vectors, make images of which the teacher is sure (one-hot), in all classes alike (information
entropy) and with strong features (activation); train the student on them at once. No labels, no memory. The paper
compresses one network; the one-shot papers put the mean of the clients' logits in its place. Differences to the paper
and to the authors' code: docs/methods/dafl.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from fedbicross import engine, parts, steps
from fedbicross.context import Context
from fedbicross.lazy_torch import torch
from fedbicross.messages import Reply, Upload
from fedbicross.methods.base import MethodConfig
from fedbicross.methods.families import StudentMethod

if TYPE_CHECKING:
    from torch import Tensor

    from fedbicross.engine.ensemble import Ensemble

HINTS = {
    "uniform": "raise weight_onehot, or the clients contradict each other: try fedbicross",
    "structure": "raise epochs or width, or lower lr_generator",
    "unreached": "",  # the label of an image is whatever the teacher says
    "variety": "raise weight_entropy, or lower lr_generator or weight_onehot",
}


class DAFLConfig(MethodConfig):
    """DAFL's settings; the paper's values (MNIST) are the defaults."""

    epochs: int = Field(200, ge=1, description="epochs (MNIST: 200; CIFAR-10: 2,000)")
    steps: int = Field(120, ge=1, description="steps per epoch, each of generator and student (authors' code: 120)")
    batch: int = Field(512, ge=2, description="B: images per step (MNIST: 512; CIFAR-10: 1,024)")
    latent: int = Field(100, ge=1, description="length of the latent vector z (MNIST: 100; CIFAR-10: 1,000)")
    width: int = Field(128, ge=2, description="channels of the generator (authors' code: 128); fewer are faster")
    lr_generator: float = Field(2e-2, gt=0, description="Adam's rate on the generator (CIFAR-10 script: 0.02)")
    temperature: float = Field(20.0, gt=0, description="τ of the distillation, with τ² (DAFL: 1; one-shot papers: 20)")
    lr: float = Field(0.1, gt=0, description="the student's SGD rate (CIFAR-10 script: 0.1)")
    momentum: float = Field(0.9, ge=0, lt=1, description="of the student's SGD")
    weight_decay: float = Field(5e-4, ge=0, description="of the student's SGD (CIFAR-10 script: 5e-4)")
    teachers_at_once: int | None = Field(
        None, ge=1, description="clients in memory at once during generation; none: as many as fit (ours, for large N)"
    )
    clip: float | None = Field(None, gt=0, description="largest norm of a gradient of generator or student; none: any")
    weight_onehot: float = Field(1.0, ge=0, description="weight of the one-hot loss (paper: 1)")
    weight_activation: float = Field(0.1, ge=0, description="α: weight of the activation loss (paper: 0.1)")
    weight_entropy: float = Field(5.0, ge=0, description="β: weight of the information-entropy loss (paper: 5)")
    losses: Literal["released", "written"] = Field(
        "released", description="log10 and a mean over features (code, to which the weights belong), or the equations"
    )
    output: Literal["tanh", "standardised"] = Field(
        "tanh", description="images in the clients' range, or standardised whatever that range is (authors' code)"
    )
    schedule: Literal["step", "cosine", "constant"] = Field("step", description="step: x0.1 at 40 % and 80 % (code)")


class DAFL(StudentMethod[DAFLConfig]):
    """One global student for everyone."""

    name = "dafl"
    summary = "a generator of images that the ensemble is sure of, and a student trained along with it (ICCV 2019)"
    Config = DAFLConfig
    sends_only_the_network = True
    upload_summary = "The trained network; the server trains a generator of images against it."
    needs = frozenset({"weights"})
    variants = {
        "cifar10": {
            "epochs": 2000,
            "batch": 1024,
            "latent": 1000,
            "weight_onehot": 0.05,
            "weight_activation": 0.01,
            "output": "standardised",
            "temperature": 1.0,
        },
        "cifar100": {
            "epochs": 2000,
            "batch": 1024,
            "latent": 1000,
            "weight_onehot": 0.5,
            "weight_activation": 0.1,
            "weight_entropy": 20.0,
            "output": "standardised",
            "temperature": 1.0,
        },
        "cmi": {
            "steps": 400,
            "batch": 256,
            "latent": 512,
            "lr_generator": 1e-3,
            "weight_activation": 0.001,
            "weight_entropy": 20.0,
            "schedule": "cosine",
        },
        "written": {"losses": "written"},
        "no_activation": {"weight_activation": 0.0},
    }
    variant_notes = {
        "cifar10": "the authors' script for CIFAR-10",
        "cifar100": "the authors' script for CIFAR-100",
        "cmi": "the settings of the re-implementation that came with CMI (zju-vipa/CMI)",
        "written": "entropy and activation exactly as the paper writes them",
        "no_activation": "ablation without the activation loss",
    }
    quick_settings = {
        "epochs": 20,
        "steps": 20,
        "batch": 32,
        "width": 32,
        "latent": 64,
        "lr_generator": 5e-3,
        "schedule": "cosine",
    }

    def fuse(self, uploads: Sequence[Upload], ctx: Context) -> list[Reply]:
        """Algorithm 1 of DAFL: generator and student, step by step together."""
        config = self.config
        total = config.epochs * config.steps
        passes = {"match": total, "stored": total, "features": total}
        ensemble = parts.teachers.load_ensemble(
            uploads, ctx, batch=config.batch, at_once=config.teachers_at_once, passes=passes
        )
        student = parts.students.new_student(ctx, 0, total)
        settings = steps.generators.GeneratorSettings(
            latent=config.latent,
            width=config.width,
            lr=config.lr_generator,
            clip=config.clip,
            output=config.output,
            eps=0.8,
            init="uniform",
        )
        shape = ctx.task.image_shape
        generator = steps.generators.ImageGenerator(settings, shape, config.batch, ctx.device, ctx.precision)
        generator.reset(ctx.torch_rng("generator"))
        log = parts.synthesis_log.GeneratorLog(ctx, config.epochs, total, total)

        def draw(*names: str) -> Tensor:
            rng = ctx.torch_rng("latent", *names, device=ctx.device)
            return torch.randn((config.batch, config.latent), generator=rng, device=ctx.device)

        def generate(z: Tensor) -> list[Tensor]:
            images, terms = generator.step(lambda x: generator_loss(config, ensemble, x), z)
            return [images, *terms]

        kept: dict[str, Any] = {}
        label = f"{self.name}: generating and distilling"
        stage = ctx.stage("distillation", label, total, student=student, generator=generator, watch=log)
        for step in stage.steps():
            stage.note = f"epoch {step // config.steps + 1}/{config.epochs}"
            run = engine.fast.recorded(kept, "generate", generate, generator.in_place, ctx.fast)
            images, *terms, logits = run(draw(f"step-{step}"))
            log.generated(**dict(zip(("generator", "one-hot", "entropy", "activation"), terms, strict=True)))
            loss = parts.students.learn_soft(
                student,
                images,
                engine.combine.soften(logits, config.temperature),
                config.lr * engine.recipe.lr_multiplier(config.schedule, stage.progress, milestones=(0.4, 0.8)),
                temperature=config.temperature,
                momentum=config.momentum,
                weight_decay=config.weight_decay,
                clip=config.clip,
            )
            log.learned(loss)
            if log.step % config.steps == 0:
                log.show(log.step // config.steps, images, logits.argmax(-1))
        with torch.no_grad():
            images = generator.images(draw("end"))
            logits = ensemble.logits(images).mean(0)
        describe_missing(ctx, logits)
        log.describe(images, logits.argmax(-1), logits, student, HINTS)
        of_clients, of_student, of_generator = parts.costs.forward_flops(ctx, uploads, settings)
        ctx.record.flops += config.batch * total * (2 * of_clients + 3 * of_student + 3 * of_generator)
        reply = Reply(student.state(), {"architecture": ctx.task.model})
        return [reply for _ in uploads]


def generator_loss(config: DAFLConfig, ensemble: Ensemble, x: Tensor) -> list[Tensor]:
    """L_oh + α L_a + β L_ie: the total, its terms before weighting, and the ensemble's logits."""
    activation = torch.zeros((), device=x.device)
    if config.weight_activation:
        all_logits, features = steps.teachers.logits_and_features_of(ensemble, x)
        activation = steps.adversarial.activation_loss(features, config.losses)
    else:
        all_logits = steps.teachers.logits_of(ensemble, x)
    logits = all_logits.mean(0)
    one_hot = steps.adversarial.one_hot_loss(logits)
    entropy = steps.adversarial.information_entropy_loss(logits, config.losses)
    total = config.weight_onehot * one_hot + config.weight_activation * activation + config.weight_entropy * entropy
    return [total, one_hot, entropy, activation, logits]


def describe_missing(ctx: Context, logits: Tensor) -> None:
    """Nothing forces the generator to make every class: say which it does not."""
    made = set(logits.argmax(-1).tolist())
    missing = [name for index, name in enumerate(ctx.task.classes) if index not in made]
    ctx.record.add("scalars", "classes that the generator makes", f"{len(made)} of {len(ctx.task.classes)}")
    if missing:
        hint = "perhaps the mean of the clients never says so; else raise weight_entropy"
        ctx.record.warn(f"the generator makes no image of {', '.join(map(str, missing[:8]))}; {hint}")
