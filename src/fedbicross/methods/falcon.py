"""FALCON (Liu et al., AAAI 2026): synthetic token sequences of a frozen encoder, distilled into one classifier.

At the client: images become token sequences (2.3); a generator learns their distribution (2.4, Eqs. 2-5), a classifier
their classes (2.5); synthetic sequences and the classifier leave. At the server: one classifier learns from all
sequences under the guidance of all classifiers (2.6, Eqs. 10-13). Differences to the paper: docs/methods/falcon.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from fedbicross import engine, models, parts, steps
from fedbicross.context import Context
from fedbicross.errors import UploadError
from fedbicross.lazy_torch import torch
from fedbicross.messages import Client, Predictor, Reply, Upload
from fedbicross.methods.base import Method, SyntheticFeatures
from fedbicross.parts.settings import SequenceConfig

if TYPE_CHECKING:
    from torch import Tensor

    from fedbicross.models.encoders import EncoderSpec
    from fedbicross.steps.autoregression import TokenGenerator

MOST_BYTES = 8 * 2**30  # of sequences that a server makes from one generator
MOST_FEATURES, MOST_TOKENS = 65_536, 16_384  # of an upload; before anything is built


class FalconConfig(SequenceConfig):
    """FALCON's settings; the paper's values are the defaults."""

    synthetic_ratio: float = Field(1.5, gt=0, description="synthetic sequences per real one (authors' code: 1.5)")
    send: Literal["smaller", "sequences", "generator"] = Field(
        "smaller", description="what leaves: synthetic sequences or the generator, whichever is smaller (paper 3.6)"
    )
    alpha: float = Field(0.5, ge=0, le=1, description="α: weight of distillation against cross-entropy (paper: 0.5)")
    temperature: float = Field(4.0, gt=0, description="T of teachers and student, with the factor T² (paper: 4)")
    epochs_global: int = Field(60, ge=1, description="of the global classifier (paper: 60; authors' code: 50)")
    lr_global: float = Field(5e-4, gt=0, description="Adam's rate for the global classifier (paper: 5e-4)")
    batch_global: int = Field(256, ge=1, description="sequences per step at the server (paper: 256; code: 512)")
    teachers: Literal["uniform", "size", "class"] = Field(
        "uniform",
        description="teachers alike (paper), by number of images (authors' code), or per class (ours)",
    )
    start: Literal["random", "mean"] = Field(
        "random", description="global classifier starts at random, or from the mean of the local ones (authors' code)"
    )
    token_noise: float = Field(
        0.0, ge=0, description="spread of noise added to every token read at the server (authors' code: 1)"
    )
    personal: bool = Field(False, description="ours: end with a mixture of heads chosen on the client's validation")
    epochs_personal: int = Field(20, ge=1, description="ours: fine-tuning of the global classifier at the client")
    lr_personal: float = Field(5e-4, gt=0, description="ours: Adam's rate of that fine-tuning")


class Falcon(Method[FalconConfig], SyntheticFeatures):
    """One global classifier on frozen features, from synthetic token sequences."""

    name = "falcon"
    summary = "synthetic token sequences of a frozen encoder, distilled into one classifier (AAAI 2026)"
    others_receive = "one_model"
    Config = FalconConfig
    extra_keys = frozenset({"encoder", "dim", "tokens", "form"})
    uses_local_models = False
    mixed_models_error = None  # features of a frozen encoder depend on nobody's network
    variants = {
        "no_hse": {"hierarchy": False},
        "no_kd": {"alpha": 0.0},
        "ar": {"scheme": "ar"},
        "nar": {"scheme": "nar"},
        "released": {
            "epochs_generator": 500,
            "patience": 20,
            "head": "attention_residual",
            "epochs_global": 50,
            "batch_global": 512,
            "teachers": "size",
            "start": "mean",
            "token_noise": 1.0,
        },
        "class_weighted": {"teachers": "class"},
        "held_out": {"generator_epoch": "best", "patience": 5},
        "calibrated": {"generator_epoch": "best", "patience": 5, "calibrate": True},
        "personal": {"personal": True},
    }
    variant_notes = {
        "no_hse": "ablation w/o HSE: the whole image only",
        "no_kd": "ablation w/o KD: cross-entropy on the synthetic sequences only",
        "ar": "ablation AR: every token depends on all before it",
        "nar": "ablation NAR: tokens depend on the class alone",
        "released": "the authors' code where it differs: weighted teachers, start from their mean, token noise",
        "class_weighted": "ours: teachers weighted per class by the synthetic sequences they sent",
        "held_out": "ours: each client keeps the generator that finds its own validation images likeliest",
        "calibrated": "ours: the same, and drawn tokens get the mean and spread of the real ones",
        "personal": "ours: each client mixes its local, the fine-tuned and the global classifier by its validation",
    }
    quick_settings = {
        "encoder": "tiny",
        "width": 128,
        "layers": 1,
        "heads": 4,
        "feedforward": 128,
        "components": 5,
        "epochs_generator": 20,
        "lr_generator": 3e-3,
        "batch": 64,
        "epochs_classifier": 30,
        "lr_classifier": 1e-3,
        "epochs_global": 8,
        "lr_global": 1e-3,
        "batch_global": 64,
    }

    @property
    def needs(self) -> frozenset[str]:
        """Classifiers, and sizes where teachers are weighted by them."""
        return frozenset({"weights", *(["num_samples"] if self.config.teachers == "size" else [])})

    @property
    def upload_summary(self) -> str:
        """What leaves the hospital."""
        sent = {
            "sequences": "Synthetic token sequences with their classes",
            "generator": "A generator of token sequences with the number wanted per class",
            "smaller": "Synthetic token sequences with their classes (or their generator, if that is smaller)",
        }
        size = ", the number of images" if self.config.teachers == "size" else ""
        return f"{sent[self.config.send]}{size} and a classifier; their numbers tell how many images each class has."

    # --- at the client -------------------------------------------------------------------------------

    def upload(self, client: Client, ctx: Context, previous: Reply | None = None) -> Upload:
        """What leaves the hospital: a classifier, and synthetic sequences or their generator; never a real token."""
        config, classes = self.config, len(ctx.task.classes)
        tokens, labels = parts.features.tokens(config, client, ctx), torch.from_numpy(client.labels)
        rows, _ = parts.heads.hold_out_rows(client, ctx)
        classifier = parts.heads.local_classifier(config, client, tokens, ctx)
        generator = parts.sequences.local_generator(config, client, tokens, ctx)
        counts = torch.bincount(labels[rows], minlength=classes)
        wanted = torch.where(counts > 0, (config.synthetic_ratio * counts).round().clamp_min(1), 0).long()
        asked = torch.arange(classes).repeat_interleave(wanted)
        sequences, made = parts.sequences.draw_apart(generator, asked, tokens, ctx, client.name)
        tensors = {f"classifier.{name}": value for name, value in classifier.items()}
        weights = {name: value.cpu() for name, value in generator.state_dict().items()}
        if self._sends_sequences(sequences, weights):
            form = "sequences"
            tensors |= {"sequences": sequences, "labels": made}
        else:
            form = "generator"
            tensors |= {f"generator.{name}": value for name, value in weights.items()}
            tensors["counts"] = wanted
        ctx.record.add("scalars", f"{client.name}: sent", f"{form}, {len(made)} synthetic sequences")
        sizes = {"dim": tokens.shape[2], "tokens": tokens.shape[1]}
        extra = {"encoder": parts.features.describe(config, ctx), **sizes, "form": form}
        size = len(client.labels) if "num_samples" in self.needs else None
        return Upload(client.name, ctx.task_of(client), tensors, num_samples=size, extra=extra)

    def _sends_sequences(self, sequences: Tensor, weights: Mapping[str, Tensor]) -> bool:
        """Section 3.6: whichever is smaller leaves, unless one was asked for."""
        smaller = sequences.nbytes <= sum(value.nbytes for value in weights.values())
        return self.config.send == "sequences" or (self.config.send == "smaller" and smaller)

    # --- at the server -------------------------------------------------------------------------------

    def check_upload(self, upload: Upload) -> None:
        """Refuse an upload that holds anything but the declared tensors, in their shapes, finite."""
        self.check_extra(upload)
        extra, classes = upload.extra, len(upload.task.classes)
        dim, length, form = extra.get("dim"), extra.get("tokens"), extra.get("form")
        if not (type(dim) is int and type(length) is int and form in ("sequences", "generator")):  # True is no number
            raise UploadError("falcon_manifest", f"{upload.client!r}: dim, tokens or form is missing")
        if not (1 <= dim <= MOST_FEATURES and 1 <= length <= MOST_TOKENS):
            raise UploadError(
                "falcon_manifest", f"{upload.client!r}: {length} tokens of {dim} features are out of range"
            )
        shapes = models.heads.shapes(self.config.head, dim, classes, self.config.hidden_width(dim))
        shapes = {f"classifier.{name}": shape for name, shape in shapes.items()}
        if form == "sequences":
            given = upload.tensors.get("labels")
            count = given.shape[0] if given is not None and given.ndim else 0
            shapes |= {"sequences": (count, length, dim), "labels": (count,)}
        else:
            skeleton = parts.sequences.empty_generator(self.config, dim, length, classes)
            shapes |= {f"generator.{k}": s for k, s in models.heads.shapes_of(skeleton).items()}
            shapes["counts"] = (classes,)
        whole = ("labels", "counts")
        parts.features.check_tensors(
            upload, {k: (torch.int64 if k in whole else torch.float32, shape) for k, shape in shapes.items()}
        )
        parts.features.check_described(upload, self.config)
        parts.features.check_magnitude(upload)
        numbers = upload.tensors["labels" if form == "sequences" else "counts"]
        if form == "sequences":
            wrong = not len(numbers) or int(numbers.min()) < 0 or int(numbers.max()) >= classes
        else:  # the server is about to make so many sequences
            most = MOST_BYTES // (4 * dim * length)
            wrong = int(numbers.min()) < 0 or int(numbers.max()) > most or not 0 < int(numbers.sum()) <= most
        if wrong:
            raise UploadError("falcon_labels", f"{upload.client!r}: classes or their numbers are out of range")
        if "num_samples" in self.needs and not (type(upload.num_samples) is int and upload.num_samples > 0):
            raise UploadError("falcon_manifest", f"{upload.client!r}: the number of images must be 1 or more")
        self._try_out(upload)

    def _try_out(self, upload: Upload) -> None:
        """A few sequences, as sent or drawn, through the classifier: finite answers, before anything is begun."""
        tokens = self._some(upload)
        state = parts.features.take_prefix(upload.tensors, "classifier.")
        head = models.heads.load(self.config.head, state, len(upload.task.classes))
        with torch.no_grad():
            parts.probes.check_answers(upload.client, head(tokens), tokens)

    def _some(self, upload: Upload) -> Tensor:
        """A few sequences, as sent or drawn."""
        if upload.extra["form"] == "sequences":
            return upload.tensors["sequences"][: parts.probes.COUNT]
        generator = self.generator_of(upload)
        generator.load_state_dict(parts.features.take_prefix(upload.tensors, "generator."), assign=True)
        wanted = upload.tensors["counts"].nonzero().flatten()[: parts.probes.COUNT]
        return generator.eval().draw(wanted, torch.Generator().manual_seed(0))

    def feature_length(self, upload: Upload) -> float | None:
        """That of the longest token: of all sequences that were sent, or of some that are drawn."""
        tokens = upload.tensors["sequences"] if upload.extra["form"] == "sequences" else self._some(upload)
        return float(tokens.norm(dim=-1).max())

    def must_agree(self, upload: Upload) -> dict[str, Any]:
        """The encoder, and the shape of its sequences."""
        said = upload.extra
        return {"encoder_mismatch": said["encoder"], "feature_width": [said["tokens"], said["dim"]]}

    def fuse(self, uploads: Sequence[Upload], ctx: Context) -> list[Reply]:
        """Section 2.6: all sequences together, all classifiers as teachers, one global classifier."""
        config, classes = self.config, len(ctx.task.classes)
        encoder = parts.features.same_encoder(uploads)
        for upload in uploads:
            if any(upload.extra[key] != uploads[0].extra[key] for key in ("dim", "tokens")):
                raise UploadError("falcon_manifest", f"{upload.client!r}: sequences of another shape than the others'")
        dim = int(uploads[0].extra["dim"])
        states = [parts.features.take_prefix(upload.tensors, "classifier.") for upload in uploads]
        teachers = [models.heads.load(config.head, state, classes).to(ctx.device) for state in states]
        sequences, labels = zip(*(self.synthetic_tokens(upload, ctx) for upload in uploads), strict=True)
        head = parts.heads.classifier(config, dim, classes)
        models.initialise(head, ctx.torch_rng("falcon", "global"))
        if config.start == "mean":
            head.load_state_dict({key: torch.stack([s[key] for s in states]).mean(0) for key in states[0]})
        parts.sequences.learn_guided(
            "global",
            head.to(ctx.device),
            teachers,
            torch.cat(sequences),
            torch.cat(labels),
            ctx,
            alpha=config.alpha,
            temperature=config.temperature,
            epochs=config.epochs_global,
            lr=config.lr_global,
            batch=config.batch_global,
            weights=self._weights(uploads, labels, classes, ctx.device),
            noise=config.token_noise,
        )
        ctx.record.add("scalars", "synthetic sequences at the server", sum(map(len, labels)))
        state = {name: value.cpu() for name, value in head.state_dict().items()}
        reply = Reply(state, {"head": config.head, "encoder": encoder})
        return [reply for _ in uploads]

    def _weights(self, uploads: Sequence[Upload], labels: Sequence[Tensor], classes: int, place: str) -> Tensor | None:
        """w_n of Eq. 10, where teachers are not alike."""
        if self.config.teachers == "uniform":
            return None
        if self.config.teachers == "class":
            counts = torch.stack([torch.bincount(part, minlength=classes) for part in labels])
            return engine.combine.class_weights(counts.float()).to(place)
        sizes = torch.tensor([float(upload.num_samples or 0) for upload in uploads], device=place)
        return sizes / sizes.sum()

    def synthetic_tokens(self, upload: Upload, ctx: Context) -> tuple[Tensor, Tensor]:
        """A client's synthetic sequences: as sent, or made here from its generator."""
        if upload.extra["form"] == "sequences":
            return upload.tensors["sequences"], upload.tensors["labels"]
        generator = self.generator_of(upload)
        generator.load_state_dict(parts.features.take_prefix(upload.tensors, "generator."), assign=True)
        generator.to(ctx.device).eval()
        counts = upload.tensors["counts"]
        labels = torch.arange(len(counts)).repeat_interleave(counts)
        ctx.record.flops += generator.sampling_flops * len(labels)
        made = generator.draw(labels, ctx.torch_rng("falcon", upload.client, "sampling", device=ctx.device))
        if not bool(torch.isfinite(made).all()):
            raise UploadError("non_finite", f"{upload.client!r}: its generator makes values that are not finite")
        return made, labels

    def views(self, image_size: int) -> EncoderSpec:
        """The whole image and its windows."""
        return self.config.spec(image_size)

    def generator_of(self, upload: Upload) -> TokenGenerator:
        """The generator in, or behind, an upload, without its weights."""
        sizes = int(upload.extra["dim"]), int(upload.extra["tokens"]), len(upload.task.classes)
        return parts.sequences.empty_generator(self.config, *sizes)

    def sample_flops(self, upload: Upload) -> float:
        """Operations to draw one sequence (Fig. 5)."""
        return float(self.generator_of(upload).sampling_flops)

    # --- at the client again -------------------------------------------------------------------------

    def personalize(self, client: Client, reply: Reply, ctx: Context) -> Predictor:
        """The global classifier as it is; with ``personal`` mixed with the client's own and a fine-tuned one."""
        description = parts.features.describe(self.config, ctx)
        parts.features.check_encoder(reply.info["encoder"], description)
        head = str(reply.info["head"])
        if not self.config.personal:
            return Predictor(ctx.task, (head,), (dict(reply.tensors),), encoder=description)
        tokens, labels = parts.features.tokens(self.config, client, ctx), torch.from_numpy(client.labels)
        _, held_out = parts.heads.hold_out_rows(client, ctx)
        tuned = self._tuned(client, reply.tensors, tokens, ctx)
        local = parts.heads.local_classifier(self.config, client, tokens, ctx)
        states = [local, tuned, dict(reply.tensors)]
        shares = (0.0, 1.0, 0.0)
        if len(held_out):
            classifiers = [models.heads.load(head, state, len(ctx.task.classes)) for state in states]
            with torch.no_grad():
                answers = torch.stack([classifier(tokens[held_out]).softmax(-1) for classifier in classifiers])
            shares = steps.guidance.best_mixture(answers, labels[held_out])
        text = ", ".join(f"{share:.0%} {n}" for share, n in zip(shares, ("local", "tuned", "global"), strict=True))
        ctx.record.add("scalars", f"{client.name}: mixture", text)
        used = [i for i, share in enumerate(shares) if share > 0]
        weights = torch.tensor([[shares[i]] * len(ctx.task.classes) for i in used])
        return Predictor(
            ctx.task,
            (head,) * len(used),
            tuple(states[i] for i in used),
            "class_weighted",
            weights,
            encoder=description,
        )

    def _tuned(self, client: Client, start: Mapping[str, Tensor], tokens: Tensor, ctx: Context) -> dict[str, Tensor]:
        """The global classifier, trained on with real sequences under its own guidance (Eq. 13 with one teacher)."""
        config, classes, labels = self.config, len(ctx.task.classes), torch.from_numpy(client.labels)
        rows, held_out = parts.heads.hold_out_rows(client, ctx)
        head = parts.heads.classifier(config, tokens.shape[2], classes)
        head.load_state_dict(dict(start))
        parts.sequences.learn_guided(
            f"personal {client.name}",
            head.to(ctx.device),
            [models.heads.load(config.head, start, classes).to(ctx.device)],
            tokens[rows],
            labels[rows],
            ctx,
            alpha=config.alpha,
            temperature=config.temperature,
            epochs=config.epochs_personal,
            lr=config.lr_personal,
            batch=config.batch,
            validation=(tokens[held_out], labels[held_out]),
            label=f"falcon: fine-tuning at {client.label}",
        )
        return {name: value.cpu() for name, value in head.state_dict().items()}
