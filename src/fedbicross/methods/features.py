"""What methods on the features of a frozen encoder share: settings, features, and how a head is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from pydantic import Field, field_validator

from fedbicross import engine, models
from fedbicross.bundle import join_groups, pack, take_group, unpack
from fedbicross.context import Context
from fedbicross.errors import ConfigError, MethodError, UploadError
from fedbicross.exchange import Client, Upload, file_name
from fedbicross.methods.base import Method, MethodConfig
from fedbicross.models import encoders

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from fedbicross.models.encoders import EncoderSpec


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

    def spec(self, image_size: int) -> EncoderSpec:
        """The encoder and its views for images of this size."""
        size = self.encoder_size or encoders.default_size(self.encoder)
        if not self.hierarchy:
            return encoders.EncoderSpec(self.encoder, size)
        window = self.window or max(image_size // 2, 1)
        return encoders.EncoderSpec(self.encoder, size, window, self.stride or window)

    def tokens(self, client: Client, ctx: Context) -> Tensor:
        """Token sequences [n, 1 + L, dim] of a client's images."""
        return ctx.features(client, self.spec(ctx.task.image_size))

    def description(self, ctx: Context) -> dict[str, Any]:
        """The encoder as it stands in manifests, with the digest of its weights. Needs the encoder: clients only."""
        return engine.predict.describe_encoder(self.spec(ctx.task.image_size), ctx.device)


EncoderT = TypeVar("EncoderT", bound=EncoderConfig)


class FeatureMethod(Method[EncoderT]):
    """A method that works on the features of a frozen encoder."""

    says: ClassVar[tuple[str, ...]] = ()  # what an upload says in ``extra`` beside the encoder

    @property
    def extra_keys(self) -> frozenset[str]:
        """Which encoder made the features, and what the method adds."""
        return frozenset({"encoder", *self.says})

    def check_extra(self, upload: Upload) -> None:
        """An encoder is described by a table; nothing else may stand there."""
        super().check_extra(upload)
        if not isinstance(upload.extra.get("encoder", {}), Mapping):
            raise UploadError("encoder_mismatch", f"{upload.client!r}: 'encoder' describes none")

    def check_machine(self) -> None:
        """The encoder, and what it needs."""
        encoders.check(self.config.encoder)

    @property
    def uses_local_models(self) -> bool:
        """None: it works on features."""
        return False

    @property
    def refuses_mixed_models(self) -> str:
        """Nothing: features of a frozen encoder do not depend on anybody's network."""
        return ""


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

    def classifier(self, dim: int, classes: int) -> nn.Module:
        """The classifier with placeholder weights."""
        return models.heads.build(self.head, dim, classes, self.hidden_width(dim), self.dropout)

    def hidden_width(self, dim: int) -> int:
        """Of the classifier."""
        return 4 * dim if self.head_hidden is None else self.head_hidden

    def parts(self, keys: Sequence[str], ctx: Context) -> dict[str, Any]:
        """The settings on which a trained part depends, with the encoder: methods that agree in them share it."""
        values = self.model_dump()
        return {**{key: values[key] for key in keys}, "encoder": self.description(ctx)}

    def local_classifier(self, client: Client, tokens: Tensor, ctx: Context) -> dict[str, Tensor]:
        """FALCON 2.5: the client's classifier on its real sequences; the best epoch on its validation images."""
        import torch

        keys = ("head", "head_hidden", "dropout", "epochs_classifier", "lr_classifier", "batch")

        def make() -> bytes:
            head = self.classifier(tokens.shape[2], len(ctx.task.classes))
            models.initialise(head, ctx.torch_rng("features", client.name, "classifier"))
            labels, (rows, held_out) = torch.from_numpy(client.labels), split_rows(client, ctx)
            fit_head(
                f"classifier-{file_name(client.name)}",
                head,
                tokens[rows],
                labels[rows],
                ctx,
                epochs=self.epochs_classifier,
                batch=self.batch,
                lr=self.lr_classifier,
                validation=(tokens[held_out], labels[held_out]),
                label=f"classifier of {client.label}",
            )
            return pack("head", head.state_dict(), {})

        state = unpack(ctx.shared("classifier", client, self.parts(keys, ctx), make), "head")[0]
        head = models.heads.load(self.head, state, len(ctx.task.classes))
        ctx.record.flops += 3 * forward_flops(head, tokens[:1]) * len(tokens) * self.epochs_classifier
        return state


def same_encoder(uploads: Sequence[Upload]) -> dict[str, Any]:
    """The encoder that all uploads name; features of two encoders cannot be mixed. Needs no encoder: for servers."""
    found = [upload.extra.get("encoder") for upload in uploads]
    for upload, description in zip(uploads, found, strict=True):
        if not isinstance(description, Mapping) or description != found[0]:
            raise UploadError("encoder_mismatch", f"{upload.client!r} used another encoder than {uploads[0].client!r}")
    return dict(found[0] or {})


def check_encoder(reply: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """At the client: the reply must be for the encoder that this site has."""
    if dict(reply) != dict(own):
        raise MethodError("encoder_mismatch", "the reply is for another encoder, or another set of windows, than here")


def split_rows(client: Client, ctx: Context) -> tuple[Tensor, Tensor]:
    """Rows for training and for local validation: the same for every method on features, whole patients where known."""
    import torch

    rng = ctx.rng("features", client.name, "validation-split")
    rows = engine.train.split_validation(client.labels, client.patients, ctx.training.validation, rng)
    return torch.from_numpy(rows[0]), torch.from_numpy(rows[1])


class Fit:
    """Training of a small module in epochs, resumable inside: one optimiser, named streams, the loss per epoch.

    ``loss(rows, generator)`` returns the mean loss of the batch ``rows``; ``score()`` after each epoch (lower is
    better) picks the epoch whose weights are kept. Without it the last epoch's are.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        optimiser: torch.optim.Optimizer,
        loss: Callable[[Tensor, torch.Generator], Tensor],
        count: int,
        *,
        batch: int,
        epochs: int,
        ctx: Context,
        score: Callable[[], float] | None = None,
        clip: float | None = None,
        patience: int | None = None,
    ) -> None:
        self.name, self.module, self.optimiser, self.loss, self.count = name, module, optimiser, loss, count
        self.batch, self.epochs, self.ctx, self.score = batch, epochs, ctx, score
        self.clip, self.patience = clip, patience
        self.history: list[float] = []
        self.best, self.best_epoch = float("inf"), 0
        self.best_state: dict[str, Tensor] = {}

    def run(self, label: str) -> list[float]:
        """Train; the module then holds the chosen weights in evaluation mode. Returns the mean loss of every epoch."""
        stage = self.ctx.stage(self.name, label, self.epochs, fit=self)
        for epoch in stage.steps():
            if self._stalled():
                break
            self.history.append(self._epoch(epoch))
            self._keep()
            stage.note = f"loss {self.history[-1]:.3f}"
        if self.best_state:
            self.module.load_state_dict(self.best_state)
        self.module.eval()
        return self.history

    def _epoch(self, epoch: int) -> float:
        import torch

        self.module.train()
        generator = self.ctx.torch_rng(self.name, f"epoch-{epoch}", device=self.ctx.device)
        order = torch.randperm(self.count, generator=self.ctx.torch_rng(self.name, f"order-{epoch}"))
        total = torch.zeros((), device=self.ctx.device)
        for start in range(0, self.count, self.batch):
            rows = order[start : start + self.batch].to(self.ctx.device)
            loss = self.loss(rows, generator)
            self.optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            if self.clip is not None:
                torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
            self.optimiser.step()
            total += loss.detach() * len(rows)
        mean = float(total) / self.count
        if mean != mean or mean in (float("inf"), float("-inf")):
            raise MethodError(
                "diverged", f"{self.name}: the loss is no longer finite in epoch {epoch + 1}; lower the lr"
            )
        return mean

    def _keep(self) -> None:
        """Remember the best epoch: by the score, or by the training loss where only patience asks for it."""
        if self.score is None and self.patience is None:
            return
        self.module.eval()
        value = self.history[-1] if self.score is None else self.score()
        if value < self.best:
            self.best, self.best_epoch = value, len(self.history)
            self.best_state = {name: value.detach().clone() for name, value in self.module.state_dict().items()}

    def _stalled(self) -> bool:
        return self.patience is not None and len(self.history) - self.best_epoch >= self.patience

    def tensors(self) -> dict[str, Tensor]:
        """State for a checkpoint."""
        import torch

        optimiser = self.optimiser.state_dict()["state"]
        flat = {f"{i}.{key}": value for i, entry in optimiser.items() for key, value in entry.items()}
        numbers = {"history": torch.tensor(self.history, dtype=torch.float64)}
        if self.best_state:
            numbers |= {"best": torch.tensor([self.best, self.best_epoch], dtype=torch.float64)}
        return {**numbers, **join_groups(module=self.module.state_dict(), optimiser=flat, chosen=self.best_state)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self.module.load_state_dict(take_group(tensors, "module"))
        state: dict[int, dict[str, Tensor]] = {}
        for full, value in take_group(tensors, "optimiser").items():
            index, _, key = full.partition(".")
            state.setdefault(int(index), {})[key] = value.cpu() if key == "step" else value
        self.optimiser.load_state_dict({**self.optimiser.state_dict(), "state": state})
        self.history = tensors["history"].tolist()
        if "best" in tensors:
            self.best, self.best_epoch = float(tensors["best"][0]), int(tensors["best"][1])
        self.best_state = take_group(tensors, "chosen")


def make_optimiser(
    kind: Literal["adam", "adamw", "sgd"], module: nn.Module, lr: float, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    """One pass over each weight where the device can (``fused``): it saves a sixth of a small head's step on a CPU."""
    import torch

    parameters = list(module.parameters())
    kinds: dict[str, Any] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    options: dict[str, Any] = {"momentum": 0.9} if kind == "sgd" else {}
    options["fused"] = all(p.device.type in ("cpu", "cuda") for p in parameters)
    optimiser: torch.optim.Optimizer = kinds[kind](parameters, lr=lr, weight_decay=weight_decay, **options)
    return optimiser


def fit_head(
    name: str,
    head: nn.Module,
    tokens: Tensor,
    labels: Tensor,
    ctx: Context,
    *,
    epochs: int,
    batch: int,
    lr: float,
    optimiser: Literal["adam", "adamw", "sgd"] = "adam",
    weight_decay: float = 0.0,
    validation: tuple[Tensor, Tensor] | None = None,
    label: str = "",
) -> list[float]:
    """Train a head with cross-entropy on tokens [n, T, dim], the best epoch on ``validation`` if there is one."""
    import torch
    import torch.nn.functional as F

    head.to(ctx.device)
    x, y = tokens.to(ctx.device), labels.to(ctx.device)
    chosen = make_optimiser(optimiser, head, lr, weight_decay)

    def loss(rows: Tensor, generator: torch.Generator) -> Tensor:
        with seeded(generator):
            return F.cross_entropy(head(x[rows]), y[rows])

    score = None
    if validation is not None and len(validation[1]):
        x_val, y_val = validation[0].to(ctx.device), validation[1].to(ctx.device)

        def validate() -> float:
            with torch.no_grad():
                logits = head(x_val)
                wrong = (logits.argmax(1) != y_val).float().mean()
                # Accuracy decides; among equals the lower loss.
                return float(wrong) + 1e-3 * min(float(F.cross_entropy(logits, y_val)), 100.0) / 100

        score = validate
    fit = Fit(name, head, chosen, loss, len(y), batch=batch, epochs=epochs, ctx=ctx, score=score)
    return fit.run(label or f"training {name}")


class seeded:
    """Dropout from a named stream: torch's own generator is set for a moment and put back as it was."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __enter__(self) -> None:
        import torch

        device = self.generator.device
        self.fork = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        self.fork.__enter__()
        torch.manual_seed(int(torch.randint(2**31, (1,), generator=self.generator, device=device)))

    def __exit__(self, *error: Any) -> None:
        self.fork.__exit__(*error)


def check_tensors(upload: Upload, expected: Mapping[str, tuple[int, ...]], whole: Sequence[str] = ()) -> None:
    """Exactly these tensors, in these shapes; ``whole`` are int64, all others float32 and finite."""
    import torch

    who = repr(upload.client)
    if upload.tensors.keys() != expected.keys():
        odd = sorted(upload.tensors.keys() ^ expected.keys())
        raise UploadError("tensor_names", f"{who}: tensors missing or not asked for: {', '.join(odd[:3])}")
    for name, shape in expected.items():
        tensor = upload.tensors[name]
        if tuple(tensor.shape) != shape or tensor.dtype != (torch.int64 if name in whole else torch.float32):
            found = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise UploadError("tensor_shape", f"{who}: tensor {name!r} is {found}, expected shape {shape}")
        if name not in whole and not bool(torch.isfinite(tensor).all()):
            raise UploadError("non_finite", f"{who}: tensor {name!r} holds values that are not finite")


def take_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors below a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def forward_flops(module: nn.Module, example: Tensor) -> int:
    """Operations of one forward pass of one example."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(example.to(next(module.parameters()).device))
    return int(counter.get_total_flops())


def epoch_curve(history: Sequence[float], name: str, ylabel: str) -> dict[str, Any]:
    """A loss per epoch, as the report draws it."""
    series = {name: [round(value, 6) for value in history]}
    return {"x": list(range(1, len(history) + 1)), "series": series, "xlabel": "epoch", "ylabel": ylabel}
