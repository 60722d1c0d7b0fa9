"""Batches made by other processes, on GPUs or machines of their own, with Ray.

Images and soft labels do not depend on the students that learn from them, so a worker can make them and stream them to
the server. Every trajectory is begun here, from a random stream of its own: where it is made does not change it. Only
objects of this package travel, between processes of the server's own cluster; uploads have been verified before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedbicross.engine.device import set_precision
from fedbicross.engine.fast import Source
from fedbicross.errors import ConfigError

T = TypeVar("T")

CHUNK, CHUNK_BYTES = 10, 8 << 20  # items that travel together: at most so many, and no more once so large
WAITING = 2  # chunks that a worker makes before one is taken; then it waits
STORE = 200 << 20  # bytes of shared memory of a cluster of our own; Ray's default is a third of the machine
PATIENCE = 120.0  # seconds for workers to start; those of a busy cluster that come later are not used
QUIET = {"log_to_driver": False, "include_dashboard": False, "configure_logging": False}


class Portable(Protocol):
    """What every batch is made from: the teachers."""

    def on(self, device: str) -> Self:
        """A copy on this device."""
        ...


Make = Callable[..., Source[T]]  # of a Portable and ``tensors=``, the place to go on from; it travels, too


def import_ray() -> Any:
    """The package, or an error that says how to get it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports over the network
    try:
        import ray
    except ImportError:
        raise ConfigError("no_ray", "--engine ray needs one more package: pip install 'fedbicross[ray]'") from None
    return ray


def as_finished(ray: Any, waiting: list[Any]) -> Iterator[Any]:
    """What Ray's tasks return, in the order in which they end; an error is raised as the task raised it."""
    while waiting:
        done, waiting = ray.wait(waiting)
        try:
            yield from ray.get(done)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, Exception) else error) from None


class Workers:
    """Processes of a Ray cluster, each with a GPU of its own where the server uses one; started on first use.

    The cluster is that of ``$RAY_ADDRESS``, the one that the caller is connected to, or a new one on this machine.
    """

    def __init__(
        self, count: int | None = None, device: str = "cpu", precision: str = "fp32", say: Callable[[str], None] = print
    ) -> None:
        self.ray = import_ray()
        self.count, self.device, self.precision, self.say = count, device, precision, say
        self.actors: list[Any] = []
        self._ours, self._sent = False, 0
        self._shared: dict[int, tuple[Portable, Any]] = {}  # by id(), valid while the object is kept

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        for actor in self.actors:
            self.ray.kill(actor)
        self.actors, self._shared = [], {}
        if self._ours:
            self.ray.shutdown()

    def begin(self, most: int) -> int:
        """Start at most ``most`` workers, unless they run already; returns how many there are."""
        if self.actors:
            return len(self.actors)
        ray, threads, gpu = self.ray, torch.get_num_threads(), int(self.device == "cuda")
        cores = self._connect(most, threads)
        has = ray.cluster_resources()
        room = int(has.get("GPU", 0)) if gpu else int(has.get("CPU", 0)) // cores
        worker = ray.remote(num_cpus=cores, num_gpus=gpu)(_Worker)
        count = min(self.count or room, most, room)
        actors = [
            worker.remote(self.device, self.precision, torch.backends.cudnn.deterministic, threads)
            for _ in range(count)
        ]
        signs = {actor.ready.remote(): actor for actor in actors}
        there, late = ray.wait(list(signs), num_returns=count, timeout=PATIENCE) if signs else ([], [])
        self.actors = [signs[sign] for sign in there]
        for sign in late:
            ray.kill(signs[sign])
        try:
            ray.get(there)
        except ray.exceptions.RayError as error:
            raise ConfigError("no_workers", f"a Ray worker cannot start: {str(error).splitlines()[-1][:300]}") from None
        if not self.actors:
            need = "a free GPU" if gpu else f"{cores} free cores (--threads)"
            raise ConfigError("no_workers", f"no machine of the Ray cluster has {need}; use --engine local")
        self.say(f"trajectories are made by Ray workers: {len(self.actors)}")
        return len(self.actors)

    def _connect(self, most: int, threads: int) -> int:
        """Join a cluster or start one; how many of its cores a worker asks for."""
        self._ours = not self.ray.is_initialized()
        if not self._ours:
            return threads
        where: dict[str, Any] = {"address": os.environ.get("RAY_ADDRESS")}
        if where["address"] is None:
            fit = torch.cuda.device_count() if self.device == "cuda" else max(1, (os.cpu_count() or 1) // threads)
            where = {"address": "local", "num_cpus": min(self.count or fit, most), "object_store_memory": STORE}
        try:
            self.ray.init(**where, **QUIET)
        except (OSError, RuntimeError, ValueError, self.ray.exceptions.RayError) as error:
            text = f"cannot use the Ray cluster {where['address']!r}: {str(error).splitlines()[0][:300]}"
            raise ConfigError("no_cluster", text) from None
        return 1 if where["address"] == "local" else threads

    def stream(self, shared: Portable, make: Make[T], place: Mapping[str, Tensor]) -> Iterator[tuple[T, ...]]:
        """Have the next worker in turn make the rest of a source; chunks of it, in order, on the server's device.

        A worker makes what it is asked for one after the other, so that sources which are read side by side need a
        worker each.
        """
        actor = self.actors[self._sent % len(self.actors)]
        self._sent += 1
        if id(shared) not in self._shared:
            self._shared[id(shared)] = shared, self.ray.put(shared.on("cpu"))
        reference = self._shared[id(shared)][1]
        how = {"num_returns": "streaming", "_generator_backpressure_num_objects": WAITING}
        chunks = actor.make.options(**how).remote(make, [reference], map_leaves(dict(place), to("cpu")))
        return (map_leaves(map_leaves(self._get(chunk), from_bytes), to(self.device)) for chunk in chunks)

    def _get(self, reference: Any) -> Any:
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except self.ray.exceptions.RayActorError:
            raise LostWorkerError from None


class LostWorkerError(Exception):
    """A worker, or its machine, has died."""


class OnWorker(Generic[T]):
    """A source made by a worker, begun at once. Its place in a checkpoint is its beginning and how much is done."""

    def __init__(self, workers: Workers, shared: Portable, make: Make[T], place: Mapping[str, Tensor]) -> None:
        self.shared, self.make, self.say = shared, make, workers.say
        self.place, self.done = dict(place), int(place["done"])
        self._chunks = workers.stream(shared, make, place)

    def tensors(self) -> dict[str, Tensor]:
        """State for a checkpoint; on resume, finished items are computed again but not yielded."""
        return {**self.place, "done": torch.tensor(self.done)}

    def __iter__(self) -> Iterator[T]:
        for item in self._items():
            self.done += 1
            yield item

    def _items(self) -> Iterator[T]:
        try:
            for chunk in self._chunks:
                yield from chunk
        except LostWorkerError:
            self.say("a Ray worker is gone; the server makes the rest of its trajectory")
            yield from self.make(self.shared, tensors=self.tensors())


class _Worker:
    """At a worker: makes sources, keeping what they share."""

    def __init__(self, device: str, precision: str, reproducible: bool, threads: int) -> None:
        torch.set_num_threads(threads)  # as at the server: another number would round sums in another order
        set_precision(precision, reproducible)
        self.device = device
        self.shared: dict[Any, Portable] = {}

    def ready(self) -> bool:
        return True

    def make(self, make: Make[Any], shared: list[Any], place: dict[str, Tensor]) -> Iterator[tuple[Any, ...]]:
        (reference,) = shared  # in a list, so that Ray does not fetch what is here already
        if reference not in self.shared:
            self.shared[reference] = import_ray().get(reference).on(self.device)
        chunk: list[Any] = []
        for item in make(self.shared[reference], tensors=map_leaves(place, to(self.device))):
            chunk.append(item)
            if len(chunk) == CHUNK or size(tuple(chunk)) >= CHUNK_BYTES:
                yield map_leaves(tuple(chunk), to_bytes)
                chunk = []
        if chunk:
            yield map_leaves(tuple(chunk), to_bytes)


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same nested tuples and dicts with ``change`` applied to every leaf."""
    if isinstance(value, dict):
        return {key: map_leaves(part, change) for key, part in value.items()}
    if not isinstance(value, tuple):
        return change(value)
    parts = [map_leaves(part, change) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def to(device: str) -> Callable[[Any], Any]:
    """For ``map_leaves``: tensors to a device."""
    return lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf


@dataclass(frozen=True)
class TensorBytes:
    """A tensor as plain bytes, which Ray's shared memory takes and gives several times faster than a tensor."""

    data: np.ndarray  # uint8
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # kept, since another layout could round sums in another order


def to_bytes(leaf: Any) -> Any:
    """For ``map_leaves``: tensors as bytes."""
    if not isinstance(leaf, Tensor):
        return leaf
    tensor = leaf.detach().cpu()
    if not tensor.is_contiguous() and not (
        tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    ):
        tensor = tensor.contiguous()
    data = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return TensorBytes(data, tensor.dtype, tuple(tensor.shape), tensor.stride())


def from_bytes(leaf: Any) -> Any:
    """For ``map_leaves``: the tensors again, in memory of their own."""
    if not isinstance(leaf, TensorBytes):
        return leaf
    data = torch.empty(len(leaf.data), dtype=torch.uint8)
    data.numpy()[:] = leaf.data
    return data.view(leaf.dtype).as_strided(leaf.shape, leaf.stride)


def size(value: Any) -> int:
    """Bytes of the tensors in it."""
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(size, value)) if isinstance(value, tuple) else 0
