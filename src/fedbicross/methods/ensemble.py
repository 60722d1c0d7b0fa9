"""Ensemble: every hospital gets every network and combines their answers.

The strongest teacher that a data-free method could distil, and costly to run: N networks per image.
``class_weighted`` trusts network i on class c by its share of all training images of that class, which needs
the class counts of each hospital besides its network. ``consensus`` averages log-probabilities with such weights, of
networks that were trained with all classes weighing alike: the teacher of primum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from fedbicross import parts
from fedbicross.context import Context
from fedbicross.messages import Client, Predictor, Reply, Upload, pack_states, unpack_states
from fedbicross.methods.base import Method, MethodConfig


class EnsembleConfig(MethodConfig):
    """How the members' answers are combined."""

    combine: Literal["mean_logits", "mean_probs", "class_weighted", "consensus"] = Field(
        "mean_logits",
        description="mean of logits (as in FedISCA, FedBiCross), of probabilities, or of probabilities or their "
        "logarithms by class counts",
    )
    weights: Literal["counts", "contrast", "root"] = Field(
        "counts",
        description="a(i,c): by images of the class, by those that a client could tell from others, or by the root of "
        "the latter (ours)",
    )
    loss: Literal["cross_entropy", "balanced"] | None = Field(
        None, description="of the clients' training; none: the run's recipe"
    )


class EnsembleMethod(Method[EnsembleConfig]):
    """All networks go to everyone."""

    name = "ensemble"
    summary = "every client gets all networks and averages their answers"
    others_receive = "every_upload"
    Config = EnsembleConfig
    variants = {
        "mean_probs": {"combine": "mean_probs"},
        "class_weighted": {"combine": "class_weighted"},
        "consensus": {"combine": "consensus", "weights": "root", "loss": "balanced"},
    }
    variant_notes = {
        "mean_probs": "mean of probabilities instead of logits",
        "class_weighted": "probabilities weighted per class by each client's share of that class's images",
        "consensus": "ours: log-probabilities weighted per class, of networks trained with balanced classes",
    }
    role = "baseline"
    mixed_models_error = None  # only answers are combined
    sends_only_the_network = True
    personal = False

    @property
    def needs(self) -> frozenset[str]:
        """Weights, and class counts for the class-weighted rule."""
        return frozenset({"weights", "class_counts"} if self._weighted else {"weights"})

    @property
    def upload_summary(self) -> str:
        """What leaves the hospital."""
        counts = " and the number of training images per class" if self._weighted else ""
        return f"The trained network{counts}; every other hospital receives it."

    @property
    def gate_problem(self) -> str:
        """Probabilities that are added up cannot be mixed with a network in logarithms."""
        adds = self.config.combine in ("mean_probs", "class_weighted")
        return f"combine = {self.config.combine!r} adds up probabilities" if adds else super().gate_problem

    @property
    def _weighted(self) -> bool:
        return self.config.combine in ("class_weighted", "consensus")

    @property
    def loss(self) -> str | None:
        """As the settings say."""
        return self.config.loss

    def upload(self, client: Client, ctx: Context, previous: Reply | None = None) -> Upload:
        """The trained network, and the class counts where the rule needs them."""
        trained = ctx.with_loss(self.loss).local_model(client)
        counts = client.class_counts(len(ctx.task.classes)) if self._weighted else None
        return Upload(client.name, ctx.task_of(client), trained.state, class_counts=counts)

    def fuse(self, uploads: Sequence[Upload], ctx: Context) -> list[Reply]:
        """All networks to everyone, with the class weights n(i,c) / sum_j n(j,c)."""
        tensors = pack_states([upload.tensors for upload in uploads])
        if self._weighted:
            counts = parts.teachers.class_counts(uploads, len(ctx.task.classes))
            tensors["class_weights"] = parts.teachers.class_weights(counts, self.config.weights)
        reply = Reply(tensors, {"architectures": [upload.task.model for upload in uploads]})
        return [reply for _ in uploads]

    def personalize(self, client: Client, reply: Reply, ctx: Context) -> Predictor:
        """The ensemble itself."""
        architectures = tuple(reply.info["architectures"])
        states = tuple(unpack_states(reply.tensors, len(architectures)))
        weights = reply.tensors.get("class_weights")
        return Predictor(ctx.task, architectures, states, self.config.combine, weights)
