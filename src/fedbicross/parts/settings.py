"""Groups of settings that several methods share: data only, and numbers that follow from them. Free of torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from fedbicross.errors import ConfigError
from fedbicross.models import encoders
from fedbicross.settings import MethodConfig


class InversionConfig(MethodConfig):
    """Images synthesised from networks; the papers' values are the defaults."""

    steps: int = Field(
        500, ge=1, description="T (FedISCA: I, S): synthesis steps per batch (papers: 500; 1,000 at 224 px)"
    )
    batch: int = Field(256, ge=2, description="B: images per synthesised batch (papers: 256; 50 at 224 px)")
    lr_synthesis: float = Field(5e-2, gt=0, description="η_s: Adam's rate on the pixels (papers: 5e-2)")
    alpha_tv: float = Field(2.5e-5, ge=0, description="α_TV: weight of total variation (papers: 2.5e-5)")
    alpha_bn: float = Field(10.0, ge=0, description="α_BN: weight of the batch-norm term (papers: 10)")
    jitter: int | None = Field(None, ge=0, description="random shift in pixels; none: 2, or 30 above 128 px (code)")
    bn_distance: Literal["absolute", "relative"] = Field(
        "absolute", description="a layer's batch-norm distances as they are (papers), or over its own spread (ours)"
    )


class PoolConfig(InversionConfig):
    """A pool of images that were inverted from networks, and a student that learns from them."""

    pool: int = Field(25, ge=1, description="synthesised batches in all, the same number from every client, at least 1")
    batch: int = Field(256, ge=2, description="images in a batch, of the synthesis and of the student")
    storage: Literal["fp32", "bf16"] = Field("bf16", description="how the pool keeps images, on the device")
    steps_distil: int = Field(6000, ge=1, description="of the student")
    lr: float = Field(0.05, gt=0, description="of the student's SGD")
    schedule: Literal["step", "cosine", "constant"] = Field("cosine", description="of the student's rate")
    momentum: float = Field(0.9, ge=0, lt=1, description="of the student's SGD")
    weight_decay: float = Field(5e-4, ge=0, description="of the student's SGD")
    turns: bool = Field(True, description="random quarter turns and mirror images of the pool")
    zoom: bool = Field(True, description="random zoom and shift of the pool's images")
    cutmix: int = Field(2, ge=0, description="one image in so many gets a piece of another one; 0: none")
    reuse: int = Field(4, ge=1, description="how often an augmented image is learnt from before new ones are made")


class SynthesisConfig(InversionConfig):
    """Synthesis from several networks at once, teachers, and the student's optimiser; the papers' values."""

    bn_reduction: Literal["mean", "sum"] = Field(
        "mean", description="batch-norm term over clients (FedISCA's code: sum)"
    )
    ce: Literal["mean_logits", "mean_ce"] = Field(
        "mean_logits", description="cross-entropy of the mean logits (code), or mean of the clients' (E-FedISCA's text)"
    )
    temperature: float = Field(20.0, gt=0, description="τ of teacher and student, with the factor τ² (paper: 20)")
    teacher: Literal["mean_logits", "mean_probs", "class_weighted"] = Field(
        "mean_logits", description="how the clients are combined into one teacher (papers: mean_logits)"
    )
    adaptation: Literal["batch", "ema", "none"] = Field(
        "batch", description="noise-adapted teachers: batch (authors' code), ema (the equation as written), or none"
    )
    momentum_adaptation: float = Field(0.9, ge=0, lt=1, description="β (FedISCA: α) of the ema adaptation (paper: 0.9)")
    momentum: float = Field(0.9, ge=0, lt=1, description="of the student's SGD (authors' code: 0.9)")
    weight_decay: float = Field(5e-4, ge=0, description="of the student's SGD (authors' code: 5e-4)")
    teachers_at_once: int | None = Field(
        None, ge=1, description="clients in memory at once during synthesis; none: as many as fit (ours, for large N)"
    )

    @property
    def distillation_steps(self) -> int:
        """How many batches a student learns from."""
        return self.steps

    @property
    def synthesis_steps(self) -> int:
        """Steps of all syntheses together: one for each batch."""
        return self.distillation_steps

    @property
    def weighted(self) -> bool:
        """Whether the teacher needs everybody's class counts."""
        return self.teacher == "class_weighted"

    @property
    def needs(self) -> frozenset[str]:
        """What every upload must hold."""
        return frozenset({"weights", "bn_stats", *(["class_counts"] if self.weighted else [])})

    def upload_summary(self, times: int = 1) -> str:
        """What leaves the hospital, in words."""
        counts = " and the number of training images per class" if self.weighted else ""
        sent = f"network with its batch-normalisation statistics{counts}" + (f", {times} times" if times > 1 else "")
        return f"The trained {sent}; the server inverts it into images."


class ShotsConfig(SynthesisConfig):
    """How often the whole is repeated, each time from the student of the time before."""

    shots: int = Field(1, ge=1, le=1000, description="times that networks travel (papers: 1; E-FedISCA 5.6: up to 30)")
    epochs_shot: int | None = Field(
        None, ge=1, description="local epochs of the second and later shots (not given); none: training.epochs again"
    )
    student_start: Literal["fresh", "last"] = Field(
        "last", description="student of a later shot: the last shot's trained further, or a new one (not given)"
    )


class ReplayConfig(MethodConfig):
    """A generator that is trained for a few steps per epoch, a pool of all that it made, and a student."""

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


class EncoderConfig(MethodConfig):
    """Which frozen encoder, and how it looks at an image. The paper's values are the defaults."""

    encoder: str = Field(
        "dinov2_base", description="frozen encoder, see `fedbicross list encoders` (FALCON: DINOv2-base)"
    )
    encoder_size: int | None = Field(
        None, ge=1, le=2048, description="pixels per side of the encoder's input; none: its own (DINOv2: 224)"
    )
    hierarchy: bool = Field(
        True, description="windows beside the whole image (FALCON 2.3, HSE); false: the whole image only"
    )
    window: int | None = Field(
        None, ge=1, description="pixels per side of a window; none: half the image (paper: 224 at 448 px)"
    )
    stride: int | None = Field(None, ge=1, description="pixels between windows; none: the window (paper: 224)")

    @field_validator("encoder")
    @classmethod
    def _known(cls, value: str) -> str:
        try:
            encoders.check_name(value)
        except ConfigError as error:
            raise ValueError(error.args[0]) from None
        return value

    def spec(self, image_size: int) -> encoders.EncoderSpec:
        """The encoder and its views for images of this size."""
        size = self.encoder_size or encoders.default_size(self.encoder)
        if not self.hierarchy:
            return encoders.EncoderSpec(self.encoder, size)
        window = self.window or max(image_size // 2, 1)
        return encoders.EncoderSpec(self.encoder, size, window, self.stride or window)


class HeadConfig(EncoderConfig):
    """A classifier on token sequences and how a client trains it; FALCON's values are the defaults."""

    head: Literal["attention", "attention_residual"] = Field(
        "attention", description="classifier: attention pooling (FALCON), or with the query added (its authors' code)"
    )
    head_hidden: int | None = Field(
        None, ge=0, description="hidden width of the classifier; none: 4 x features (the paper's 22.5 MB); 0: linear"
    )
    dropout: float = Field(0.3, ge=0, lt=1, description="in the classifier (authors' code: 0.3)")
    epochs_classifier: int = Field(60, ge=1, description="of the local classifier (paper: 60)")
    lr_classifier: float = Field(5e-4, gt=0, description="Adam's rate for the local classifier (paper: 5e-4)")
    batch: int = Field(256, ge=1, description="sequences per step at the client (paper: 256)")

    def hidden_width(self, dim: int) -> int:
        """Of the classifier."""
        return 4 * dim if self.head_hidden is None else self.head_hidden


class SequenceConfig(HeadConfig):
    """A generator of token sequences and how a client trains it; FALCON's values are the defaults."""

    scheme: Literal["mar", "ar", "nar"] = Field(
        "mar", description="what a token depends on: multi-scale (paper), every token before it, or the class alone"
    )
    width: int = Field(768, ge=2, le=8192, description="hidden dimension of the generator (paper: 768)")
    layers: int = Field(4, ge=1, le=64, description="of the generator (paper: 4)")
    heads: int = Field(16, ge=1, le=64, description="attention heads of the generator (paper: 16)")
    feedforward: int = Field(
        768, ge=1, le=65_536, description="hidden width of its blocks (the paper's 144.33 MB: 768)"
    )
    components: int = Field(20, ge=1, le=1000, description="K: Gaussians per token (paper: 20)")
    log_variance_floor: float = Field(
        -4.0, ge=-20, le=2, description="smallest log-variance, on the scale of the client's tokens (not in the paper)"
    )
    standardise: Literal["class", "client", "none"] = Field(
        "class", description="model tokens on the scale of their class or of all the client's, or as they are (paper)"
    )
    epochs_generator: int = Field(400, ge=1, description="of the generator (paper: 400; authors' code: up to 500)")
    lr_generator: float = Field(1e-4, gt=0, description="AdamW's rate for the generator (paper: 1e-4)")
    decay_generator: float = Field(1e-4, ge=0, description="AdamW's weight decay for the generator (paper: 1e-4)")
    generator_epoch: Literal["last", "best"] = Field(
        "last", description="the generator kept: after all epochs, or the likeliest on the client's validation images"
    )
    patience: int | None = Field(None, ge=1, description="stop after so many epochs without gain (authors' code: 20)")
    calibrate: bool = Field(
        False, description="ours: give drawn tokens the mean and spread of the real ones, class by class"
    )
    clip: float | None = Field(2.0, gt=0, description="largest gradient norm of the generator (authors' code: 2)")

    @model_validator(mode="after")
    def _widths(self) -> SequenceConfig:
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads, got {self.width} and {self.heads}")
        return self


class PooledConfig(EncoderConfig):
    """The encoder, and whose class frequencies the head assumes."""

    hierarchy: bool = Field(
        False, description="false: the feature of the whole image (papers); true: the mean over it and its windows"
    )
    prior: Literal["global", "local"] = Field(
        "global", description="class frequencies behind the head: all clients' (papers), or moved to the client's own"
    )
    clip: float | None = Field(
        None, gt=0, le=1e6, description="longest feature; a longer one is shortened to it; none: as they are (papers)"
    )
    projection: int | None = Field(
        None,
        ge=1,
        le=65_536,
        description="features are first projected to so many random directions, where they are more; none: as they are",
    )
    epsilon: float | None = Field(
        None, gt=0, le=100, description="ε of differential privacy for what leaves a client; none: none of it (ours)"
    )
    delta: float = Field(1e-5, gt=0, le=1e-2, description="δ of the same, well below one over the number of images")
    unit: Literal["image", "patient"] = Field(
        "image", description="whose privacy ε is: patient counts each of k images of a patient as 1/k of one"
    )

    @model_validator(mode="after")
    def _noise_needs_a_limit(self) -> PooledConfig:
        if self.epsilon is not None and self.clip is None:
            raise ValueError("epsilon needs clip: without a longest feature no noise is enough")
        return self

    @property
    def noise_summary(self) -> str:
        """How private what leaves is, in words; empty where nothing makes it so."""
        if self.epsilon is None:
            return ""
        return f"with noise: ε = {self.epsilon:g}, δ = {self.delta:g} of differential privacy for each {self.unit}"


class MomentsConfig(PooledConfig):
    """A head that is solved for from sums over the clients' features."""

    ridge: float = Field(
        1e-3, ge=0, le=100, description="γ: share of a feature's mean variance added to the diagonal (FedCGS's code: 0)"
    )

    @property
    def upload_summary(self) -> str:
        """What leaves the hospital, in words."""
        sums = (
            "For each class the number of images and the sum of their features, and the sum over all images of the "
            "products of features"
        )
        if self.epsilon is None:
            return f"{sums}; the sum of a class with one image is that image's feature."
        return f"{sums}, all {self.noise_summary}."
