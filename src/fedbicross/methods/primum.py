"""primum (ours): first, do no harm. One data-free student for everyone, and at each hospital a gate before it.

1. Each hospital trains a network so that its own class mix stays out of it (balanced softmax), and for itself another
   one in the plain way.
2. The server inverts each network alone, with labels in that hospital's own class mix, so that labels and
   batch-normalisation statistics agree: a pool of images.
3. It distils the consensus of all networks, log-probabilities weighted per class, into one student, which starts from
   the network that knows most, on that pool: turned, mirrored, zoomed and cut together, each with soft
   labels of its own.
4. Back at the hospital the own network stays, unless mixing it with the student is better beyond chance on validation
   images. Images that the student is surer to be of a class that the hospital does not see than it is of any of the
   hospital's own are answered by the student (`steps.gate`).

Where each idea comes from, and what each is worth: docs/methods/primum.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from fedbicross import parts, steps
from fedbicross.context import Context
from fedbicross.messages import Client, Predictor, Reply, Upload
from fedbicross.methods.base import Method
from fedbicross.parts.settings import PoolConfig

if TYPE_CHECKING:
    from torch import Tensor


class PrimumConfig(PoolConfig):
    """Every number of primum, chosen on validation images of Blood."""

    loss: Literal["balanced", "cross_entropy"] = Field("balanced", description="of the clients' own training")
    counts: Literal["sent", "unknown"] = Field(
        "sent",
        description="class counts of each client; unknown: none leave, and what a network shows of them is used",
    )
    invert: Literal["alone", "together"] = Field(
        "alone", description="each network by itself, or all of them by one batch (as FedISCA does)"
    )
    labels: Literal["own", "balanced"] = Field("own", description="classes of a batch: the client's mix, or all alike")
    teacher: Literal["consensus", "class_weighted", "mean_logits", "mean_probs"] = Field(
        "consensus", description="how the clients are combined into one teacher"
    )
    weights: Literal["root", "contrast", "counts"] = Field(
        "root",
        description="a(i,c): by the square root of the images that a client could tell from other classes, by these "
        "images, or by all of the class",
    )
    temperature: float = Field(4.0, gt=0, description="τ of teacher and student, with the factor τ²")
    start: Literal["uploaded", "fresh"] = Field(
        "uploaded", description="of the student: the network of the client that knows most, or fresh weights"
    )
    own: Literal["both", "balanced", "cross_entropy"] = Field(
        "both", description="the client's model before the gate: the uploaded network, one of plain training, or both"
    )
    prior: Literal["own", "uniform", "estimated"] = Field(
        "own",
        description="for the client's own patients, by the gate; or the student as it is, for any patient; or the "
        "student under the class mix of the unlabelled images that it is asked about",
    )
    single: bool = Field(
        False, description="one network in the end: what the gate gives is distilled on the client's own images"
    )


class Primum(Method[PrimumConfig]):
    """One student for everyone; each client decides on its own validation images what to do with it."""

    name = "primum"
    summary = "a data-free student of all networks' consensus, used where it beats the own network beyond chance (ours)"
    others_receive = "one_model"
    Config = PrimumConfig
    variants = {
        "student": {"prior": "uniform"},
        "estimated": {"prior": "estimated"},
        "one_network": {"own": "balanced"},
        "single": {"single": True},
        "no_counts": {"counts": "unknown"},
        "cross_entropy": {"loss": "cross_entropy"},
        "together": {"invert": "together", "labels": "balanced"},
        "balanced_labels": {"labels": "balanced"},
        "mean_teacher": {"teacher": "mean_logits"},
        "mixture_teacher": {"teacher": "class_weighted"},
        "plain_weights": {"weights": "counts"},
        "no_cutmix": {"cutmix": 0},
        "no_turns": {"turns": False},
        "no_zoom": {"zoom": False},
        "fresh": {"start": "fresh"},
    }
    variant_notes = {
        "student": "the student alone, for patients from anywhere: no gate, no class mix",
        "estimated": "the student under a class mix estimated from the unlabelled images that it is asked about",
        "one_network": "the client's own model is the uploaded network alone, not averaged with a plain one",
        "single": "all networks of the gate's model distilled into one, unless that is worse beyond chance",
        "no_counts": "class counts stay at home: the server reads off each network what it can",
        "cross_entropy": "ablation: clients trained by plain cross-entropy",
        "together": "ablation: all networks inverted by one batch with balanced labels, as in FedISCA",
        "balanced_labels": "ablation: each network alone, but all classes alike",
        "mean_teacher": "ablation: mean logits teach, as in the papers",
        "mixture_teacher": "ablation: probabilities weighted per class instead of their logarithms",
        "plain_weights": "ablation: class weights by counts, however few other classes a client has",
        "no_cutmix": "ablation: no pieces of other images",
        "no_turns": "ablation: no quarter turns and mirror images",
        "no_zoom": "ablation: no zoom and shift",
        "fresh": "ablation: the student starts from fresh weights",
    }
    mixed_models_error = None  # clients teach by their answers, whatever their architecture
    at_client = frozenset({"own", "prior", "single"})
    quick_settings = {"pool": 10, "batch": 48, "steps": 80, "lr_synthesis": 0.1, "steps_distil": 800}

    @property
    def needs(self) -> frozenset[str]:
        """Weights with batch-normalisation statistics, and class counts."""
        return frozenset({"weights", "bn_stats", *(["class_counts"] if self.config.counts == "sent" else [])})

    @property
    def loss(self) -> str | None:
        """Balanced, whatever the run's recipe says."""
        return self.config.loss

    @property
    def local_baselines(self) -> tuple[str, ...]:
        """What it uploads, and what it starts from at the client."""
        return (*super().local_baselines, *(["local_only:both"] if self.config.own == "both" else []))

    def alone(self, client: Client, ctx: Context) -> Predictor:
        """What the gate starts from."""
        return parts.local.own_model(client, ctx, self.config.own)

    @property
    def adapts_prior(self) -> bool:
        """Whether the class mix is that of the images it is asked about."""
        return self.config.prior == "estimated"

    @property
    def upload_summary(self) -> str:
        """What leaves the hospital."""
        counts = " and the number of training images per class" if self.config.counts == "sent" else ""
        return (
            f"The trained network with its batch-normalisation statistics{counts}; the server inverts it into images."
        )

    def upload(self, client: Client, ctx: Context, previous: Reply | None = None) -> Upload:
        """The network, and how many images of each class it has seen."""
        return parts.teachers.send_network(client, ctx.with_loss(self.loss), self.config.counts == "sent")

    # --- at the server ---------------------------------------------------------------------------------

    def fuse(self, uploads: Sequence[Upload], ctx: Context) -> list[Reply]:
        """Images from each network alone, and one student that learns the consensus of all networks on them."""
        config = self.config
        networks = parts.teachers.load_ensemble(
            uploads,
            ctx,
            batch=config.batch,
            at_once=None,
            passes={"match": config.steps * self._batches(len(uploads))},
            bn_distance=config.bn_distance,
            batchnorm_for=self.name,
        )
        counts = self._counts(uploads, ctx)
        weights = parts.teachers.class_weights(counts, config.weights)
        if config.invert == "alone":
            sources = {upload.client: networks.subset([i]) for i, upload in enumerate(uploads)}
            mixes = {upload.client: counts[i] for i, upload in enumerate(uploads)}
        else:
            sources, mixes = {"everyone": networks}, {"everyone": counts.sum(0)}
        if config.labels == "balanced":
            mixes = {name: mix * 0 + 1 for name, mix in mixes.items()}
        settings = parts.teachers.inversion_settings(config, ctx.task.image_size)
        pool = parts.pool.invert_each(sources, mixes, settings, self._batches(len(uploads)), config.storage, ctx)
        teacher = steps.trajectory.Teacher(networks, config.temperature, config.teacher, weights.to(ctx.device), "none")
        start = parts.teachers.best_start(uploads, counts, ctx.task.model) if config.start == "uploaded" else None
        student = parts.pool.distil(pool, teacher, config, ctx, start)
        parts.pool.describe(pool, sources, teacher, student, ctx)
        ctx.record.flops += parts.pool.flops(
            [upload.task.model for upload in uploads],
            pool.images * config.steps,
            len(uploads) // len(sources),  # networks that each image is asked of: its own, or all
            parts.pool.labelled(config, ctx),
            config.batch * config.steps_distil,
            ctx,
        )
        reply = Reply(student.state(), {"architecture": ctx.task.model})
        return [reply for _ in uploads]

    def _batches(self, clients: int) -> int:
        """Batches that each network is inverted into, or all of them together."""
        return max(1, self.config.pool // clients) if self.config.invert == "alone" else self.config.pool

    def _counts(self, uploads: Sequence[Upload], ctx: Context) -> Tensor:
        """n(i,c) as the clients sent them, or what their networks show of them."""
        if self.config.counts == "sent":
            return parts.teachers.class_counts(uploads, len(ctx.task.classes))
        return parts.teachers.read_counts(uploads, ctx)

    # --- back at the client ----------------------------------------------------------------------------

    def personalize(self, client: Client, reply: Reply, ctx: Context) -> Predictor:
        """The own network, or its mixture with the student where that is better beyond chance; or the student."""
        student = parts.students.global_student(reply, ctx)
        if self.config.prior == "uniform":
            return student
        if self.config.prior == "estimated":
            ctx.record.warn("the class mix is estimated from the unlabelled test images that the model is asked about")
            return parts.class_mix.calibrated(client, student, ctx)
        own = parts.local.own_model(client, ctx, self.config.own)
        model = parts.gate.gated(client, own, student, ctx)
        if not self.config.single:
            return model
        architectures, states = (*own.architectures, *student.architectures), (*own.states, *student.states)
        starts = Predictor(ctx.task, architectures, states)
        return parts.personal.distil_into_one(client, model, starts, self.config.turns, ctx)
