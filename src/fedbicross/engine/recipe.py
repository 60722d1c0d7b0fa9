"""How a client trains: the papers' recipe and a modern one. Torch-free, so that configs validate fast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from fedbicross.settings import Settings

# FedISCA's recipe (paper: optimiser, rate, batch, epochs; released code: the rest), which FedBiCross reuses.
_PAPER: dict[str, Any] = {"lr": 1e-3, "schedule": "step", "augment": False}
# The last epoch: a rate that falls to nothing needs no choice, and validation images that chose nothing are unbiased.
_MODERN: dict[str, Any] = {"lr": 1e-2, "schedule": "cosine", "augment": True, "select": "last"}
RECIPES = {"paper": _PAPER, "modern": _MODERN}


def lr_multiplier(schedule: str, progress: float, milestones: Sequence[float] = (0.5, 0.75)) -> float:
    """At ``progress`` in [0, 1): "step" a tenth from each milestone on (FedISCA: 50 and 75 %), "cosine", or 1."""
    if schedule == "step":
        return 1 / 10.0 ** sum(progress >= milestone for milestone in milestones)
    return 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0


class PrivateTraining(Settings):
    """Differential privacy of a client's network by DP-SGD (Abadi et al. 2016), and of the numbers sent with it."""

    epsilon: float = Field(gt=0, le=100, description="ε for each training image: the network and counts together")
    delta: float = Field(1e-5, gt=0, le=1e-2, description="δ of the same, well below one over the number of images")
    max_grad_norm: float = Field(1.0, gt=0, le=1e6, description="longest gradient of one image; a longer one is cut")
    counts_share: float = Field(
        0.05, gt=0, lt=1, description="kept for numbers of images, as a share of what (ε, δ) gives one mechanism"
    )
    epochs: int | None = Field(
        None, ge=1, le=100_000, description="of the training with noise; none: `training.epochs`"
    )
    batch_size: int | None = Field(
        None, ge=2, le=65_536, description="likewise, or `training.batch_size`; large ones bear noise better"
    )
    lr: float | None = Field(
        None,
        gt=0,
        le=10,
        description="of the training with noise, whose clipped gradients need a larger one; none: `training.lr`",
    )


class Training(Settings):
    """Local training of one client. Values not given are taken from ``recipe``."""

    recipe: Literal["paper", "modern"] = Field("paper", description="preset for lr, schedule, augment and select")
    epochs: int = Field(100, ge=1, le=100_000, description="passes over the local training images (paper: 100)")
    batch_size: int = Field(128, ge=2, le=65_536, description="images per step (paper: 128)")
    lr: float = Field(1e-3, gt=0, le=10, description="SGD learning rate (paper: 1e-3, modern: 1e-2)")
    momentum: float = Field(0.9, ge=0, lt=1, description="SGD momentum (authors' code: 0.9)")
    weight_decay: float = Field(5e-4, ge=0, le=1, description="L2 weight decay (authors' code: 5e-4)")
    schedule: Literal["step", "cosine", "constant"] = Field("step", description="step: x0.1 at 50 % and 75 %")
    augment: bool = Field(False, description="random quarter turns and mirror images (paper: none)")
    validation: float = Field(0.1, ge=0, lt=1, description="share kept for local validation (authors' code: 0.1)")
    select: Literal["best", "last"] = Field(
        "best", description="uploaded epoch: best on local validation (paper), or last (modern)"
    )
    loss: Literal["cross_entropy", "balanced"] = Field(
        "cross_entropy",
        description="balanced: of z + log n(c), without the classes that a client lacks, so that its own class mix is "
        "not learnt (ours)",
    )
    init: Literal["shared", "independent"] = Field("shared", description="do clients start from the same weights?")
    init_scheme: Literal["torch", "he"] = Field(
        "torch", description="first weights of clients and students: torch's default (authors' code) or He's normal"
    )
    seed: int | None = Field(None, description="seed of initialisation and batches; none: the run's seed")
    dp: PrivateTraining | None = Field(
        None, description="differential privacy of what leaves by DP-SGD (extra `dp`); none: none of it"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_recipe(cls, values: Any) -> Any:
        if isinstance(values, dict):
            preset = RECIPES.get(values.get("recipe", "paper"), {})
            return {**preset, **values}
        return values

    @model_validator(mode="after")
    def _nothing_beside_the_noise(self) -> Training:
        if self.dp is not None and self.select == "best":
            raise ValueError('dp needs select = "last": an epoch chosen on images tells of them without noise')
        if self.dp is not None and self.loss == "balanced":
            raise ValueError('dp needs loss = "cross_entropy": the balanced one holds class counts without noise')
        return self

    @property
    def as_trained(self) -> Training:
        """What the network that leaves is trained by: where it has noise, with the settings that `dp` has for that."""
        if self.dp is None:
            return self
        own = {name: getattr(self.dp, name) for name in ("epochs", "batch_size", "lr")}
        return self.model_copy(update={name: value for name, value in own.items() if value is not None})

    @property
    def balanced(self) -> bool:
        """Whether the client's class mix stays out of its network."""
        return self.loss == "balanced"

    def rate(self, epoch: int, epochs: int | None = None) -> float:
        """Learning rate of ``epoch`` (from 0) out of ``epochs``."""
        return self.lr * lr_multiplier(self.schedule, epoch / (epochs or self.epochs))
