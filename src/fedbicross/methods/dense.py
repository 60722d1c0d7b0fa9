"""DENSE (Zhang et al., NeurIPS 2022): a generator that all uploaded networks and the student judge, then distillation.

Per epoch: train the generator for a few steps so that the ensemble recognises its images (cross-entropy), so that they
look like training images to every client's batch normalisation, and so that they lie where ensemble and student
disagree (boundary support); then distil the ensemble on all images made so far. Differences to the paper and to the
authors' code: docs/methods/dense.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from fedbicross import engine, parts, steps
from fedbicross.context import Context
from fedbicross.lazy_torch import torch
from fedbicross.messages import Reply, Upload
from fedbicross.methods.families import StudentMethod
from fedbicross.parts.settings import ReplayConfig

if TYPE_CHECKING:
    from torch import Tensor

    from fedbicross.engine.ensemble import Ensemble
    from fedbicross.engine.student import Student

HINTS = {
    "uniform": "the clients contradict each other: try co_boosting or fedbicross",
    "structure": "raise alpha_bn, steps or width",
    "unreached": "perhaps no client has that class, or alpha_bn or alpha_adv outweighs the cross-entropy: lower it",
    "variety": "use reset = true, a larger latent or fewer steps",
}
TERMS = ("generator", "cross-entropy", "batch norm", "boundary support")


class DENSEConfig(ReplayConfig):
    """DENSE's settings; the paper's values are the defaults."""

    epochs: int = Field(200, ge=1, description="T: epochs of generation and distillation (paper: 200)")
    batch: int = Field(256, ge=2, description="B: images per generated batch (authors' code: 256)")
    latent: int = Field(256, ge=1, description="length of the latent vector z (authors' code: 256)")
    lr_generator: float = Field(1e-3, gt=0, description="η_G: Adam's rate on the generator (paper: 1e-3)")
    alpha_bn: float = Field(1.0, ge=0, description="λ₁: weight of the batch-norm term, mean over clients (paper: 1)")
    alpha_adv: float = Field(0.5, ge=0, description="λ₂: weight of the boundary-support term (paper: 0.5; code: 1)")
    authors_code: bool = Field(False, description="true: no batch-norm term whatever alpha_bn, as in the released code")
    reset: bool = Field(False, description="a new generator every epoch (authors' code: yes; paper: one)")
    temperature: float = Field(20.0, gt=0, description="τ of the distillation, with τ² (authors' code: 20)")
    lr: float = Field(1e-2, gt=0, description="η_S: the student's SGD rate (paper: 0.01; README: 0.005)")

    @property
    def matches_batchnorm(self) -> bool:
        """Whether L_BN takes part."""
        return self.alpha_bn > 0 and not self.authors_code


class DENSE(StudentMethod[DENSEConfig]):
    """One global student for everyone."""

    name = "dense"
    summary = "distils the ensemble on images of a generator that seeks its boundary to the student (NeurIPS 2022)"
    Config = DENSEConfig
    sends_only_the_network = True
    upload_summary = "The trained network; the server trains a generator of images against it."
    variants = {
        "authors_code": {
            "authors_code": True,
            "alpha_adv": 1.0,
            "reset": True,
            "learn_latent": True,
            "keep": "best",
            "augment": "flip",
            "lr": 0.005,
        },
        "one_pass": {"pool": 1},
        "no_bn": {"alpha_bn": 0.0},
        "no_adversarial": {"alpha_adv": 0.0},
    }
    variant_notes = {
        "authors_code": "the released script: no batch-norm term, generator and latent vectors anew each epoch",
        "one_pass": "Algorithm 1 to the letter: each batch distilled once, one student step per epoch",
        "no_bn": "ablation w/o L_BN; for clients without batch normalisation",
        "no_adversarial": "ablation w/o L_div",
    }
    quick_settings = {
        "epochs": 30,
        "steps": 8,
        "batch": 32,
        "width": 32,
        "latent": 64,
        "lr_generator": 5e-3,
        "reset": True,
        "steps_distil": 20,
        "lr": 0.1,
        "schedule": "cosine",
    }

    @property
    def needs(self) -> frozenset[str]:
        """Weights, and batch-normalisation statistics only where L_BN takes part."""
        return frozenset({"weights", *(["bn_stats"] if self.config.matches_batchnorm else [])})

    def fuse(self, uploads: Sequence[Upload], ctx: Context) -> list[Reply]:
        """Algorithm 1: train the generator, keep its images, distil; epoch after epoch."""
        config = self.config
        server = parts.replay.Replay(self.name, config, uploads, ctx, "bn_stats" in self.needs)

        def soften(images: Tensor) -> Tensor:
            return engine.combine.combine_logits(server.ask(images), "mean_logits", config.temperature)

        def loss_of(images: Tensor) -> list[Tensor]:
            return generator_loss(config, server.ensemble, server.student, images, server.labels)

        still = config.augment == "none"  # the same image always gets the same soft label: ask only once
        for _ in server.epochs():
            for _ in server.synthesis():
                server.generate(loss_of, TERMS)
            server.store(**({"soft": soften} if still else {}))
            for batch in server.distillation():
                server.teach(batch["images"], batch["soft"] if still else soften(batch["images"]))
        server.describe(HINTS)
        clients, student, generator = parts.costs.forward_flops(ctx, uploads, server.generator.settings)
        made, asked = config.epochs * config.steps, config.epochs if still else server.learning
        judged = 2 * student if config.alpha_adv else 0
        work = made * (2 * clients + judged + 3 * generator) + asked * clients + server.learning * 3 * student
        ctx.record.flops += config.batch * work
        reply = Reply(server.student.state(), {"architecture": ctx.task.model})
        return [reply for _ in uploads]


def generator_loss(
    config: DENSEConfig, ensemble: Ensemble, student: Student, x: Tensor, labels: Tensor
) -> list[Tensor]:
    """L_gen = L_CE + λ₁ L_BN + λ₂ L_div: the total, and its terms before weighting."""
    if config.matches_batchnorm:
        logits, bn_losses = steps.teachers.logits_and_bn_loss_of(ensemble, x)
        batch_norm = steps.inversion.reduce_bn_loss(bn_losses, ensemble.has_batchnorm, "mean")
    else:
        logits = steps.teachers.logits_of(ensemble, x)
        batch_norm = torch.zeros((), device=x.device)
    cross_entropy = steps.inversion.ensemble_cross_entropy(logits, labels, "mean_logits")
    boundary = torch.zeros((), device=x.device)
    if config.alpha_adv:
        boundary = steps.adversarial.adversarial_loss(logits.mean(0), student.frozen_logits(x), boundary=True)
    total = cross_entropy + config.alpha_bn * batch_norm + config.alpha_adv * boundary
    return [total, cross_entropy, batch_norm, boundary]
