"""FedPFT (Beitollahi et al., TMLR 2025): clients send Gaussian mixtures of features; samples of them train a head.

Differences to the paper and to the released code: docs/methods/fedpft.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from fedbicross import models, parts, steps
from fedbicross.context import Context
from fedbicross.errors import MethodError, UploadError
from fedbicross.lazy_torch import torch
from fedbicross.messages import Client, Predictor, Reply, Upload
from fedbicross.methods.base import Method, SyntheticFeatures
from fedbicross.parts.settings import PooledConfig

if TYPE_CHECKING:
    from torch import Tensor

    from fedbicross.models.encoders import EncoderSpec


class FedPFTConfig(PooledConfig):
    """The mixtures and the head."""

    components: int = Field(20, ge=1, le=1000, description="K: Gaussians per class (FALCON's comparison: 20)")
    covariance: Literal["diag", "spherical", "full"] = Field(
        "diag", description="shape of each Gaussian (FALCON's comparison: diag)"
    )
    samples_per_component: int = Field(
        5,
        ge=1,
        description="a class has at most one Gaussian per so many images (ours; released code: drops it if ≤ K)",
    )
    smallest_group: int = Field(
        2, ge=1, description="fewest images behind any mean that leaves; a class with fewer is not sent (ours)"
    )
    variance_floor: float = Field(1e-6, gt=0, description="added to every variance (scikit-learn: 1e-6)")
    tolerance: float = Field(1e-3, gt=0, description="EM stops when the likelihood gains less (Flower's code: 1e-12)")
    iterations: int = Field(100, ge=1, description="EM steps at most (Flower's code: 10,000)")
    precision: Literal["float32", "float16"] = Field(
        "float32", description="of what is sent (released code: float16, in which small variances vanish)"
    )
    most_samples: int = Field(20_000, ge=1, description="features drawn per client and class at most (ours)")
    epochs: int = Field(50, ge=1, description="of the head (released codes: 50)")
    batch: int = Field(32, ge=1, description="features per step (Flower's code: 32)")
    optimiser: Literal["adamw", "adam", "sgd"] = Field("adamw", description="of the head (Flower's code: adamw)")
    lr: float = Field(1e-4, gt=0, description="of the head (Flower's code: 1e-4)")
    weight_decay: float = Field(0.01, ge=0, description="of the head (AdamW's default: 0.01)")

    @model_validator(mode="after")
    def _one_gaussian_behind_noise(self) -> FedPFTConfig:
        if self.epsilon is not None and (self.components > 1 or self.covariance == "full"):
            raise ValueError('epsilon needs components = 1 and covariance = "diag" or "spherical": EM takes no noise')
        return self


class FedPFT(Method[FedPFTConfig], SyntheticFeatures):
    """One linear head for everyone, trained on features that no patient has."""

    name = "fedpft"
    summary = "linear head on features sampled from the clients' Gaussian mixtures (TMLR 2025)"
    others_receive = "one_model"
    Config = FedPFTConfig
    needs = frozenset({"class_counts"})  # the mixtures too, but a client too small for any sends none
    extra_keys = frozenset({"encoder", "covariance"})
    uses_local_models = False
    mixed_models_error = None  # features of a frozen encoder depend on nobody's network
    variants = {
        "spherical": {"components": 1, "covariance": "spherical"},
        "full": {"components": 1, "covariance": "full"},
        "local_prior": {"prior": "local"},
        "hierarchy": {"hierarchy": True},
        "private": {"components": 1, "covariance": "spherical", "epsilon": 1.0, "clip": 1.0},
    }
    variant_notes = {
        "spherical": "one Gaussian per class, one variance: the smallest upload",
        "full": "one Gaussian per class with a full covariance",
        "local_prior": "ours: the head's bias moved to the client's own class frequencies",
        "hierarchy": "ours: mean over the whole image and its windows, FALCON's views without its generator",
        "private": "ε = 1 for every image of a client: one Gaussian per class, from noisy sums",
    }
    pools_tokens = True
    quick_settings = {"encoder": "tiny", "components": 5, "epochs": 20, "lr": 1e-2, "batch": 64}

    @property
    def gate_problem(self) -> str:
        """Nothing, unless the head is the client's already."""
        return parts.pooled.gate_problem(self.config)

    @property
    def reply_serves_gate(self) -> bool:
        """The class counts behind the head, so that the client can take the prior out of it."""
        return True

    @property
    def upload_summary(self) -> str:
        """What leaves the hospital."""
        if self.config.epsilon is not None:
            spread = "one variance" if self.config.covariance == "spherical" else "variances"
            return f"For each class the number of images and the mean and {spread} of their features, all " + (
                f"{self.config.noise_summary}; classes that cannot be told from noise are left out."
            )
        least = self.config.smallest_group
        return (
            "For each class the number of images and a Gaussian mixture of their features (weights, means, spreads); "
            f"a class with fewer than {least} images is left out, and every mean is over at least {least}."
        )

    def upload(self, client: Client, ctx: Context, previous: Reply | None = None) -> Upload:
        """One mixture per class, put one after the other; ``classes`` says which component is whose."""
        config = self.config
        x = parts.pooled.features(config, client, ctx)
        if config.epsilon is not None:
            return self._private_upload(x, client, ctx)
        counts = client.class_counts(len(ctx.task.classes))
        sent = [count if count >= config.smallest_group else 0 for count in counts]
        mixtures: list[dict[str, Tensor]] = []
        for label in [c for c, count in enumerate(sent) if count]:
            mixture = steps.mixtures.fit_mixture(
                x[torch.from_numpy(client.labels == label)].numpy(),
                config.components,
                config.covariance,
                floor=config.variance_floor,
                per_component=config.samples_per_component,
                smallest_group=config.smallest_group,
                tolerance=config.tolerance,
                iterations=config.iterations,
                seed=int(ctx.rng("mixture", client.name, str(label)).integers(2**31)),
            )
            owner = torch.full((len(mixture),), label)
            fields = {"weights": mixture.weights, "means": mixture.means, "scales": mixture.scales}
            mixtures.append({**fields, "classes": owner})
        left_out = [ctx.task.classes[c] for c, n in enumerate(counts) if 0 < n < config.smallest_group]
        if left_out:
            ctx.record.warn(f"{client.label} has too few images of {', '.join(left_out)} to send a mean of them")
        extra = {"encoder": parts.features.describe(config, ctx), "covariance": config.covariance}
        tensors = self._pack(mixtures) if mixtures else {}  # none: every class is too small
        return Upload(client.name, ctx.task_of(client), tensors, class_counts=sent, extra=extra)

    def _private_upload(self, x: Tensor, client: Client, ctx: Context) -> Upload:
        """One Gaussian per class from noisy sums. One image is in one class, so that it moves each sum by its own."""
        config, classes = self.config, len(ctx.task.classes)
        assert config.covariance != "full" and config.clip is not None  # by the settings' own check
        labels, weights = torch.from_numpy(client.labels), parts.private.weights(config, client)
        found = steps.sufficient_statistics.statistics(x, labels, classes, weights)
        squared = x.double().square()
        squares = squared if config.covariance == "diag" else squared.sum(1, keepdim=True)
        by_class = steps.sufficient_statistics.statistics(squares, labels, classes, weights).class_sums
        sums = {
            "counts": parts.private.Sum(found.counts, 1.0, 0.2),
            "means": parts.private.Sum(found.class_sums, config.clip, 0.6),
            "squares": parts.private.Sum(by_class, config.clip**2, 0.2),  # ‖f²‖ ≤ ‖f‖²
        }
        noisy, statement = parts.private.release(sums, "counts, sums and squares of features", config, client, ctx)
        counts = parts.private.as_counts(parts.private.told_from_noise(noisy["counts"], 0.2, config))
        mixtures: list[dict[str, Tensor]] = []
        for label in [c for c, count in enumerate(counts) if count]:
            mixture = steps.mixtures.from_sums(
                counts[label],
                noisy["means"][label],
                noisy["squares"][label],
                config.covariance,
                config.variance_floor,
            )
            fields = {"weights": mixture.weights, "means": mixture.means, "scales": mixture.scales}
            mixtures.append({**fields, "classes": torch.full((1,), label)})
        extra = {"encoder": parts.features.describe(config, ctx), "covariance": config.covariance}
        tensors = self._pack(mixtures) if mixtures else {}
        return Upload(client.name, ctx.task_of(client), tensors, counts, extra=extra, privacy=statement)

    def _pack(self, parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        dtype = getattr(torch, self.config.precision)
        joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        joined |= {"weights": joined["weights"].float()}
        joined |= {name: joined[name].to(dtype) for name in ("means", "scales")}
        # Rounding must not turn a spread into 0, nor a large mean into infinity.
        if self.config.covariance != "full":
            joined["scales"] = joined["scales"].clamp_min(torch.finfo(dtype).tiny)
        if not all(bool(torch.isfinite(joined[name]).all()) for name in ("means", "scales")):
            raise MethodError("overflow", f"features are too large for {self.config.precision}; use float32")
        return joined

    def check_upload(self, upload: Upload) -> None:
        """Mixtures only: known names and shapes, finite, positive spreads, weights that sum to 1, counts to match."""
        self.check_extra(upload)
        parts.private.check(upload, self.config)
        if upload.extra.get("covariance", self.config.covariance) != self.config.covariance:
            raise UploadError("manifest", f"{upload.client!r} sent mixtures with another covariance than agreed on")
        if not upload.tensors:
            if any(parts.features.check_counts(upload)):
                raise UploadError("bad_counts", f"{upload.client!r} counts images but sent no mixture")
            parts.features.check_described(upload, self.config)
            return
        dtype = getattr(torch, self.config.precision)
        axes = {"diag": 2, "spherical": 1, "full": 2}[self.config.covariance]
        types = {"weights": torch.float32, "means": dtype, "scales": dtype, "classes": torch.int64}
        sizes: dict[str, Sequence[int | None]] = {"weights": [None], "means": [None] * 2, "scales": [None] * axes}
        sizes["classes"] = [None]
        parts.features.check_tensors(upload, {name: (types[name], sizes[name]) for name in types})
        counts = parts.features.check_counts(upload)
        means, classes, weights = (upload.tensors[name] for name in ("means", "classes", "weights"))
        components, width = means.shape
        parts.features.check_width(upload, width)
        if components > self.config.components * len(counts):
            raise UploadError("tensor_shape", f"{upload.client!r} sent {components} components, more than agreed on")
        sizes = {"weights": [components], "means": [components, width], "classes": [components]}
        sizes["scales"] = steps.mixtures.scale_shape(self.config.covariance, components, width)
        parts.features.check_tensors(upload, {name: (types[name], sizes[name]) for name in types})
        if components and not 0 <= int(classes.min()) <= int(classes.max()) < len(counts):
            raise UploadError("bad_classes", f"{upload.client!r} sent components of classes that do not exist")
        if not self._positive(upload.tensors["scales"], width):
            raise UploadError("bad_scale", f"{upload.client!r} sent a spread that is not positive")
        parts.features.check_described(upload, self.config)
        parts.features.check_magnitude(upload)
        for label, count in enumerate(counts):
            share = weights[classes == label]
            if bool(count) != bool(len(share)):
                raise UploadError(
                    "bad_counts", f"{upload.client!r}: class {label} has {count} images, {len(share)} means"
                )
            if len(share) and (bool((share < 0).any()) or abs(float(share.double().sum()) - 1) > 1e-3):
                raise UploadError("bad_weights", f"{upload.client!r}: the weights of class {label} do not sum to 1")

    def feature_length(self, upload: Upload) -> float | None:
        """That of the longest mean or of the widest spread, whichever is more."""
        if self.config.epsilon is not None or not upload.tensors:
            return None
        means, scales = upload.tensors["means"].double(), upload.tensors["scales"].double()
        return float(max(means.norm(dim=1).max(), scales.abs().max() * means.shape[1] ** 0.5))

    def must_agree(self, upload: Upload) -> dict[str, Any]:
        """The encoder, and how many numbers a feature has."""
        width = {"feature_width": upload.tensors["means"].shape[1]} if upload.tensors else {}
        return {"encoder_mismatch": upload.extra["encoder"], **width}

    def _positive(self, scales: Tensor, width: int) -> bool:
        if self.config.covariance == "full":  # only the diagonal of a Cholesky factor has a sign to keep
            index = torch.arange(1, width + 1)
            scales = scales[:, index * (index + 1) // 2 - 1]
        return bool((scales > 0).all())

    def views(self, image_size: int) -> EncoderSpec:
        """The whole image, or also its windows."""
        return self.config.spec(image_size)

    def synthetic_tokens(self, upload: Upload, ctx: Context) -> tuple[Tensor, Tensor]:
        """Features [m,1,D] drawn from a client's mixtures, as many per class as it has images, and labels [m]."""
        drawn = [upload.tensors["means"].float()[:0]]
        labels = [torch.zeros(0, dtype=torch.int64)]
        rng = ctx.torch_rng("mixture samples", upload.client)
        for label, count in enumerate(upload.class_counts or ()):
            mine = upload.tensors["classes"] == label
            if not bool(mine.any()):
                continue
            mixture = steps.mixtures.FeatureMixture(
                *(upload.tensors[name][mine] for name in ("weights", "means", "scales"))
            )
            number = min(count, self.config.most_samples)
            drawn.append(steps.mixtures.sample(mixture, self.config.covariance, number, rng))
            labels.append(torch.full((number,), label))
        return torch.cat(drawn)[:, None], torch.cat(labels)

    def sample_flops(self, upload: Upload) -> float:
        """Operations to draw one feature (FALCON's Fig. 5)."""
        return steps.mixtures.sampling_flops(self.config.covariance, upload.tensors["means"].shape[1])

    def fuse(self, uploads: Sequence[Upload], ctx: Context) -> list[Reply]:
        """Draw features from every mixture and train one linear head on all of them."""
        config, classes = self.config, len(ctx.task.classes)
        given = [upload for upload in uploads if upload.tensors]
        if not given:
            raise MethodError("nothing_sent", "no client has enough images of any class; lower smallest_group")
        encoder, width = parts.features.same_encoder(uploads), parts.features.same_width(given, "means")
        drawn = [self.synthetic_tokens(upload, ctx) for upload in given]
        x, y = torch.cat([part[0] for part in drawn]), torch.cat([part[1] for part in drawn])
        head = models.heads.build("linear", width, classes)
        models.initialise(head, ctx.torch_rng("head"))
        losses = parts.heads.fit_head(
            "head",
            head,
            x,
            y,
            ctx,
            epochs=config.epochs,
            batch=config.batch,
            lr=config.lr,
            optimiser=config.optimiser,
            weight_decay=config.weight_decay,
            label="fedpft: head",
        )
        counts = torch.bincount(y, minlength=classes)
        state = {name: value.detach().cpu() for name, value in head.state_dict().items()}
        weight, bias = self._mask(state["head.weight"], state["head.bias"], counts, ctx)
        curve = parts.heads.epoch_curve(losses, "loss", "loss")
        ctx.record.add("curves", "head: cross-entropy on sampled features", curve)
        ctx.record.add("scalars", "features drawn", len(y))
        ctx.record.flops += 3 * 2 * width * classes * len(y) * config.epochs
        ctx.record.flops += round(self.sample_flops(given[0])) * len(y)
        reply = parts.pooled.reply(config, weight, bias, counts, encoder, self.gated)
        return [reply for _ in uploads]

    def _mask(self, weight: Tensor, bias: Tensor, counts: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """A class that nobody sent gets probability 0 rather than what its random start happens to say."""
        absent = counts == 0
        names = [name for name, gone in zip(ctx.task.classes, absent.tolist(), strict=True) if gone]
        if names:
            ctx.record.warn(f"nobody sent a mixture of {', '.join(names)}: never predicted")
        weight = torch.where(absent[:, None], 0, weight)
        return weight, torch.where(absent, steps.sufficient_statistics.ABSENT, bias)

    def personalize(self, client: Client, reply: Reply, ctx: Context) -> Predictor:
        """The head as it is, or under the client's own class frequencies."""
        return parts.pooled.predictor(self.config, client, reply, ctx, self.gated)
