"""The fast path on a GPU: compiled network passes, whole steps recorded as CUDA graphs, and work done side by side.

A step of synthesis over five clients is thousands of small kernels; launching them one by one takes longer than the
arithmetic. ``compiled`` fuses the small ones, ``Captured`` replays a whole step with one launch, ``run_on_streams``
lets clients share the GPU, and ``Prefetched`` makes the next batch while a student learns from the last one. The
plain path gives the same results within rounding (tests and benchmarks compare them) and is used wherever ``fast`` is
off. On a CPU all four do the plain thing, so that tests can walk the same code without a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

# Passes of one architecture after which compiling them has paid. On an H200 that takes 30 s for passes that match
# statistics, 11 s for those by the batch's own and 22 s for a student's, nearly all of it Python, and saves 1.1, 0.5
# and 1.1 ms of each: paid after 19,000 to 28,000. Those for a generator ("stored", "features") are taken to be alike.
WORTH_COMPILING = 25_000
WARM_UPS = 3  # torch asks for a few runs before a capture; compilation happens in the first
STREAMS = 8  # beyond so many, kernels wait for each other anyway

_streams: dict[int, list[torch.cuda.Stream]] = {}
_at_once = True  # changed by `one_at_a_time` only
# torch has no public name for it; where a version lacks it, nothing shares a GPU (`at_once`, `_own_workspaces`).
_clear_workspaces: Callable[[], None] | None = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Within it, what would share a GPU is done in turn: tests and benchmarks compare both, bit for bit."""
    global _at_once
    before, _at_once = _at_once, False
    try:
        yield
    finally:
        _at_once = before


def at_once(device: str, jobs: int = 2) -> bool:
    """Whether so many jobs share this device rather than wait for one another."""
    return _at_once and device == "cuda" and jobs > 1 and _clear_workspaces is not None


def worth_compiling(passes: Mapping[str, int]) -> frozenset[str]:
    """Which of these kinds of passes will be made often enough; others are recorded as they are."""
    return frozenset(kind for kind, count in passes.items() if count >= WORTH_COMPILING)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile`` for fixed shapes; nothing without a GPU, where no C++ compiler is promised."""
    if not torch.cuda.is_available():
        return function
    dynamo = torch._dynamo
    # By default torch gives up, silently and slowly, at the ninth shape or network that one function meets.
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, 256)
    dynamo.config.accumulated_recompile_limit = max(dynamo.config.accumulated_recompile_limit, 1024)
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
        if not inputs[0].is_cuda:
            return list(self.function(*inputs))
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
        with _no_garbage_collection(), _own_workspaces(), torch.cuda.graph(graph, stream=side):
            self.outputs = self.function(*self.inputs)
        with torch.no_grad():
            for value, old in zip(self.state, kept, strict=True):
                value.copy_(old)
        self.graph = graph


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """Matrix products recorded here write to scratch memory that belongs to this recording alone.

    torch keeps one cuBLAS workspace for each stream and thread, and a recording holds its address. Two recordings made
    on the same streams would therefore write into each other's results when they are replayed at the same time.
    Cleared before, the workspaces are allocated anew from the recording's own memory pool; cleared after, nobody else
    is given them. torch does the same for its CUDA graph trees.
    """
    clear = _clear_workspaces or (lambda: None)
    clear()
    try:
        yield
    finally:
        clear()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Freeing an older CUDA graph while a new one is captured would make the capture invalid."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def recorded(
    kept: dict[str, Any], key: str, step: Callable[..., Sequence[Tensor]], state: Sequence[Tensor], fast: bool
) -> Callable[..., Sequence[Tensor]]:
    """The step itself, or where it is to be fast its recording, made once and kept under ``key``."""
    if not fast:
        return step
    if key not in kept:
        kept[key] = Captured(step, state)
    replayed: Captured = kept[key]
    return replayed


def run_on_streams(jobs: Sequence[Callable[[], T]], device: str) -> list[T]:
    """The results of independent jobs, on a GPU each on a stream of its own; autograd keeps to the same streams."""
    if not at_once(device, len(jobs)):
        return [job() for job in jobs]
    index = torch.cuda.current_device()
    if index not in _streams:
        _streams[index] = [torch.cuda.Stream() for _ in range(STREAMS)]  # type: ignore[no-untyped-call]
    main, results = torch.cuda.current_stream(), []
    streams = _streams[index][: len(jobs)]
    for stream in streams:
        stream.wait_stream(main)
    for number, job in enumerate(jobs):
        with torch.cuda.stream(streams[number % len(streams)]):
            results.append(job())
    for stream in streams:
        main.wait_stream(stream)
    return results


class Source(Protocol[T_co]):
    """An iterable, read once, whose position can be checkpointed."""

    def __iter__(self) -> Iterator[T_co]: ...

    def tensors(self) -> Mapping[str, Tensor]:
        """The position after the last item yielded."""
        ...


class Prefetched(Generic[T]):
    """A source whose next item is made on a stream of its own while the last one is still being used.

    What it makes may not depend on what the user does with it: images and soft labels do not depend on the student.
    ``tensors`` is the position after the last item yielded, not after the prefetched one.
    """

    def __init__(self, source: Source[T]) -> None:
        self.source, self._items = source, iter(source)
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._place: Mapping[str, Tensor] = source.tensors()

    def tensors(self) -> Mapping[str, Tensor]:
        """The position after the last item yielded."""
        return self._place

    def __iter__(self) -> Iterator[T]:
        coming = self._make()
        while coming is not None:
            item, place, made = coming
            coming = self._make()
            main = torch.cuda.current_stream()
            main.wait_event(made)
            for tensor in _tensors_in(item):
                tensor.record_stream(main)
            self._place = place
            yield item

    def _make(self) -> tuple[T, Mapping[str, Tensor], torch.cuda.Event] | None:
        # Waiting for what the user has asked for so far keeps this exactly one item ahead.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for item in self._items:
                return item, self.source.tensors(), self._stream.record_event()
        return None


def prefetch(source: Source[T], fast: bool) -> Source[T]:
    """``Prefetched`` on a GPU with the fast path, the source itself elsewhere."""
    return Prefetched(source) if fast and torch.cuda.is_available() and at_once("cuda") else source


def _tensors_in(item: Any) -> Iterable[Tensor]:
    if isinstance(item, Tensor):
        return [item] if item.is_cuda else []
    return [t for part in item for t in _tensors_in(part)] if isinstance(item, tuple) else []


def scalar(value: float | Tensor, device: str) -> Tensor:
    """A 0-dim tensor on the device: what a recorded step reads instead of a Python number."""
    return value if isinstance(value, Tensor) else torch.full((), value, device=device)
