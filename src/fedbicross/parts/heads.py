"""Small modules trained on the features of a frozen encoder: resumable, from named random streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedbicross import models
from fedbicross.bundle import join_groups, pack, take_group, unpack
from fedbicross.context import Context
from fedbicross.engine.train import split_validation
from fedbicross.errors import MethodError
from fedbicross.messages import Client, Predictor, file_name
from fedbicross.parts.features import describe
from fedbicross.parts.features import tokens as tokens_of
from fedbicross.parts.settings import EncoderConfig, HeadConfig

CLASSIFIER = ("head", "head_hidden", "dropout", "epochs_classifier", "lr_classifier", "batch")  # it depends on these


def classifier(config: HeadConfig, dim: int, classes: int) -> nn.Module:
    """The classifier with placeholder weights."""
    return models.heads.build(config.head, dim, classes, config.hidden_width(dim), config.dropout)


def shared_by(config: HeadConfig, keys: Sequence[str], ctx: Context) -> dict[str, Any]:
    """The settings on which a trained part depends, with the encoder: methods that agree in them share it."""
    values = config.model_dump()
    return {**{key: values[key] for key in keys}, "encoder": describe(config, ctx)}


def local_classifier(config: HeadConfig, client: Client, tokens: Tensor, ctx: Context) -> dict[str, Tensor]:
    """FALCON 2.5: the client's classifier on its real sequences; the best epoch on its validation images."""

    def make() -> bytes:
        head = classifier(config, tokens.shape[2], len(ctx.task.classes))
        models.initialise(head, ctx.torch_rng("features", client.name, "classifier"))
        labels, (rows, held_out) = torch.from_numpy(client.labels), hold_out_rows(client, ctx)
        fit_head(
            f"classifier-{file_name(client.name)}",
            head,
            tokens[rows],
            labels[rows],
            ctx,
            epochs=config.epochs_classifier,
            batch=config.batch,
            lr=config.lr_classifier,
            validation=(tokens[held_out], labels[held_out]),
            label=f"classifier of {client.label}",
        )
        return pack("head", head.state_dict(), {})

    state = unpack(ctx.models.shared("classifier", client, shared_by(config, CLASSIFIER, ctx), make), "head")[0]
    head = models.heads.load(config.head, state, len(ctx.task.classes))
    ctx.record.flops += 3 * forward_flops(head, tokens[:1]) * len(tokens) * config.epochs_classifier
    return state


def local_predictor(config: HeadConfig, client: Client, ctx: Context) -> Predictor:
    """The client's own classifier: the very one that FALCON sends."""
    state = local_classifier(config, client, tokens_of(config, client, ctx), ctx)
    return Predictor(ctx.task, (config.head,), (state,), encoder=describe(config, ctx))


def alone_on(config: EncoderConfig, client: Client, ctx: Context) -> Predictor:
    """A classifier of the client's own on the features of a method, by its settings where it has any for one."""
    if isinstance(config, HeadConfig):
        return local_predictor(config, client, ctx)
    view = {key: getattr(config, key) for key in EncoderConfig.model_fields}
    return local_predictor(HeadConfig(**view), client, ctx)


def hold_out_rows(client: Client, ctx: Context) -> tuple[Tensor, Tensor]:
    """Rows for training and for local validation: the same for every method on features, whole patients where known."""
    rng = ctx.rng("features", client.name, "validation-split")
    rows = split_validation(client.labels, client.patients, ctx.training.validation, rng)
    return torch.from_numpy(rows[0]), torch.from_numpy(rows[1])


def held_back(client: Client, ctx: Context) -> np.ndarray:
    """The rows for local validation alone."""
    rows: np.ndarray = hold_out_rows(client, ctx)[1].numpy()
    return rows


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
        device = self.generator.device
        self.fork = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        self.fork.__enter__()
        torch.manual_seed(int(torch.randint(2**31, (1,), generator=self.generator, device=device)))

    def __exit__(self, *error: Any) -> None:
        self.fork.__exit__(*error)


def forward_flops(module: nn.Module, example: Tensor) -> int:
    """Operations of one forward pass of one example."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(example.to(next(module.parameters()).device))
    return int(counter.get_total_flops())


def epoch_curve(history: Sequence[float], name: str, ylabel: str) -> dict[str, Any]:
    """A loss per epoch, as the report draws it."""
    series = {name: [round(value, 6) for value in history]}
    return {"x": list(range(1, len(history) + 1)), "series": series, "xlabel": "epoch", "ylabel": ylabel}
