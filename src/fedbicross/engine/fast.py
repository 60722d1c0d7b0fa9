"""The fast path on a GPU: compiled network passes, and whole steps recorded as CUDA graphs.

A step of synthesis over five clients is thousands of small kernels; launching them one by one takes longer than the
arithmetic. ``compiled`` fuses the small ones, ``Captured`` replays a whole step with one launch. The plain path gives
the same results within rounding (tests and benchmarks compare them) and is used wherever ``fast`` is off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

WARM_UPS = 3  # torch asks for a few runs before a capture; compilation happens in the first


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile`` for fixed shapes."""
    return torch.compile(function, dynamic=False)


class Captured:
    """A function of tensors, recorded at its first call and replayed ever after.

    It must not wait for the host, and its shapes must not change. Results are copies, so that they may be kept.
    ``state`` names tensors that the function changes in place: they are put back after the warm-up runs.
    """

    def __init__(self, function: Callable[..., Sequence[Tensor]], state: Sequence[Tensor] = ()) -> None:
        self.function, self.state = function, list(state)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: list[Tensor] = []
        self.outputs: Sequence[Tensor] = ()

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Replay on these inputs."""
        if self.graph is None:
            self._record(inputs)
        assert self.graph is not None
        for static, given in zip(self.inputs, inputs, strict=True):
            static.copy_(given)
        self.graph.replay()
        return [output.clone() for output in self.outputs]

    def _record(self, inputs: Sequence[Tensor]) -> None:
        self.inputs = [value.detach().clone(memory_format=torch.preserve_format) for value in inputs]
        kept = [value.detach().clone() for value in self.state]
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self.function(*self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.outputs = self.function(*self.inputs)
        with torch.no_grad():
            for value, old in zip(self.state, kept, strict=True):
                value.copy_(old)
        self.graph = graph


def scalar(value: float | Tensor, device: str) -> Tensor:
    """A 0-dim tensor on the device: what a recorded step reads instead of a Python number."""
    return value if isinstance(value, Tensor) else torch.full((), value, device=device)
