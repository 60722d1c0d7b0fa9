"""A network that is being trained or distilled: train-mode forward passes, gradients, SGD."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedbicross.engine.device import autocast
from fedbicross.engine.fast import WORTH_COMPILING, compiled, worth_compiling
from fedbicross.engine.layers import use_fast_convolutions

_COMPILED: dict[str, Callable[..., Tensor]] = {}
# The kernel of torch.optim.SGD(fused=True), which keeps rate and momentum to itself; here a recorded step feeds both.
# Its name is private: where a torch has it no longer, the plain lines of `update` do the same.
_FUSED_SGD: Callable[..., None] | None = getattr(torch, "_fused_sgd_", None)


class Student:
    """Parameters, batch-normalisation statistics and momentum of one network, all in place on one device.

    ``gradient`` and ``update`` are apart because FedBiCross needs the gradients of several losses at one point.
    ``passes`` is how many all students of this architecture will be asked for: the fast path compiles where that pays.
    """

    def __init__(
        self,
        model: nn.Module,
        device: str = "cpu",
        precision: str = "fp32",
        fast: bool = False,
        passes: int = WORTH_COMPILING,
    ) -> None:
        self.device, self.precision, self.fast = device, precision, fast
        model = use_fast_convolutions(model) if fast else model
        self.model = model.to(device).to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
        self.params: dict[str, Tensor] = dict(self.model.requires_grad_(True).named_parameters())
        self.buffers = dict(self.model.named_buffers())
        self.compiled: Callable[..., Tensor] | None = None
        if fast:
            # Weights are arguments, so that students of one architecture share one compilation. Detached: a compiler
            # would take note that the first student's are the template's own, and compile again for the next.
            self.params = {name: p.detach().requires_grad_(True) for name, p in self.params.items()}
            self.buffers = {name: b.detach() for name, b in self.buffers.items()}
            if worth_compiling({"student": passes}):
                self.compiled = _COMPILED.setdefault(f"{model}{precision}", compiled(self._forward))
        self.momentum = [torch.zeros_like(p) for p in self.params.values()]
        # Running statistics for passes that must not change those of the network.
        self.scratch = {name: b.clone() for name, b in self.buffers.items()}
        self.captured: dict[str, Any] = {}  # recorded steps that belong to this student

    def logits(self, x: Tensor, track: bool = True, use_compiled: bool = True) -> Tensor:
        """Train-mode logits in float32; ``track`` says whether this batch moves the running statistics."""
        x = x.contiguous(memory_format=torch.channels_last)
        buffers = self.buffers if track else self.scratch  # train mode writes running statistics, never reads them
        forward = self.compiled if self.compiled and use_compiled else self._forward
        with autocast(self.device, self.precision):
            # The network holds its own tensors already: to exchange them takes longer than some layers.
            plain = track and not self.fast
            out: Tensor = self.model(x) if plain else forward({**self.params, **buffers}, x)
        return out.float() if out.dtype != torch.float64 else out

    def _forward(self, state: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = functional_call(self.model, state, (x,))
        return out

    @property
    def in_place(self) -> list[Tensor]:
        """Every tensor that ``update`` or a tracked pass changes."""
        return [*self.params.values(), *self.buffers.values(), *self.momentum]

    def gradient(
        self, x: Tensor, loss_of: Callable[[Tensor], Tensor], track: bool = True, use_compiled: bool = True
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The loss of the logits on a batch, detached, and its gradient by every parameter."""
        with torch.enable_grad():
            loss = loss_of(self.logits(x, track, use_compiled))
            gradients = torch.autograd.grad(loss, list(self.params.values()))
        return loss.detach(), gradients

    @torch.no_grad()
    def update(self, gradients: Sequence[Tensor], lr: float | Tensor, momentum: float, weight_decay: float) -> None:
        """SGD in place, as in torch.optim: b ← m b + g + wd θ, θ ← θ − lr b."""
        params: list[Tensor] = list(self.params.values())
        if _FUSED_SGD and self.fast and momentum > 0 and isinstance(lr, Tensor):
            # The same as below, in one pass over every weight.
            # A compiled gradient may have another layout than its weight, which this kernel refuses.
            same = [_laid_out_as(p, g) for p, g in zip(params, gradients, strict=True)]
            _FUSED_SGD(
                params,
                same,
                self.momentum,
                lr=lr,
                weight_decay=weight_decay,
                momentum=momentum,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
            )
            return
        step = torch._foreach_add(list(gradients), params, alpha=weight_decay)
        torch._foreach_mul_(self.momentum, momentum)
        torch._foreach_add_(self.momentum, step)
        if isinstance(lr, Tensor):
            torch._foreach_sub_(params, torch._foreach_mul(self.momentum, lr))
        else:
            torch._foreach_add_(params, self.momentum, alpha=-lr)

    @torch.no_grad()
    def eval_logits(self, x: Tensor) -> Tensor:
        """Logits with the running statistics, as the finished network would give them."""
        return self.frozen_logits(x)

    def frozen_logits(self, x: Tensor) -> Tensor:
        """The same, with gradients to the images only: what a generator sees of its student."""
        state = {name: value.detach() for name, value in {**self.params, **self.buffers}.items()}
        self.model.eval()
        try:
            with autocast(self.device, self.precision):
                out: Tensor = functional_call(self.model, state, (x.contiguous(memory_format=torch.channels_last),))
        finally:
            self.model.train()
        return out.float()

    @property
    def finite(self) -> bool:
        """Whether every weight and every running statistic is still a finite number."""
        return all(bool(torch.isfinite(value).all()) for value in (*self.params.values(), *self.buffers.values()))

    def copies(self) -> dict[str, Tensor]:
        """The network's state dict as it is now, copied where it lies."""
        both = {**self.params, **self.buffers}
        return {name: both[name].detach().clone() for name in self.model.state_dict()}

    def state(self) -> dict[str, Tensor]:
        """The network's state dict, on the CPU."""
        return {name: value.cpu().contiguous() for name, value in self.copies().items()}

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a killed run needs to go on to the same bytes."""
        momentum = zip(self.params, self.momentum, strict=True)
        return {**self.state(), **{f"momentum/{name}": m.detach().cpu().clone() for name, m in momentum}}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what ``tensors`` gave."""
        for name, value in {**self.params, **self.buffers}.items():
            value.copy_(tensors[name])
        for name, value in zip(self.params, self.momentum, strict=True):
            value.copy_(tensors[f"momentum/{name}"])


def _laid_out_as(param: Tensor, gradient: Tensor) -> Tensor:
    return gradient if gradient.stride() == param.stride() else torch.empty_like(param).copy_(gradient)
