"""Co-Boosting (Dai et al., ICLR 2024): hard images make a better ensemble, a better ensemble makes better images.

Per epoch: train a generator towards images that are hard for the weighted ensemble and unknown to the student; push
them further by output-diversified perturbations; shift the clients' weights so that the ensemble gets the hard images
right; distil the weighted ensemble. Differences to the paper and to the authors' code: docs/methods/co_boosting.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from fedbicross import engine, parts, steps
from fedbicross.context import Context
from fedbicross.lazy_torch import torch
from fedbicross.messages import Reply, Upload
from fedbicross.methods.families import StudentMethod
from fedbicross.parts.settings import ReplayConfig

if TYPE_CHECKING:
    from torch import Tensor

    from fedbicross.parts.replay import Replay

HINTS = {
    "uniform": "the clients contradict each other, and reweighting did not help: raise lr_weights, or try fedbicross",
    "structure": "raise steps or width, or match batch normalisation (alpha_bn)",
    "unreached": "perhaps no client has that class, or alpha_adv outweighs the cross-entropy: lower it",
    "variety": "use a larger latent or fewer steps",
}
TERMS = ("generator", "hard cross-entropy", "batch norm", "adversarial")
COLLAPSED = 0.99  # one client's share of all weight


class CoBoostingConfig(ReplayConfig):
    """Co-Boosting's settings; the paper's values are the defaults."""

    epochs: int = Field(200, ge=1, description="T: epochs of generation and distillation (authors' code: 200)")
    batch: int = Field(128, ge=2, description="B: images per generated batch (paper: 128)")
    latent: int = Field(256, ge=1, description="length of the latent vector z (authors' code: 256)")
    lr_generator: float = Field(1e-3, gt=0, description="η_G: Adam's rate on the generator (paper: 1e-3)")
    hardness: float = Field(1.0, ge=0, description="exponent of an image's difficulty 1 - p_y; 0: plain (paper: 1)")
    alpha_adv: float = Field(1.0, ge=0, description="β: weight of the adversarial term (paper: 1)")
    temperature_adv: float = Field(3.0, gt=0, description="of the adversarial term, with its square (authors' code: 3)")
    alpha_bn: float = Field(0.0, ge=0, description="weight of a batch-norm term, mean over clients (paper: none)")
    epsilon: float = Field(8 / 255, ge=0, description="ε: size of the perturbation, images in [-1, 1] (paper: 8/255)")
    weight_step: Literal["sign", "gradient", "none"] = Field(
        "sign", description="how the clients' weights move: by the sign of the gradient (paper), by it, or not at all"
    )
    lr_weights: float | None = Field(None, gt=0, description="μ: step of the clients' weights; none: 0.1/N (paper)")
    decay_weights: float = Field(1.0, gt=0, le=1, description="factor on μ per epoch (authors' code: 0.99)")
    reweight_on: Literal["perturbed", "stored"] = Field(
        "perturbed", description="images by which weights move: as distilled (paper), or the whole pool (authors' code)"
    )
    learn_latent: bool = Field(True, description="train the latent vectors too (authors' code: yes)")
    temperature: float = Field(4.0, gt=0, description="τ of perturbation and distillation, with τ² (authors' code: 4)")
    lr: float = Field(1e-2, gt=0, description="η_S: the student's SGD rate (paper: 0.01)")
    weight_decay: float = Field(1e-4, ge=0, description="of the student's SGD (authors' code: 1e-4)")
    schedule: Literal["step", "cosine", "constant"] = Field("cosine", description="of the student's lr (code: cosine)")
    clip: float | None = Field(10.0, gt=0, description="largest norm of a gradient (authors' code: 10)")


class CoBoosting(StudentMethod[CoBoostingConfig]):
    """One global student for everyone, from an ensemble whose weights are learned."""

    name = "co_boosting"
    summary = "hard generated images and learned client weights improve each other, then distillation (ICLR 2024)"
    Config = CoBoostingConfig
    sends_only_the_network = True
    upload_summary = "The trained network; the server trains a generator of images against it."
    variants = {
        "authors_code": {
            "lr_weights": 0.01,
            "decay_weights": 0.99,
            "reweight_on": "stored",
            "keep": "best",
            "augment": "flip",
        },
        "gradient": {"weight_step": "gradient"},
        "no_hard": {"hardness": 0.0},
        "no_adversarial": {"alpha_adv": 0.0},
        "no_perturbation": {"epsilon": 0.0},
        "no_reweighting": {"weight_step": "none"},
    }
    variant_notes = {
        "authors_code": "the released script: weights move by 0.01 per stored batch, from the second epoch on",
        "gradient": "ours: weights move by the gradient itself, not by its sign",
        "no_hard": "ablation: every image counts alike in the generator's cross-entropy",
        "no_adversarial": "ablation: the generator does not look at the student",
        "no_perturbation": "ablation w/o DHS: images as they are",
        "no_reweighting": "ablation w/o EE: all clients alike",
    }
    quick_settings = {
        "epochs": 25,
        "steps": 8,
        "batch": 32,
        "width": 32,
        "latent": 64,
        "lr_generator": 5e-3,
        "steps_distil": 8,
        "lr": 0.1,
    }

    @property
    def needs(self) -> frozenset[str]:
        """Weights, and batch-normalisation statistics only for a term that the paper does not have."""
        return frozenset({"weights", *(["bn_stats"] if self.config.alpha_bn > 0 else [])})

    def fuse(self, uploads: Sequence[Upload], ctx: Context) -> list[Reply]:
        """Algorithm 1: hard images, perturbed; better weights; distillation; epoch after epoch."""
        config = self.config
        boosting = Boosting(config, parts.replay.Replay(self.name, config, uploads, ctx, "bn_stats" in self.needs))
        server, moving = boosting.server, config.weight_step != "none"
        whole_pool = moving and config.reweight_on == "stored"
        for epoch in server.epochs():
            for _ in server.synthesis():
                server.generate(boosting.generator_loss, TERMS)
            stored_now = server.store(**({"logits": boosting.logits_by_image} if whole_pool else {}))
            if stored_now and whole_pool and epoch > 0:
                for kept in server.pool.batches:
                    boosting.reweight(kept["logits"].transpose(0, 1), kept["labels"])
            for batch in server.distillation():
                images = boosting.perturb(batch["images"], server.taught)
                logits = server.ask(images)
                if moving and not whole_pool:
                    boosting.reweight(logits, batch["labels"])
                server.teach(images, boosting.soften(logits))
        server.describe(HINTS)
        describe_weights(ctx, [upload.client for upload in uploads], server.history)
        ctx.record.flops += self._flops(uploads, server)
        reply = Reply(server.student.state(), {"architecture": ctx.task.model})
        return [reply for _ in uploads]

    def _flops(self, uploads: Sequence[Upload], server: Replay) -> int:
        config = self.config
        clients, student, generator = parts.costs.forward_flops(server.ctx, uploads, server.generator.settings)
        asked = 3 if config.epsilon else 1  # a perturbation is a pass forward and one back
        made = 2 * clients + (2 * student if config.alpha_adv else 0) + 3 * generator
        return config.batch * (config.epochs * config.steps * made + server.learning * (asked * clients + 3 * student))


class Boosting:
    """The steps of an epoch that are Co-Boosting's own; the clients' weights are changed in place."""

    def __init__(self, config: CoBoostingConfig, server: Replay) -> None:
        self.config, self.server = config, server
        self.lr = config.lr_weights if config.lr_weights is not None else 0.1 / len(server.ensemble)

    def generator_loss(self, x: Tensor) -> list[Tensor]:
        """L_H + β L_A (+ a batch-norm term): the total, and its terms before weighting."""
        config, server = self.config, self.server
        batch_norm = adversarial = torch.zeros((), device=x.device)
        if config.alpha_bn:
            logits, bn_losses = steps.teachers.logits_and_bn_loss_of(server.ensemble, x)
            batch_norm = steps.inversion.reduce_bn_loss(bn_losses, server.ensemble.has_batchnorm, "mean")
        else:
            logits = steps.teachers.logits_of(server.ensemble, x)
        teacher = steps.adversarial.weighted_logits(logits, server.weights)
        hard = steps.adversarial.hard_cross_entropy(teacher, server.labels, config.hardness)
        if config.alpha_adv:
            judged = server.student.frozen_logits(x)
            adversarial = steps.adversarial.adversarial_loss(teacher, judged, config.temperature_adv)
        total = hard + config.alpha_adv * adversarial + config.alpha_bn * batch_norm
        return [total, hard, batch_norm, adversarial]

    def logits_by_image(self, x: Tensor) -> Tensor:
        """The clients' logits [B,N,C], to be kept with the images: the clients never change."""
        return self.server.ask(x).transpose(0, 1).contiguous()

    def reweight(self, logits: Tensor, labels: Tensor) -> None:
        """One step of the clients' weights towards those that are right about these images."""
        config, weights = self.config, self.server.weights
        gradient = steps.adversarial.weight_gradient(logits, labels, weights)
        lr = self.lr * config.decay_weights**self.server.epoch
        weights.copy_(steps.adversarial.updated_weights(weights, gradient, lr, config.weight_step))

    def perturb(self, images: Tensor, number: int) -> Tensor:
        """DHS: images moved along a random direction of the ensemble's answers, a new one for every batch."""
        config, server = self.config, self.server
        if not config.epsilon:
            return images
        names = ("directions", f"epoch-{server.epoch}", f"step-{number}")
        rng = server.ctx.torch_rng(*names, device=server.ctx.device)
        shape = (len(images), len(server.ctx.task.classes))
        directions = 2 * torch.rand(shape, generator=rng, device=server.ctx.device) - 1

        def step(x: Tensor, u: Tensor) -> list[Tensor]:
            def teacher(x: Tensor) -> Tensor:
                return steps.adversarial.weighted_logits(steps.teachers.logits_of(server.ensemble, x), server.weights)

            return [steps.adversarial.diversified(x, teacher, u, config.epsilon, config.temperature)]

        return engine.fast.recorded(server.captured, "perturb", step, [], server.ctx.fast)(images, directions)[0]

    def soften(self, logits: Tensor) -> Tensor:
        """Soft labels of the weighted ensemble."""
        weighted = steps.adversarial.weighted_logits(logits, self.server.weights)
        return engine.combine.soften(weighted, self.config.temperature)


def describe_weights(ctx: Context, names: Sequence[str], history: Sequence[Tensor]) -> None:
    """Each client's share of all weight over the epochs, and a warning when one has it all."""
    shares = torch.stack(list(history)).cpu()
    shares = shares / shares.sum(1, keepdim=True)
    every = max(1, len(shares) // parts.diagnosis.MOST_POINTS)
    x = list(range(0, len(shares), every))
    rows = [name if len(name) <= 32 else name[:29] + "..." for name in names]
    values = [[round(float(shares[epoch, k]), 4) for epoch in x] for k in range(len(rows))]
    ctx.record.add("heatmaps_over_time", "weights of the clients", {"x": x, "rows": rows, "values": values})
    top = int(shares[-1].argmax())
    if len(rows) > 1 and float(shares[-1, top]) >= COLLAPSED:
        ctx.record.warn(f"the ensemble's weights collapsed onto {rows[top]}; lower lr_weights or decay_weights")
