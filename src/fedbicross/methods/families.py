"""What methods of one family have in common, so that each file holds what is its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from fedbicross import parts
from fedbicross.context import Context
from fedbicross.errors import MethodError
from fedbicross.messages import Client, Predictor, Reply, Upload
from fedbicross.methods.base import Method, MethodConfig
from fedbicross.parts.settings import MomentsConfig, ShotsConfig

if TYPE_CHECKING:
    from fedbicross.steps.sufficient_statistics import LinearHead, Statistics

ConfigT = TypeVar("ConfigT", bound=MethodConfig)
ShotsT = TypeVar("ShotsT", bound=ShotsConfig)
MomentsT = TypeVar("MomentsT", bound=MomentsConfig)


class AloneMethod(Method[ConfigT]):
    """Nothing leaves and nothing comes back; a method writes ``personalize``."""

    others_receive = "nothing"
    role = "baseline"
    upload_summary = "Nothing."
    mixed_models_error = None  # every client keeps what is its own

    def upload(self, client: Client, ctx: Context, previous: Reply | None = None) -> Upload:
        """Nothing leaves."""
        return Upload(client.name, ctx.task_of(client))

    def fuse(self, uploads: Sequence[Upload], ctx: Context) -> list[Reply]:
        """Nothing comes back."""
        return [Reply() for _ in uploads]


class PooledDataMethod(Method[ConfigT]):
    """An upper bound: ``simulate`` hands ``personalize`` one imaginary client with all images. No server."""

    others_receive = "every_upload"
    role = "upper_bound"
    pools_data = True
    upload_summary = "Every image and label: not federated, shown only as an upper bound."

    def upload(self, client: Client, ctx: Context, previous: Reply | None = None) -> Upload:
        """Refused: pooling images is what a federation exists to avoid."""
        raise MethodError("not_federated", f"{self.name} pools the images and exists only inside a simulation")

    def fuse(self, uploads: Sequence[Upload], ctx: Context) -> list[Reply]:
        """Refused, as above."""
        raise MethodError("not_federated", f"{self.name} pools the images and exists only inside a simulation")


class StudentMethod(Method[ConfigT]):
    """Networks leave, one student for everyone comes back; a method writes ``fuse``."""

    others_receive = "one_model"
    personal = False

    @property
    def mixed_models_error(self) -> str | None:
        """None: clients teach by their answers, whatever their architecture."""
        return None

    def upload(self, client: Client, ctx: Context, previous: Reply | None = None) -> Upload:
        """The trained network, and class counts where they are needed."""
        return parts.teachers.send_network(client, ctx, "class_counts" in self.needs)

    def personalize(self, client: Client, reply: Reply, ctx: Context) -> Predictor:
        """The student as it is."""
        return parts.students.global_student(reply, ctx)


class ShotsMethod(StudentMethod[ShotsT]):
    """A student that with several shots is where the clients train again from (FedISCA, E-FedISCA)."""

    @property
    def needs(self) -> frozenset[str]:
        """Weights with batch-normalisation statistics, and class counts where the teacher needs them."""
        return self.config.needs

    @property
    def upload_summary(self) -> str:
        """What leaves the hospital."""
        return self.config.upload_summary(self.rounds)

    @property
    def rounds(self) -> int:
        """How often networks travel."""
        return self.config.shots

    @property
    def extra_keys(self) -> frozenset[str]:
        """The number of the shot."""
        return frozenset({"shot"} if self.rounds > 1 else ())

    @property
    def mixed_models_error(self) -> str | None:
        """With one shot nothing; with several the student's weights must fit into every client."""
        return "the student of one shot is where every client's next training starts" if self.rounds > 1 else None

    def upload(self, client: Client, ctx: Context, previous: Reply | None = None) -> Upload:
        """The trained network; from the second shot on, trained again from the last student."""
        return parts.shots.upload(self.config, client, ctx, previous)


class MomentsMethod(Method[MomentsT]):
    """One linear head for everyone, solved from added-up sums of features (FedCGS, analytic)."""

    others_receive = "one_model"
    needs = frozenset({"weights", "class_counts"})  # sums, and what to divide them by
    extra_keys = frozenset({"encoder"})
    uses_local_models = False
    reply_serves_gate = True  # the class counts behind the head, so that the client can take the prior out of it
    mixed_models_error = None  # features of a frozen encoder depend on nobody's network
    quick_settings = {"encoder": "tiny"}

    @abstractmethod
    def solve(self, total: Statistics) -> LinearHead:
        """The head of everybody's sums."""

    @property
    def upload_summary(self) -> str:
        """What leaves the hospital."""
        return self.config.upload_summary

    @property
    def gate_problem(self) -> str:
        """Nothing, unless the head is the client's already."""
        return parts.pooled.gate_problem(self.config)

    def upload(self, client: Client, ctx: Context, previous: Reply | None = None) -> Upload:
        """Counts, class sums and Σ f fᵀ in float64."""
        return parts.moments.upload(self.config, client, ctx)

    def check_upload(self, upload: Upload) -> None:
        """Sums that some images could have: the right shapes, finite, and within the bounds that squares obey."""
        self.check_extra(upload)
        parts.moments.check_upload(self.config, upload)

    def counted_less(self, upload: Upload, share: float) -> Upload:
        """Its sums are as much smaller as its counts are."""
        return parts.moments.counted_less(upload, super().counted_less(upload, share), share)

    def feature_length(self, upload: Upload) -> float | None:
        """Root mean square of its images' features."""
        return parts.moments.feature_length(upload) if self.config.epsilon is None else None

    def must_agree(self, upload: Upload) -> dict[str, Any]:
        """The encoder, and how many numbers a feature has."""
        return {"encoder_mismatch": upload.extra["encoder"], "feature_width": upload.tensors["class_sums"].shape[1]}

    def fuse(self, uploads: Sequence[Upload], ctx: Context) -> list[Reply]:
        """Add up, and solve."""
        encoder = parts.features.same_encoder(uploads)
        head, total = parts.moments.head(self.config, uploads, ctx, self.solve)
        reply = parts.pooled.reply(self.config, head.weight, head.bias, total.counts, encoder, self.gated)
        return [reply for _ in uploads]

    def personalize(self, client: Client, reply: Reply, ctx: Context) -> Predictor:
        """The head as it is, or under the client's own class frequencies."""
        return parts.pooled.predictor(self.config, client, reply, ctx, self.gated)
