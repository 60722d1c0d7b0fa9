"""FALCON's work on token sequences: learn to generate them, draw new ones, and learn from them under guidance."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbicross import models
from fedbicross.bundle import pack, unpack
from fedbicross.context import Context
from fedbicross.engine.device import autocast
from fedbicross.errors import MethodError
from fedbicross.messages import Client, file_name
from fedbicross.parts.heads import Fit, epoch_curve, forward_flops, hold_out_rows, make_optimiser, seeded, shared_by
from fedbicross.parts.settings import SequenceConfig
from fedbicross.steps import guidance
from fedbicross.steps.autoregression import TokenGenerator
from fedbicross.steps.tokens import exact_copies, nearest_cosine

TOO_NEAR = 0.999  # cosine with a real token at which a synthetic sequence is drawn again
ATTEMPTS = 10
# Settings on which the generator depends: variants that agree in them share it.
GENERATOR = (
    *("scheme", "width", "layers", "heads", "feedforward", "components", "log_variance_floor", "standardise"),
    *("epochs_generator", "lr_generator", "decay_generator", "generator_epoch", "patience", "clip", "batch"),
    "calibrate",
)


def empty_generator(config: SequenceConfig, dim: int, length: int, classes: int) -> TokenGenerator:
    """The generator without weights, on no device."""
    with torch.device("meta"):
        return TokenGenerator(
            dim,
            length,
            classes,
            scheme=config.scheme,
            width=config.width,
            layers=config.layers,
            heads=config.heads,
            hidden=config.feedforward,
            components=config.components,
            log_variance=(config.log_variance_floor, config.log_variance_floor + 10),
            calibrated=config.calibrate,
        )


def local_generator(config: SequenceConfig, client: Client, tokens: Tensor, ctx: Context) -> TokenGenerator:
    """Section 2.4: the generator of this client's sequences, trained once for all methods that agree on it."""
    sizes, labels = (tokens.shape[2], tokens.shape[1], len(ctx.task.classes)), torch.from_numpy(client.labels)

    def make() -> bytes:
        rows, held_out = hold_out_rows(client, ctx)
        model = empty_generator(config, *sizes).to_empty(device="cpu")
        unseen = (tokens[held_out], labels[held_out]) if config.generator_epoch == "best" else None
        history = train_generator(model, tokens[rows], labels[rows], config, ctx, client.name, unseen)
        drawn = 0
        if config.calibrate:
            rng = ctx.torch_rng("falcon", client.name, "calibration", device=ctx.device)
            drawn = model.calibrate(tokens[rows].to(ctx.device), labels[rows].to(ctx.device), rng)
        return pack("generator", model.state_dict(), {"history": history, "drawn": drawn})

    state, info = unpack(ctx.models.shared("generator", client, shared_by(config, GENERATOR, ctx), make), "generator")
    curve = epoch_curve(info["history"], client.name, "NLL per token")
    ctx.record.add("curves", f"{client.name}: generator", curve)
    model = empty_generator(config, *sizes)
    model.load_state_dict(state, assign=True)
    model.eval().requires_grad_(False).to(ctx.device)
    ctx.record.flops += 3 * model.flops * len(tokens) * len(info["history"]) + model.sampling_flops * info["drawn"]
    return model


def train_generator(
    model: TokenGenerator,
    tokens: Tensor,
    labels: Tensor,
    config: SequenceConfig,
    ctx: Context,
    client: str,
    unseen: tuple[Tensor, Tensor] | None = None,
) -> list[float]:
    """Section 2.4: maximum likelihood (Eq. 5) on real sequences [n, T, dim]; the mean loss per token of every epoch.

    With sequences that it is not trained on, the epoch is kept that finds those likeliest.
    """
    models.initialise(model, ctx.torch_rng("falcon", client, "generator"))
    if config.standardise != "none":
        model.scale.measure(tokens, labels, by_class=config.standardise == "class")
    x, y = tokens.to(ctx.device), labels.to(ctx.device)
    model.to(ctx.device)

    def loss(rows: Tensor, stream: torch.Generator) -> Tensor:
        with autocast(ctx.device, ctx.precision):
            return model.nll(x[rows], y[rows]).mean() / model.length

    fit = Fit(
        f"generator-{file_name(client)}",
        model,
        make_optimiser("adamw", model, config.lr_generator, config.decay_generator),
        loss,
        len(y),
        batch=config.batch,
        epochs=config.epochs_generator,
        ctx=ctx,
        clip=config.clip,
        patience=config.patience,
        score=None if unseen is None or not len(unseen[1]) else partial(_likelihood, model, *unseen),
    )
    return fit.run(f"falcon: generator of {client[:32]}")


def _likelihood(model: TokenGenerator, tokens: Tensor, labels: Tensor) -> float:
    """The mean negative log-likelihood per token; lower is better."""
    place = model.mixture.weight.device
    with torch.no_grad():
        parts = zip(torch.split(tokens, 512), torch.split(labels, 512), strict=True)
        summed = sum(float(model.nll(x.to(place), y.to(place)).sum()) for x, y in parts)
    return summed / (len(labels) * model.length)


def draw_apart(
    generator: TokenGenerator, labels: Tensor, real: Tensor, ctx: Context, client: str
) -> tuple[Tensor, Tensor]:
    """Synthetic sequences and their classes; one that comes too near to a real token is drawn again, then left out."""
    sequences = generator.draw(labels, ctx.torch_rng("falcon", client, "sampling", device=ctx.device))
    real_there = real.to(ctx.device)
    nearest = nearest_cosine(sequences.to(ctx.device), real_there).cpu()
    for attempt in range(ATTEMPTS):
        near = nearest > TOO_NEAR
        if not bool(near.any()):
            break
        again = ctx.torch_rng("falcon", client, f"sampling-again-{attempt}", device=ctx.device)
        sequences[near] = generator.draw(labels[near], again)
        nearest[near] = nearest_cosine(sequences[near].to(ctx.device), real_there).cpu()
    kept = nearest <= TOO_NEAR
    if not bool(kept.any()):
        raise MethodError("too_near", f"{client}: the generator only repeats real tokens; raise log_variance_floor")
    if not bool(kept.all()):
        ctx.record.warn(
            f"{client}: {int((~kept).sum())} of {len(kept)} synthetic sequences stay closer than cosine {TOO_NEAR} "
            "to a real token and are left out; raise log_variance_floor"
        )
    if exact_copies(sequences[kept], real):
        raise MethodError("real_token", f"{client}: a synthetic token equals a real one; nothing was sent")
    title = f"{client}: largest cosine of a synthetic and a real token"
    ctx.record.add("scalars", title, round(float(nearest[kept].max()), 4))
    ctx.record.flops += generator.sampling_flops * len(labels)
    return sequences[kept], labels[kept]


def learn_guided(
    name: str,
    head: nn.Module,
    teachers: Sequence[nn.Module],
    tokens: Tensor,
    labels: Tensor,
    ctx: Context,
    *,
    alpha: float,
    temperature: float,
    epochs: int,
    lr: float,
    batch: int,
    weights: Tensor | None = None,
    noise: float = 0.0,
    validation: tuple[Tensor, Tensor] | None = None,
    label: str = "",
) -> None:
    """Train a head by Eq. 13 on sequences under the guidance of frozen teachers, whose answers are computed once.

    The epoch is kept that is best on ``validation``, where there is any; else the last. With ``noise`` every token read
    is blurred, and then the teachers answer each time anew.
    """
    x, y = tokens.to(ctx.device), labels.to(ctx.device)
    soft = None if noise else guidance.teach(teachers, x, temperature, weights)

    def loss(rows: Tensor, stream: torch.Generator) -> Tensor:
        seen = x[rows]
        if soft is None:
            seen = seen + noise * torch.randn(seen.shape, generator=stream, device=ctx.device)
            target = guidance.teach(teachers, seen, temperature, weights)
        else:
            target = soft[rows]
        with seeded(stream):
            logits = head(seen)
        return guidance.guided_loss(logits, y[rows], target, alpha, temperature)

    score = None
    if validation is not None and len(validation[1]):
        score = partial(_cross_entropy, head, validation[0].to(ctx.device), validation[1].to(ctx.device))
    optimiser = make_optimiser("adam", head, lr)
    stage = file_name(name)
    fit = Fit(stage, head, optimiser, loss, len(y), batch=batch, epochs=epochs, ctx=ctx, score=score)
    history = fit.run(label or f"falcon: {name}")
    ctx.record.add("curves", f"{name} classifier", epoch_curve(history, "Eq. 13", "loss"))
    answers = epochs if noise else 1
    ctx.record.flops += forward_flops(head, x[:1]) * len(y) * (3 * epochs + answers * len(teachers))


def _cross_entropy(head: nn.Module, tokens: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(head(tokens), labels))
