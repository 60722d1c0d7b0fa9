"""FedLMG (Yang et al., ICML 2025): a diffusion model at the server, steered by each client's network, makes the images.

Clients send what they send to FedISCA: a network with its batch-normalisation statistics. The server lets a pretrained
diffusion model draw images that each network takes for a class, and trains one student on them. The prior is a plug-in
(`steps.diffusion_prior`); what was and was not run: docs/methods/fedlmg.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator

from fedbicross import engine, models, parts, steps
from fedbicross.context import Context
from fedbicross.errors import MethodError, nearest
from fedbicross.lazy_torch import torch
from fedbicross.messages import Reply, Upload, file_name
from fedbicross.methods.base import MethodConfig
from fedbicross.methods.families import StudentMethod
from fedbicross.models import priors

if TYPE_CHECKING:
    from torch import Tensor

    from fedbicross.engine.ensemble import Ensemble
    from fedbicross.engine.student import Student


class FedLMGConfig(MethodConfig):
    """The prior, its guidance, and the student; values of the released code where the prior allows."""

    prior: str = Field(
        "gaussian", description="gaussian: a stand-in without weights (not the paper's); or stable_diffusion (paper)"
    )
    images_per_class: int = Field(30, ge=1, description="synthetic images per client and class (code: 30)")
    steps: int = Field(50, ge=1, le=1000, description="denoising steps (code: 50)")
    bn_steps: int = Field(10, ge=0, description="steps by the batch-norm term alone before them (code: 10)")
    guidance: float = Field(1.0, ge=0, description="step along the client's gradient (code: 1)")
    alpha_bn: float = Field(0.1, ge=0, description="weight of the batch-norm term beside cross-entropy (code: 0.1)")
    bn_distance: Literal["absolute", "relative"] = Field(
        "absolute", description="a layer's batch-norm distances as they are (papers), or over its own spread (ours)"
    )
    cfg: float = Field(3.0, ge=0, description="weight of the text, classifier-free guidance (code: 3)")
    prompt: str = Field("an image of {}", description="text for a class; {} is its name (code: an image of ...)")
    batch_synthesis: int = Field(
        10, ge=1, description="images made at once; each batch has its own BN statistics (ours)"
    )
    aggregation: Literal["specific_teacher", "multi_teacher", "fine_tune"] = Field(
        "specific_teacher",
        description="student learns from the client that steered the image, from all clients, or from labels alone",
    )
    temperature: float = Field(4.0, gt=0, description="τ of the two distillations (not stated; FALCON: 4)")
    epochs: int = Field(60, ge=1, description="of the student (FALCON's comparison: 60)")
    batch: int = Field(64, ge=2, description="images per step of the student (FALCON's comparison: 64)")
    lr: float = Field(1e-2, gt=0, description="of the student's SGD (ours; FALCON's comparison: Adam 5e-4)")
    momentum: float = Field(0.9, ge=0, lt=1, description="of the student's SGD (ours)")
    weight_decay: float = Field(5e-4, ge=0, description="of the student's SGD (ours)")

    @field_validator("prior")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in priors.PRIORS:
            raise ValueError(f"unknown diffusion prior{nearest(value, priors.PRIORS)}")
        return value

    @field_validator("prompt")
    @classmethod
    def _one_place(cls, value: str) -> str:
        if value.count("{}") != 1 or value.count("{") != 1 or value.count("}") != 1:
            raise ValueError("needs {} once, where the name of the class goes")
        return value


class FedLMG(StudentMethod[FedLMGConfig]):
    """One student for everyone, from images that a diffusion model draws, guided by the clients' networks."""

    name = "fedlmg"
    summary = "student trained on images of a diffusion model that the clients' networks steer (ICML 2025)"
    Config = FedLMGConfig
    variants = {"multi_teacher": {"aggregation": "multi_teacher"}, "fine_tune": {"aggregation": "fine_tune"}}
    variant_notes = {
        "multi_teacher": "the student learns from the mean of all clients (FedLMG_MD)",
        "fine_tune": "the student learns from labels alone (FedLMG_FT)",
    }
    quick_settings = {"images_per_class": 16, "steps": 20, "epochs": 20, "batch_synthesis": 32}
    needs = frozenset({"weights", "bn_stats"})
    upload_summary = "The trained network with its batch-normalisation statistics; the server draws images that fit it."

    def check_machine(self) -> None:
        """The prior, and what it needs."""
        priors.check(self.config.prior)

    def fuse(self, uploads: Sequence[Upload], ctx: Context) -> list[Reply]:
        """Per client, guided images of every class; then one student on all of them."""
        priors.check(self.config.prior)
        if self.config.prior == "gaussian":
            ctx.record.warn("fedlmg ran with the stand-in prior: smooth blobs, not the images of a diffusion model")
        names = [upload.client for upload in uploads]
        teachers = steps.teachers.load_teachers(
            names,
            [upload.task.model for upload in uploads],
            [upload.tensors for upload in uploads],
            ctx.architecture[1:],
            ctx.device,
            ctx.precision,
            bn_distance=self.config.bn_distance,
        )
        steps.teachers.need_batchnorm(teachers, names, self.name)
        drawn = [self._draw(teachers.subset([i]), name, ctx) for i, name in enumerate(names)]
        images, labels = torch.cat([part[0] for part in drawn]), torch.cat([part[1] for part in drawn])
        owners = torch.arange(len(uploads), device=ctx.device).repeat_interleave(len(drawn[0][1]))
        student = self._train(images, labels, self._soft_labels(teachers, images, owners), ctx)
        recognised = float(
            (teachers.logits(images).argmax(2)[owners, torch.arange(len(images))] == labels).float().mean()
        )
        ctx.record.add("scalars", "images that their own client recognises", f"{recognised:.0%}")
        reply = Reply(student.state(), {"architecture": ctx.task.model})
        return [reply for _ in uploads]

    def _draw(self, client: Ensemble, name: str, ctx: Context) -> tuple[Tensor, Tensor]:
        """Images of every class that this client steered; all are kept, since they are the costly part."""
        config, prior_steps, images = self.config, steps.diffusion_prior, steps.sources.Batches()
        labels = torch.arange(len(ctx.task.classes), device=ctx.device).repeat(config.images_per_class)
        batches = torch.split(labels, config.batch_synthesis)
        label = f"fedlmg: images for {name[:32]}"
        stage = ctx.stage(f"images-{file_name(name)}", label, len(batches), keep_end=True, images=images)
        if stage.done < len(batches):
            prior = prior_steps.load_prior(config.prior, config.steps, ctx.task.image_size, config.cfg, ctx.device)
            own = models.forward_flops(*ctx.architecture)
            stage.numbers["flops"] = prior_steps.generation_flops(prior, own, config.bn_steps)
            guidance = prior_steps.Guidance(config.guidance, config.alpha_bn, config.bn_steps)
        for number in stage.steps():
            texts = [config.prompt.format(ctx.task.classes[int(label)]) for label in batches[number]]
            rng = ctx.torch_rng("guided images", name, str(number), device=ctx.device)
            given = (batches[number], texts, ctx.task.image_shape, guidance, rng)
            images.add(prior_steps.guided_images(prior, client, *given))
        per_image = stage.numbers["flops"]
        ctx.record.add("scalars", "operations per synthetic image (GFLOP)", round(per_image / 1e9, 3))
        ctx.record.flops += per_image * len(labels)
        return torch.cat(images.images), labels

    def _soft_labels(self, teachers: Ensemble, images: Tensor, owners: Tensor) -> Tensor | None:
        """What the student is taught beside the labels; nothing when it is only fine-tuned."""
        if self.config.aggregation == "fine_tune":
            return None
        with torch.no_grad():
            logits = torch.cat([teachers.logits(part) for part in torch.split(images, 500)], dim=1)
        if self.config.aggregation == "multi_teacher":
            return engine.combine.combine_logits(logits, "mean_logits", self.config.temperature)
        own = logits[owners, torch.arange(len(owners), device=owners.device)]
        return engine.combine.soften(own, self.config.temperature)

    def _train(self, images: Tensor, labels: Tensor, soft: Tensor | None, ctx: Context) -> Student:
        """SGD on all images: cross-entropy, and distillation where there are soft labels."""
        config = self.config
        student = parts.students.new_student(ctx, 0, config.epochs * len(images) // config.batch)
        stage = ctx.stage("student", "fedlmg: student", config.epochs, student=student)
        for epoch in stage.steps():
            rate = config.lr * engine.recipe.lr_multiplier("cosine", stage.progress)
            order = torch.randperm(len(images), generator=ctx.torch_rng("student", "order", str(epoch))).to(ctx.device)
            # A rest of one image has no batch statistics; it has its turn in another epoch.
            for rows in [part for part in torch.split(order, config.batch) if len(part) > 1]:

                def loss_of(logits: Tensor, rows: Tensor = rows) -> Tensor:
                    loss = torch.nn.functional.cross_entropy(logits, labels[rows])
                    if soft is not None:
                        loss = loss + steps.distill.soft_kd_loss(logits, soft[rows], config.temperature)
                    return loss

                _, gradients = student.gradient(images[rows], loss_of)
                student.update(gradients, rate, config.momentum, config.weight_decay)
        if not student.finite:
            raise MethodError("diverged", "fedlmg: the student's weights are no longer finite; lower lr")
        ctx.record.flops += 3 * models.forward_flops(*ctx.architecture) * len(images) * config.epochs
        return student
