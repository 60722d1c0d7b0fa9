"""FedBiCross (Xia et al., 2026, arXiv 2601.01901): clusters, cross-cluster distillation, personal models.

Stage 1 clusters the clients by how their networks answer noise and synthesises a trajectory of images per cluster.
Stage 2 trains one model per cluster on all clusters' images, with cross-cluster weights learned so that each model
does well on its own cluster's validation images (bi-level, Eqs. 6-8). Stage 3, at the client, distils the cluster model
and the client's own model into a personal one on local data (Eq. 9). Differences: docs/methods/fedbicross.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator, model_validator

from fedbicross import engine, parts, steps
from fedbicross.bundle import validate
from fedbicross.context import Context
from fedbicross.lazy_torch import torch
from fedbicross.messages import Client, Predictor, Reply, Upload
from fedbicross.methods.base import Method
from fedbicross.parts.settings import SynthesisConfig

if TYPE_CHECKING:
    from torch import Tensor

    from fedbicross.engine.student import Student
    from fedbicross.steps.bilevel import CrossCluster
    from fedbicross.steps.clustering import Clustering
    from fedbicross.steps.trajectory import Teacher, Trajectory


class FedBiCrossConfig(SynthesisConfig):
    """FedBiCross's settings; the paper's values where it gives any."""

    clusters: int | Literal["auto"] = Field(
        3, description="K (paper: 2, 3, 4 for N=5), or auto: chosen from the uploads"
    )
    clustering: Literal["predictions", "parameters", "hierarchical", "pacfl"] = Field(
        "predictions", description="what is clustered (paper: predictions on noise; the others are its Fig. 2)"
    )
    probes: int = Field(256, ge=1, description="M: noise images on which clients are compared (paper: 256)")
    outputs: Literal["probabilities", "logits"] = Field("probabilities", description="what of f_i(z) is compared")
    trajectories: int = Field(1, ge=1, description="R: synthesised batches per cluster (Algorithm 1: 1; FedISCA: 100)")
    lr: float = Field(0.1, gt=0, description="η_G: rate of the cluster models (not given)")
    schedule: Literal["step", "cosine", "constant"] = Field("cosine", description="of η_G (not given)")
    weights: Literal["bilevel", "uniform", "intra", "similarity"] = Field(
        "bilevel", description="cross-cluster weights w: learned (paper), or one of its ablations"
    )
    lr_weights: float = Field(0.1, gt=0, description="η_w relative to η_G (not given)")
    weight_step: Literal["projected", "mirror"] = Field(
        "projected", description="Eq. 8 with projection, or mirror descent"
    )
    unit_hypergradient: bool = Field(
        True, description="scale the hypergradient to largest entry 1 (its size is arbitrary)"
    )
    validation_share: float = Field(
        0.2, ge=0, lt=1, description="of each synthetic batch, for the weights (paper: 0.2)"
    )
    validation_batch: Literal["same", "other"] = Field(
        "same", description="held-out rows of the batch that is learnt from (paper), or of a second one (ours)"
    )
    personalisation: bool = Field(True, description="stage 3; false: the cluster model as it is (ablation w/o PKD)")
    gamma: float = Field(0.5, ge=0, description="γ: weight of the cluster model's KL in stage 3 (paper: 0.5)")
    delta: float = Field(0.3, ge=0, description="δ: weight of the own model's KL in stage 3 (paper: 0.3)")
    start_personal: Literal["cluster", "own"] = Field(
        "cluster", description="where stage 3 starts: from G_k (paper), or from the client's own model (ours)"
    )
    temperature_personal: float = Field(20.0, gt=0, description="τ of stage 3, with τ² (not given; stage 2 has 20)")
    epochs_personal: int = Field(10, ge=0, description="of stage 3 (paper: 10)")
    lr_personal: float = Field(1e-2, gt=0, description="rate of stage 3 (not given; local training has 1e-3)")
    schedule_personal: Literal["step", "cosine", "constant"] = Field(
        "cosine", description="of that rate, epoch by epoch (not given)"
    )
    batch_personal: int = Field(128, ge=2, description="batch of stage 3 (not given; local training has 128)")

    @property
    def distillation_steps(self) -> int:
        """R · T."""
        return self.trajectories * self.steps

    @field_validator("clusters")
    @classmethod
    def _at_least_one(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("at least 1, or auto")
        return value

    @model_validator(mode="after")
    def _weights_need_validation(self) -> FedBiCrossConfig:
        if self.weights == "bilevel" and self.validation_share == 0 and self.clusters != 1:
            raise ValueError("weights=bilevel learns from held-out rows: validation_share must be greater than 0")
        return self


class FedBiCross(Method[FedBiCrossConfig]):
    """A cluster model for each cluster, a personal model for each client."""

    name = "fedbicross"
    summary = "clusters, bi-level cross-cluster distillation, personal models (2026)"
    others_receive = "one_model"
    Config = FedBiCrossConfig
    variants = {
        "intra": {"weights": "intra"},
        "uniform": {"weights": "uniform"},
        "similarity": {"weights": "similarity"},
        "no_personalisation": {"personalisation": False},
        "no_clusters": {"clusters": 1},
        "k2": {"clusters": 2},
        "k3": {"clusters": 3},
        "k4": {"clusters": 4},
        "k5": {"clusters": 5},
        "k8": {"clusters": 8},
        "repeated": {"trajectories": 20},
        "auto": {"clusters": "auto"},
        "ema": {"adaptation": "ema"},
        "class_weighted": {"teacher": "class_weighted"},
        "other_batch": {"validation_batch": "other"},
        "slow_personal": {"lr_personal": 1e-3, "schedule_personal": "constant"},
        "own_start": {"start_personal": "own"},
    }
    variant_notes = {
        "intra": "ablation: only the own cluster's images",
        "uniform": "ablation: all clusters alike",
        "similarity": "ablation: by distance of cluster centroids",
        "no_personalisation": "ablation w/o PKD: the cluster model itself",
        "no_clusters": "ablation w/o Clus: K=1",
        "k2": "the paper's K=2",
        "k3": "the paper's K=3",
        "k4": "the paper's K=4",
        "k5": "the paper's K=5 (for N=10 or more)",
        "k8": "the paper's K=8 (for N=15 or more)",
        "repeated": "R=20 trajectories instead of the one of Algorithm 1",
        "auto": "ours: K chosen from the uploads alone",
        "ema": "noise-adapted teachers by Eq. 3 as written",
        "class_weighted": "ours: clients of a cluster weighted per class by their class counts",
        "other_batch": "ours: cross-cluster weights learnt on images of a batch of their own",
        "slow_personal": "stage 3 at 1e-3, the rate of the paper's local training, as it gives no other",
        "own_start": "ours: stage 3 from the client's own model instead of G_k",
    }
    at_client = frozenset(
        {
            "personalisation",
            "gamma",
            "delta",
            "start_personal",
            "temperature_personal",
            "epochs_personal",
            "lr_personal",
            "schedule_personal",
            "batch_personal",
        }
    )
    quick_settings = {
        "steps": 80,
        "batch": 32,
        "trajectories": 3,
        "probes": 64,
        "lr_synthesis": 0.1,
        "batch_personal": 32,
    }

    @property
    def needs(self) -> frozenset[str]:
        """Weights with batch-normalisation statistics, and class counts where the teacher needs them."""
        return self.config.needs

    @property
    def upload_summary(self) -> str:
        """What leaves the hospital."""
        extra = " It also sends principal directions of its images per class (pacfl)." if self._pacfl else ""
        return self.config.upload_summary() + extra

    @property
    def mixed_models_error(self) -> str | None:
        """Nothing, unless the clustering compares weights."""
        how = self.config.clustering
        compares = how in ("parameters", "hierarchical")
        return f"clustering={how} compares weights, which must have the same shapes" if compares else None

    @property
    def _pacfl(self) -> bool:
        return self.config.clustering == "pacfl"

    def upload(self, client: Client, ctx: Context, previous: Reply | None = None) -> Upload:
        """The trained network; for PACFL's clustering also subspaces of the images, which the paper warns about."""
        upload = parts.teachers.send_network(client, ctx, self.config.weighted)
        if not self._pacfl:
            return upload
        ctx.record.warn("clustering=pacfl sends principal directions of the images: data-dependent, more can leak")
        images = engine.device.normalise(engine.device.to_device(client.images, "cpu"))
        signature = steps.clustering.subspace_signature(images, torch.from_numpy(client.labels))
        tensors = {**upload.tensors, "pacfl.signature": signature.contiguous()}
        return Upload(upload.client, upload.task, tensors, upload.class_counts)

    def check_upload(self, upload: Upload) -> None:
        """One network; for PACFL also the subspaces, whose columns are pixels of the task's images."""
        if self._pacfl:
            task, classes = upload.task, len(upload.task.classes)
            rows, most = task.channels * task.image_size**2, 3 * classes  # p = 3 directions a class
            validate.check_matrix(upload.tensors, "pacfl.signature", rows, most)
            upload = _without_signature(upload)
        super().check_upload(upload)

    def fuse(self, uploads: Sequence[Upload], ctx: Context) -> list[Reply]:
        """Stages 1 and 2 of Algorithm 1."""
        signatures = [upload.tensors["pacfl.signature"] for upload in uploads] if self._pacfl else []
        uploads = [_without_signature(upload) for upload in uploads]
        everyone = parts.teachers.load_teacher(self.config, self.name, uploads, ctx)
        clustering, features = self._cluster(everyone, uploads, signatures, ctx)
        teachers = [_of_cluster(everyone, members) for members in clustering.members()]
        students = self._train_cluster_models(teachers, features, clustering, ctx)
        total, passes = self.config.distillation_steps, clustering.k * (clustering.k + 1)
        ctx.record.flops += parts.costs.synthesis_flops(ctx, uploads, self.config.batch, total, total, passes)
        if self._second_batch(clustering.k):
            ctx.record.flops += parts.costs.synthesis_flops(ctx, uploads, self.config.batch, total, total, students=0)
        replies = [
            Reply(student.state(), {"architecture": ctx.task.model, "cluster": k, "clusters": clustering.k})
            for k, student in enumerate(students)
        ]
        return [replies[k] for k in clustering.labels]

    # --- stage 1 ---------------------------------------------------------------------------------------

    def _cluster(
        self, teacher: Teacher, uploads: Sequence[Upload], signatures: Sequence[Tensor], ctx: Context
    ) -> tuple[Clustering, Tensor]:
        """Group clients that answer noise alike; also their answers, for similarity weights."""
        config, clustering = self.config, steps.clustering
        rng = ctx.torch_rng("probes", device=ctx.device)
        probes = torch.randn((config.probes, *ctx.task.image_shape), generator=rng, device=ctx.device)
        features = clustering.prediction_matrix(teacher.ensemble, probes, config.outputs).float().cpu()
        seed = int(ctx.rng("kmeans").integers(2**31))
        k = config.clusters
        if k == "auto":
            chosen = clustering.choose_k(features, len(uploads), seed, block=len(ctx.task.classes))
            k = chosen.k
            ctx.record.add("scalars", "K chosen from the uploads", f"{k}: {chosen.reason}")
            columns = ["k", "silhouette", "stability", "sizes", "chosen"]
            table = [[row[c] if c != "sizes" else str(row[c]) for c in columns] for row in chosen.evidence]
            ctx.record.add("tables", "evidence for K", {"columns": columns, "rows": table})
        states = [upload.tensors for upload in uploads]
        if config.clustering == "parameters":
            found = clustering.kmeans_parameters(states, k, seed)
        elif config.clustering == "hierarchical":
            found = clustering.hierarchical_updates(states, k)
        elif config.clustering == "pacfl":
            found = clustering.pacfl(signatures, k)
        else:
            found = clustering.cluster(features, k, seed)
        for warning in found.warnings:
            ctx.record.warn(warning)
        self._describe_clusters(found, teacher, probes, [upload.client for upload in uploads], ctx)
        return found, features

    def _describe_clusters(
        self, found: Clustering, teacher: Teacher, probes: Tensor, names: Sequence[str], ctx: Context
    ) -> None:
        with torch.no_grad():
            probabilities = teacher.ensemble.logits(probes).softmax(-1)
        rows = [[name[:40], label] for name, label in zip(names, found.labels, strict=True)]
        ctx.record.add("tables", "cluster of each client", {"columns": ["client", "cluster"], "rows": rows})
        kl = steps.clustering.pairwise_kl(probabilities)
        short = [name[:16] for name in names]
        values = [[round(float(v), 4) for v in row] for row in kl]
        title = "disagreement of clients on noise (KL of row to column)"
        ctx.record.add("heatmaps", title, {"values": values, "rows": short, "columns": short})
        agreement = steps.clustering.cluster_agreement(probabilities, found)
        for word, value in zip(("within", "between"), agreement, strict=True):
            if bool(torch.isfinite(value)):
                ctx.record.add("scalars", f"mean KL of clients {word} clusters, on noise", round(float(value), 4))

    # --- stage 2 ---------------------------------------------------------------------------------------

    def _train_cluster_models(
        self, teachers: Sequence[Teacher], features: Tensor, clustering: Clustering, ctx: Context
    ) -> list[Student]:
        """Lines 10-15 of Algorithm 1, all clusters side by side, over R trajectories of T steps."""
        config, count, total = self.config, len(teachers), self.config.distillation_steps
        students = [parts.students.new_student(ctx, k, count * (count + 1) * total) for k in range(count)]  # line 11
        kind = "uniform" if config.weights == "bilevel" else config.weights
        centres = steps.clustering.centroids(features, clustering)
        w = steps.bilevel.cross_cluster_weights(kind, count, centres).to(ctx.device)  # line 12
        both_levels = self._both_levels(students, w, ctx)
        weights = steps.bilevel.WeightsOverTime(w, total)
        logs = [parts.synthesis_log.SynthesisLog(f"cluster {k}", ctx, config.steps, total) for k in range(count)]
        label = f"{self.name}: cluster models"
        stage = ctx.stage("cluster-models", label, total, students=students, weights=weights, watches=logs)
        firsts = (0, config.trajectories) if self._second_batch(count) else (0,)  # numbers of the first trajectories
        trajectories = [partial(self._trajectory, k, teachers[k], ctx, first) for first in firsts for k in range(count)]
        for _, every in stage.samples("trajectory", config.trajectories, trajectories):  # line 13
            samples, held_out = every[:count], every[count:]  # the latter only with validation_batch = "other"
            lr = config.lr * engine.recipe.lr_multiplier(config.schedule, stage.progress)
            losses = both_levels.step(samples, lr, held_out)  # lines 14 and 15: Eqs. 7 and 8
            weights.note()
            for log, sample, loss in zip(logs, samples, losses, strict=True):
                log.add(sample, distillation=loss)
        labels = steps.inversion.balanced_labels(config.batch, len(ctx.task.classes), ctx.device)
        agreements = [logs[k].finish(teachers[k], samples[k], labels, students[k]) for k in range(count)]
        parts.diagnosis.recommend_repeats(ctx.record, "trajectories", config.trajectories, min(agreements))
        if count > 1:
            over_time, learned = [past.tolist() for past in weights.past], both_levels.validation is not None
            parts.diagnosis.describe_weights(ctx.record, over_time, weights.at, learned)
        return students

    def _second_batch(self, clusters: int) -> bool:
        """Whether every cluster synthesises a batch for validation alone."""
        config = self.config
        return config.validation_batch == "other" and config.weights == "bilevel" and clusters > 1

    def _both_levels(self, students: Sequence[Student], weights: Tensor, ctx: Context) -> CrossCluster:
        """The step of Eqs. 7 and 8; with one cluster, or fixed weights, of Eq. 7 alone."""
        config = self.config
        rows = steps.bilevel.split_batch(config.batch, len(ctx.task.classes), config.validation_share)
        train, held_out = (torch.tensor(part, device=ctx.device) for part in rows)
        return steps.bilevel.CrossCluster(
            students,
            weights,
            train,
            held_out if config.weights == "bilevel" and len(students) > 1 else None,
            temperature=config.temperature,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            lr_weights=config.lr_weights,
            weight_step=config.weight_step,
            unit_hypergradient=config.unit_hypergradient,
            own_only=config.weights == "intra",
        )

    def _trajectory(
        self, k: int, teacher: Teacher, ctx: Context, first: int, number: int, saved: Mapping[str, Tensor] | None
    ) -> Trajectory:
        """Lines 5-9 for one cluster, from the beginning or from where a killed run stopped."""
        settings = parts.teachers.inversion_settings(self.config, ctx.task.image_size)
        if saved is not None:
            return steps.trajectory.Trajectory.from_tensors(teacher, settings, saved)
        rng = ctx.torch_rng("synthesis", f"cluster-{k}", f"trajectory-{first + number}", device=ctx.device)
        shape, classes = ctx.task.image_shape, len(ctx.task.classes)
        return steps.trajectory.Trajectory.start(teacher, settings, shape, classes, rng)

    # --- stage 3, at the client ------------------------------------------------------------------------

    def personalize(self, client: Client, reply: Reply, ctx: Context) -> Predictor:
        """Eq. 9: start from G_k, fit the local data, stay close to G_k and to the client's own model."""
        config, state = self.config, dict(reply.tensors)
        architecture = str(reply.info["architecture"])
        if not config.personalisation:
            return Predictor(ctx.task, (architecture,), (state,))
        personal, scores = parts.personal.distil_personal(
            client,
            ctx,
            cluster_state=state,
            own_state=ctx.local_model(client).state,
            gamma=config.gamma,
            delta=config.delta,
            temperature=config.temperature_personal,
            epochs=config.epochs_personal,
            lr=config.lr_personal,
            schedule=config.schedule_personal,
            batch=config.batch_personal,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            start=config.start_personal,
        )
        parts.diagnosis.describe_personal(ctx.record, client.label, scores)
        if config.start_personal == "own":
            architecture = ctx.model_of(client)
        return Predictor(ctx.task, (architecture,), (personal,))


def _of_cluster(everyone: Teacher, members: Sequence[int]) -> Teacher:
    """F_k: the same teacher with the clients of one cluster."""
    weights = everyone.class_weights
    if weights is not None:
        part = weights[list(members)]
        weights = part / part.sum(0).clamp_min(1e-12)
    return replace(everyone, ensemble=everyone.ensemble.subset(members), class_weights=weights)


def _without_signature(upload: Upload) -> Upload:
    tensors = {name: value for name, value in upload.tensors.items() if name != "pacfl.signature"}
    return Upload(upload.client, upload.task, tensors, upload.class_counts, upload.num_samples, upload.extra)
