"""A method: three verbs, and what a reader should know of it before running it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from fedbicross import parts
from fedbicross.bundle import validate
from fedbicross.context import Context
from fedbicross.engine.recipe import Training
from fedbicross.errors import MethodError, UploadError
from fedbicross.messages import Client, Predictor, Reply, Upload
from fedbicross.models import encoders
from fedbicross.parts.settings import EncoderConfig
from fedbicross.settings import MethodConfig as MethodConfig

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn


ConfigT = TypeVar("ConfigT", bound=MethodConfig)

Receives = Literal["nothing", "one_model", "every_upload"]
# What the other sites of a federation are handed of a site's upload, in words.
RECEIVES: dict[Receives, str] = {
    "nothing": "Nothing.",
    "one_model": "A model made of everybody's uploads; of two sites, each may work out much of the other's.",
    "every_upload": "This upload itself: whatever it gives away, it gives away to every site.",
}


class Method(ABC, Generic[ConfigT]):
    """The three verbs, and what a reader should know of a method before running it."""

    name: ClassVar[str]
    summary: ClassVar[str]  # one line
    Config: ClassVar[type[MethodConfig]] = MethodConfig
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # named presets of Config: "name:variant"
    variant_notes: ClassVar[Mapping[str, str]] = {}
    quick_settings: ClassVar[Mapping[str, Any]] = {}  # settings that finish in minutes on two cores
    role: ClassVar[Literal["method", "baseline", "upper_bound"]] = "method"
    pools_data: ClassVar[bool] = False  # an upper bound that no federation could run
    at_client: ClassVar[frozenset[str]] = frozenset()  # settings that only personalize() reads
    sends_only_the_network: ClassVar[bool] = False  # besides numbers of images: `training.dp` then bounds all of it
    personal: ClassVar[bool] = True  # False: personalize() ignores the client, so that equal replies share one model

    def __init__(self, config: ConfigT) -> None:
        self.config = config
        self.gated = False  # ":personal": what personalize() gives must pass the client's gate (`parts.gate`)
        self.trusting = False  # ":trusting": uploads are used as they are, whatever `parts.defence` would say of them

    @property
    def gate_problem(self) -> str:
        """Why the client's gate cannot judge this method's model, in words; empty where it can."""
        return "it does not end with one model for all" if self.personal or self.pools_data else ""

    @property
    def needs(self) -> frozenset[str]:
        """What every upload must hold: weights, bn_stats, class_counts, num_samples. Checked before any work."""
        return frozenset()

    @property
    def uses_local_models(self) -> bool:
        """Whether upload() or personalize() asks for the client's own network, which can then be trained ahead."""
        return "weights" in self.needs

    @property
    def loss(self) -> str | None:
        """``training.loss`` of the client's own network, where this method needs another than the run's recipe says."""
        return None

    @property
    def local_baselines(self) -> tuple[str, ...]:
        """Local baselines, beside the run's recipe, that this method has to beat because its clients train that way."""
        return ("local_only:balanced",) if self.loss == "balanced" else ()

    @property
    def private_training_problem(self) -> str:
        """Why ``training.dp`` cannot bound what this method sends, in words; empty where it can, or nothing is sent."""
        if isinstance(self.config, EncoderConfig) or not self.needs:
            return ""  # no network of the client's leaves
        if "bn_stats" in self.needs:
            return "it needs batch-normalisation statistics, which are taken of images without noise"
        if self.rounds > 1:
            return "its clients train several times, and each time would have to be accounted for"
        if self.loss == "balanced":
            return "its clients train with balanced classes, which puts class counts without noise into the network"
        if not self.uses_local_models or not self.sends_only_the_network:
            return "it sends more than the client's network and numbers of images"
        return ""

    @property
    def reply_serves_gate(self) -> bool:
        """Whether a reply holds more where the client has a gate, so that both cannot share one fusion."""
        return False

    @property
    def adapts_prior(self) -> bool:
        """Whether a client's model takes its class mix from the unlabelled images that it is asked about."""
        return False

    @property
    def rounds(self) -> int:
        """How many rounds of the three verbs; 1 is one-shot."""
        return 1

    @property
    def extra_keys(self) -> frozenset[str]:
        """What an upload may say in ``extra``."""
        return frozenset()

    @property
    def mixed_models_error(self) -> str | None:
        """Why every client must have the server's architecture, in words; None where clients may bring their own."""
        return f"{self.name} does not say that it can"

    def check_machine(self) -> None:
        """Refuse, before any work, settings for which something is missing here: an encoder, or its packages."""
        if isinstance(self.config, EncoderConfig):
            encoders.check(self.config.encoder)

    @property
    @abstractmethod
    def upload_summary(self) -> str:
        """What leaves the hospital, in one sentence."""

    def leaves(self, training: Training) -> str:
        """What leaves the hospital, with the differential privacy that its training gives it."""
        if training.dp is None or not self.sends_only_the_network:
            return self.upload_summary
        private = f"ε = {training.dp.epsilon:g}, δ = {training.dp.delta:g} of differential privacy for each image"
        return f"{self.upload_summary} Trained by DP-SGD, numbers of images with noise: {private}."

    @property
    def others_receive(self) -> Receives:
        """What other sites are handed of this site's upload; the worst is assumed of a method that does not say."""
        return "every_upload"

    @abstractmethod
    def upload(self, client: Client, ctx: Context, previous: Reply | None = None) -> Upload:
        """At the client: train, and return what leaves. ``previous`` is the last round's reply, if any."""

    @abstractmethod
    def fuse(self, uploads: Sequence[Upload], ctx: Context) -> list[Reply]:
        """At the server: one reply per upload, in the same order."""

    @abstractmethod
    def personalize(self, client: Client, reply: Reply, ctx: Context) -> Predictor:
        """At the client: the model that it will use."""

    def alone(self, client: Client, ctx: Context) -> Predictor:
        """What the client would use by itself: what a gate starts from, and what taking part is measured against."""
        if isinstance(self.config, EncoderConfig):
            return parts.heads.alone_on(self.config, client, ctx)
        return parts.local.own_model(client, ctx, self.loss)

    def held_back(self, client: Client, ctx: Context) -> np.ndarray:
        """Which of the client's images were kept from its training, alone and by this method."""
        on_features = isinstance(self.config, EncoderConfig)
        return parts.heads.held_back(client, ctx) if on_features else ctx.validation_rows(client)

    def check_upload(self, upload: Upload) -> None:
        """At the server, before ``fuse``: refuse an upload of a stranger that makes no sense for this method.

        Override it where an upload holds anything but one network of the task's architecture.
        """
        task = upload.task
        self.check_extra(upload)
        validate.check_class_counts(upload.class_counts, len(task.classes), upload.num_samples)
        if "weights" in self.needs:
            validate.check_model_state(upload.tensors, task.model, task.channels, len(task.classes), task.image_size)
        elif upload.tensors:
            raise UploadError("extra_tensor", f"{self.name} takes no tensors, but the upload holds some")

    def must_agree(self, upload: Upload) -> Mapping[str, Any]:
        """What has to be the same in all uploads, by the code with which one that differs is refused."""
        del upload
        return {}

    def counted_less(self, upload: Upload, share: float) -> Upload:
        """The upload as if from so small a share of its images, where a site claims far more than all others."""
        return parts.defence.counted_less(upload, share)

    def feature_length(self, upload: Upload) -> float | None:
        """The length of the features that it holds, to be compared with the others'; None: none, or noise hides it."""
        del upload
        return None

    def check_extra(self, upload: Upload) -> None:
        """Refuse words in the manifest that this method would not read."""
        unknown = [str(key)[:32] for key in upload.extra if key not in self.extra_keys]
        if unknown:
            raise UploadError("manifest", f"{self.name} takes no {unknown[:3]} in 'extra'")
        if not isinstance(upload.extra.get("encoder", {}), Mapping):
            raise UploadError("encoder_mismatch", f"{upload.client!r}: 'encoder' describes none")


class SyntheticFeatures(ABC):
    """What `fedbicross audit run` asks of a method whose upload stands for features of images."""

    pools_tokens: ClassVar[bool] = False  # it models one feature per image, the mean of its tokens, not the sequence

    @abstractmethod
    def views(self, image_size: int) -> encoders.EncoderSpec:
        """The encoder behind the features, and the windows through which it looks at images of this size."""

    @abstractmethod
    def synthetic_tokens(self, upload: Upload, ctx: Context) -> tuple[Tensor, Tensor]:
        """The tokens [m, T, D] that the server makes of an upload, or finds in it, and their labels [m]."""

    @abstractmethod
    def sample_flops(self, upload: Upload) -> float:
        """Operations to make one of them."""

    def generator_of(self, upload: Upload) -> nn.Module | None:
        """The network that makes them, which could be sent in their place; None where there is none."""
        return None


def check_needs(method: Method[Any], uploads: Sequence[Upload]) -> None:
    """Refuse, before any server work, uploads that lack what the method declared to need."""
    for upload in uploads:
        statistics = any(name.endswith("running_var") for name in upload.tensors)
        has = {
            "weights": bool(upload.tensors),
            "bn_stats": statistics,
            "class_counts": upload.class_counts is not None,
            "num_samples": upload.num_samples is not None,
        }
        for need in sorted(method.needs):
            if not has[need]:
                raise MethodError(f"needs_{need}", f"{method.name} needs {need}, which {upload.client!r} did not send")


def check_private_training(method: Method[Any], training: Training, called: str) -> None:
    """Refuse a method whose uploads would leave without the differential privacy that ``training.dp`` asks for."""
    if training.dp is not None and method.private_training_problem:
        raise MethodError("not_private", f"training.dp: {called} cannot be private: {method.private_training_problem}")


def mixed_models_problem(method: Method[Any], architectures: Iterable[str], model: str, called: str = "") -> str:
    """Why these clients cannot take part, where one has another architecture than the server; empty if they can."""
    others = sorted(set(architectures) - {model})
    if not others or method.mixed_models_error is None:
        return ""
    problem = f"{called or method.name} cannot work with clients of another architecture than the run's {model}"
    return f"{problem} ({', '.join(others)}): {method.mixed_models_error}"
