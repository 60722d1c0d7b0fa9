"""N frozen client models behind one interface: logits, BN matching, batch-statistics and adapted teachers.

Every `nn.BatchNorm2d` of a private copy of each model is replaced by `engine.norm.Norm`, whose statistics can be chosen
for each pass. The plain path is the reference. On the fast one clients run side by side, in bf16 kept as such; passes
that will be made often enough are one compiled function per architecture, called with each client's weights; and passes
with stored statistics and without gradients use fused BN (`engine.fuse_batchnorm`).

Not thread-safe: the layers of a client share one small mutable record of what to do during a forward pass, and
`Ensemble.subset` shares it too. Two threads must not use ensembles that hold the same client.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedbicross.engine import fast as fast_path
from fedbicross.engine.device import autocast
from fedbicross.engine.fuse_batchnorm import FusedConv2d, fuse_batchnorm
from fedbicross.engine.layers import use_fast_convolutions
from fedbicross.engine.norm import BNDistance, Mode, Norm, Pass, Way
from fedbicross.engine.norm import LayerStatistics as LayerStatistics
from fedbicross.errors import MethodError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

Statistics = list[LayerStatistics]
"""One `LayerStatistics` for each client; empty for a client without BN."""

_PASSES: dict[tuple[object, ...], Callable[..., Any]] = {}
"""Compiled passes, one per architecture, mode, number of batches and precision, shared by all ensembles."""


@dataclass
class _Client:
    """A frozen network, the mode of its BN layers, and on the fast path a copy with fused BN, where that works."""

    model: nn.Module
    current: Pass
    fused: nn.Module | None = None


class Ensemble:
    """Private frozen copies of the clients' models, which may differ in architecture but not in classes.

    Gradients flow to the input only, and only where the caller asks for them (`x.requires_grad`). BN layers that keep
    no running statistics, and BatchNorm1d/3d, stay in eval mode and take no part in matching or adaptation.
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        precision: str = "fp32",
        fast: bool = False,
        bn_distance: BNDistance = "absolute",
    ) -> None:
        self.precision, self.fast = precision, fast
        # One by one: a hundred may come from a generator.
        self._clients = [_private_copy(model, precision, fast, bn_distance) for model in models]
        if not self._clients:
            raise MethodError("no_clients", "an ensemble needs at least one model")
        self.captured: dict[str, Any] = {}  # recorded steps that belong to this ensemble
        self.at_once: int | None = None  # how many clients' activations an inversion may keep in memory; none: all
        self.compile: Collection[str] = get_args(Mode)  # passes that the fast path compiles; others run as they are

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def has_batchnorm(self) -> list[bool]:
        """For each client, whether it has BN layers with stored statistics."""
        return [bool(_norms(client.model)) for client in self._clients]

    def subset(self, indices: Sequence[int]) -> Ensemble:
        """The ensemble of these clients, in this order, sharing the frozen copies: F_k of a cluster costs nothing."""
        if not indices:
            raise MethodError("no_clients", "an ensemble needs at least one model")
        chosen = object.__new__(Ensemble)
        chosen.precision, chosen.fast, chosen.captured = self.precision, self.fast, {}
        chosen._clients = [self._clients[i] for i in indices]
        chosen.at_once, chosen.compile = self.at_once, self.compile
        return chosen

    def on(self, device: str) -> Ensemble:
        """A copy on this device with nothing recorded, so that it can travel to another process."""
        moved = self.subset(range(len(self)))
        moved._clients = copy.deepcopy(moved._clients)
        for client in moved._clients:
            client.model.to(device)
            if client.fused is not None:
                client.fused.to(device)
        return moved

    def expect(self, architectures: Sequence[str], steps: Mapping[str, int]) -> None:
        """Say how many steps of each kind will be made of all clients, so that only what pays is compiled."""
        alike = max(Counter(architectures).values())  # clients of one architecture share a compilation
        self.compile = fast_path.worth_compiling({mode: count * alike for mode, count in steps.items()})

    def groups(self) -> list[Ensemble]:
        """The clients in groups of at most ``at_once``, in order; the ensemble itself where all fit."""
        size, count = self.at_once, len(self)
        if size is None or size >= count:
            return [self]
        return [self.subset(range(start, min(start + size, count))) for start in range(0, count, size)]

    def logits(self, x: Tensor) -> Tensor:
        """[N,B,C] with the stored BN statistics (the original teachers)."""
        return self._run(x, "stored")[0]

    def batch_logits(self, x: Tensor, batches: int = 1) -> Tensor:
        """[N,B,C], each BN layer normalising with the statistics of this batch; nothing stored changes.

        So does the noise-adapted teacher of the authors' released code (a copy left in train mode). ``x`` may hold
        several batches of one size: each is then normalised by statistics of its own.
        """
        return self._run(x, "batch", batches)[0]

    def adapted_logits(self, x: Tensor, statistics: Statistics) -> Tensor:
        """[N,B,C], each BN layer normalising with the given statistics (the noise-adapted teachers of Eq. 3)."""
        x = x.contiguous(memory_format=torch.channels_last)
        outputs = []
        with autocast(x.device.type, self.precision):
            for client, given in zip(self._clients, statistics, strict=True):
                with client.current.doing("given", given=given):
                    outputs.append(client.model(x))
        return _stacked(outputs)

    def logits_and_bn_loss(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[N,B,C] and [N]: the BN term of each client, Σ_layers ‖μ(x)−μ‖₂ + ‖σ²(x)−σ²‖₂ (FedISCA, below Eq. 1).

        μ(x) and σ²(x) (biased) are those of each layer's input while the network normalises with its stored statistics.
        With ``bn_distance="relative"`` each distance is divided by the layer's own unit (`engine.norm`). A client
        without BN has the term 0.
        """
        logits, terms = self._run(x, "match")
        return logits, torch.stack(terms)

    def logits_and_features(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """[N,B,C] with the stored BN statistics, and the features [B,D] that each client's head was given."""
        logits, features = self._run(x, "features")
        return logits, [feature.float() if feature.dtype == torch.bfloat16 else feature for feature in features]

    def initial_statistics(self) -> Statistics:
        """The stored statistics, from which Eq. 3 starts; copies, so that updating them changes no model."""
        return [
            {name: (norm.running_mean.clone(), norm.running_var.clone()) for name, norm in _norms(client.model).items()}
            for client in self._clients
        ]

    @torch.no_grad()
    def update_statistics(self, statistics: Statistics, x: Tensor, momentum: float) -> Statistics:
        """One step of Eq. 3: μ̃ ← β μ̃ + (1−β) μ(x), and the same for σ̃²; returns new statistics.

        Each layer normalises with the statistics of this batch, so deeper layers are measured on batch-normalised
        inputs, as in train mode and in the authors' pass. σ² is the biased variance, as the equation writes it; the
        running variance that torch itself would keep is the unbiased one.
        """
        updated: Statistics = []
        for client, old in zip(self._clients, statistics, strict=True):
            new = dict(old)
            with client.current.doing("measure"), autocast(x.device.type, self.precision):
                client.model(x)
                for name, mean, var in client.current.seen:
                    old_mean, old_var = new[name]
                    new[name] = (
                        momentum * old_mean + (1 - momentum) * mean.to(old_mean.dtype),
                        momentum * old_var + (1 - momentum) * var.to(old_var.dtype),
                    )
            updated.append(new)
        return updated

    def _run(self, x: Tensor, mode: Mode, batches: int = 1) -> tuple[Tensor, list[Tensor]]:
        """[N,B,C] and what else each client gives: its BN term, or its features."""
        x = x.contiguous(memory_format=torch.channels_last)  # the faster layout, on a CPU and on a GPU
        if self.fast and self.precision == "bf16":
            x = x.to(torch.bfloat16)
        jobs = [partial(self._pass, client, x, mode, batches) for client in self._clients]
        results = fast_path.run_on_streams(jobs, x.device.type if self.fast else "cpu")
        return _stacked([logits for logits, _ in results]), [other for _, other in results]

    def _pass(self, client: _Client, x: Tensor, mode: Mode, batches: int) -> tuple[Tensor, Tensor]:
        """One client's forward pass, by the fastest path that applies."""
        if mode == "stored" and client.fused is not None and not (x.requires_grad and torch.is_grad_enabled()):
            output = client.fused(x)
            return output, _zero(output)
        if self.fast and mode in self.compile:
            model = client.model
            # Detached: a compiler would take note that the first client's are the template's own, and compile again.
            state = {name: t.detach() for name, t in (*model.named_parameters(), *model.named_buffers())}
            key = (mode, batches, self.precision, str(model))
            if key not in _PASSES:
                _PASSES[key] = fast_path.compiled(_pass_function(model, client.current, mode, batches))
            logits, other = _PASSES[key](state, x)
            return logits, other
        with autocast(x.device.type, self.precision):
            return _plain_pass(client.model, client.current, x, mode, batches, "kernels" if self.fast else "plain")


def _stacked(outputs: Sequence[Tensor]) -> Tensor:
    classes = {output.shape[-1] for output in outputs}
    if len(classes) > 1:
        raise MethodError("class_mismatch", f"client models have different numbers of classes: {sorted(classes)}")
    stacked = torch.stack(list(outputs))
    return stacked.float() if stacked.dtype == torch.bfloat16 else stacked  # losses need more bits than bf16 has


def statistics_to_tensors(statistics: Statistics) -> dict[str, Tensor]:
    """A flat dict for checkpoints: ``clients`` (how many) and ``<client>/<layer>/mean|var``."""
    tensors = {"clients": torch.tensor(len(statistics))}
    for client, layers in enumerate(statistics):
        for layer, (mean, var) in layers.items():
            tensors[f"{client}/{layer}/mean"], tensors[f"{client}/{layer}/var"] = mean, var
    return tensors


def statistics_from_tensors(tensors: Mapping[str, Tensor]) -> Statistics:
    """The inverse of `statistics_to_tensors`."""
    statistics: Statistics = [{} for _ in range(int(tensors["clients"]))]
    for key, mean in tensors.items():
        if key.endswith("/mean"):
            client, layer = key.removesuffix("/mean").split("/", 1)
            statistics[int(client)][layer] = (mean, tensors[f"{client}/{layer}/var"])
    return statistics


def _matching_loss(stored: Mapping[str, Tensor], current: Pass, output: Tensor) -> Tensor:
    """The BN term of what the layers saw, against the statistics among a network's tensors; 0 if they saw nothing."""
    terms = current.terms or [
        torch.linalg.vector_norm(mean - stored[f"{name}.running_mean"]) / stored[f"{name}.units"][0]
        + torch.linalg.vector_norm(var - stored[f"{name}.running_var"]) / stored[f"{name}.units"][1]
        for name, mean, var in current.seen
    ]
    return torch.stack(terms).sum() if terms else _zero(output)


def _zero(output: Tensor) -> Tensor:
    return output.new_zeros((), dtype=torch.float32)


def _plain_pass(
    model: nn.Module, current: Pass, x: Tensor, mode: Mode, batches: int, way: Way
) -> tuple[Tensor, Tensor]:
    """The network as it is; on the plain path, where nothing about it is changed, the reference."""
    if mode == "features":
        seen: Tensor = _trunk(model)(x)
        return model.get_submodule("head")(seen), seen
    with current.doing(mode, way):
        output: Tensor = torch.cat([model(part) for part in x.chunk(batches)]) if batches > 1 else model(x)
        return output, _matching_loss(dict(model.named_buffers()), current, output)


def _pass_function(
    template: nn.Module, current: Pass, mode: Mode, batches: int
) -> Callable[..., tuple[Tensor, Tensor]]:
    """One forward pass as a function of a client's weights, for compilation."""

    def run_features(state: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        inner = {name.removeprefix("trunk."): value for name, value in state.items() if name.startswith("trunk.")}
        current.doing("stored", "compiled")
        try:
            seen = functional_call(_trunk(template), inner, (x,))
        finally:
            current.doing("stored")
        return F.linear(seen, state["head.weight"], state["head.bias"]), seen

    def run(state: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        current.doing(mode, "compiled", batches=batches)
        try:
            output = functional_call(template, state, (x,))
            return output, _matching_loss(state, current, output)
        finally:
            current.doing("stored")

    return run_features if mode == "features" else run


def _trunk(model: nn.Module) -> nn.Module:
    """What comes before the head; every model of `fedbicross.models` is head(trunk(x))."""
    trunk = getattr(model, "trunk", None)
    if not isinstance(trunk, nn.Module) or not isinstance(getattr(model, "head", None), nn.Linear):
        raise MethodError("needs_features", f"{type(model).__name__} has no trunk and linear head: no features")
    return trunk


def _private_copy(model: nn.Module, precision: str, fast: bool, bn_distance: BNDistance) -> _Client:
    current = Pass()
    private = copy.deepcopy(model).eval().requires_grad_(False)
    private = private.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    replaced: dict[nn.Module, Norm] = {}  # a layer used in two places stays one layer, under its first name
    for name, module in list(private.named_modules(remove_duplicate=False)):
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
            parent, _, attribute = name.rpartition(".")
            norm = replaced.setdefault(module, Norm(module, name, current, bn_distance))
            setattr(private.get_submodule(parent), attribute, norm)
    if not fast:
        return _Client(private, current)
    without = fuse_batchnorm(use_fast_convolutions(private))
    if precision == "bf16":  # as autocast would at each step
        for network in (private, without) if without is not None else (private,):
            _keep_in_bf16(network)
    return _Client(private, current, without)


def _keep_in_bf16(model: nn.Module) -> None:
    """Weights of convolutions and linear layers in bf16; batch normalisation and its statistics stay as they are."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear | FusedConv2d):
            module.to(torch.bfloat16)


def _norms(model: nn.Module) -> dict[str, Norm]:
    return {module.name: module for module in model.modules() if isinstance(module, Norm)}
