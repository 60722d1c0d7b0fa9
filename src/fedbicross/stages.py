"""Long work in named stages: killed between any two steps, it goes on from its last checkpoint to the same bytes.

A method's loop reads as its paper's. What the loop changes are the stage's parts, objects with ``tensors()`` and
``load(tensors)``. They are loaded when the stage begins and kept now and then between two steps:

    stage = ctx.stage("distillation", "fedisca: distillation", total, student=student, watch=log)
    for epoch, (sample,) in stage.samples("epoch", config.epochs, [trajectory]):
        lr = config.lr * lr_multiplier(config.schedule, stage.progress)
        log.add(sample, distillation=learn(student, sample, config, lr))

The names of the parts (``student``, ``watch``) are those of the file: another name could not load an older checkpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fedbicross import engine, steps
from fedbicross.bundle.format import join_groups, take_group

if TYPE_CHECKING:
    from torch import Tensor

    from fedbicross.context import Context
    from fedbicross.engine.fast import Source

T = TypeVar("T")
Make = Callable[[int, "Mapping[str, Tensor] | None"], "Source[T]"]  # of a number, and the place to go on from


class Part(Protocol):
    """Something that a stage changes."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Everything that a resume needs; no tensor twice."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what ``tensors`` gave, now on the device of the work."""
        ...


class Stage:
    """``total`` steps of named work, of which ``done`` are finished."""

    def __init__(
        self,
        ctx: Context,
        name: str,
        label: str,
        total: int,
        parts: Mapping[str, Part | Sequence[Part]],
        keep_end: bool = False,
    ) -> None:
        self.ctx, self.name, self.total, self.keep_end = ctx, name, total, keep_end
        self.done, self.number = 0, 0  # steps; and the number of the source that is being read
        self.numbers: dict[str, int] = {}  # a method's own, kept with the parts
        self.note = ""  # for the person who watches
        self._parts: dict[str, Part] = {}
        for key, part in parts.items():
            self._parts |= {f"{key}-{i}": p for i, p in enumerate(part)} if isinstance(part, Sequence) else {key: part}
        self._sources: Sequence[Source[Any]] = ()
        self._places: list[dict[str, Tensor]] = []  # of the sources, in the checkpoint
        self._load()
        self._update = ctx.progress.start(label, total)

    @property
    def progress(self) -> float:
        """From 0 at the first step to just below 1 at the last."""
        return self.done / self.total

    def steps(self) -> Iterator[int]:
        """The numbers of the steps that are left. With ``keep_end`` the end is kept as soon as it is reached."""
        for step in range(self.done, self.total):
            yield step
            self.advance()

    def advance(self, keep: bool = True) -> None:
        """One step is done: say so, and keep it where a checkpoint is due."""
        self.done += 1
        self._update(self.done, self.note)
        if self.keep_end and self.done == self.total:
            self.ctx.save_stage(self.name, *self._state())
        elif keep:
            self.ctx.save_stage_when_due(self.name, self._state)

    def samples(self, unit: str, count: int, makes: Sequence[Make[T]]) -> Iterator[tuple[int, tuple[T, ...]]]:
        """What the sources of each number hand out side by side, ``total`` times in all, with the number.

        The last step is never kept: it is made again, since methods look at its samples once more.
        """
        numbers = range(self.number, count)
        for number, sources in zip(numbers, self._in_turn(numbers, makes), strict=True):
            self.number, self._sources, self.note = number, sources, f"{unit} {number + 1}/{count}"
            for samples in zip(*sources, strict=True):
                yield number, samples
                self.advance(keep=self.done + 1 < self.total)

    def _in_turn(self, numbers: range, makes: Sequence[Make[T]]) -> Iterator[list[Source[T]]]:
        """The sources of each number in turn. Each makes its next sample while one is learnt from.

        Where there are workers they make the trajectories, and begin those of later numbers before their turn comes.
        """
        ctx, begun, later = self.ctx, deque[list["Source[T]"]](), 0
        for number in numbers:
            places = self._places if self._places and number == numbers.start else [None] * len(makes)
            sources: list[Any] = [make(number, place) for make, place in zip(makes, places, strict=True)]
            for k, source in enumerate(sources):
                if ctx.workers is not None and isinstance(source, steps.trajectory.Trajectory):
                    room = ctx.workers.begin(most=len(numbers) * len(sources))
                    later = room // len(sources)
                    if k < room:  # a worker each; what is left over is made here
                        sources[k] = source.on_worker(ctx.workers)
            begun.append([engine.fast.prefetch(source, ctx.fast) for source in sources])
            if len(begun) > later:
                yield begun.popleft()
        yield from begun

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        groups = {name: part.tensors() for name, part in self._parts.items()}
        groups |= {f"source-{k}": source.tensors() for k, source in enumerate(self._sources)}
        counts = {"done": self.done, "number": self.number, "sources": len(self._sources)}
        return join_groups(**groups), {**counts, "numbers": self.numbers}

    def _load(self) -> None:
        checkpoint = self.ctx.load_stage(self.name)
        if checkpoint is None:
            return
        info, tensors = checkpoint[1], {name: value.to(self.ctx.device) for name, value in checkpoint[0].items()}
        self.done, self.number, self.numbers = info["done"], info["number"], info["numbers"]
        self._places = [take_group(tensors, f"source-{k}") for k in range(info["sources"])]
        for name, part in self._parts.items():
            part.load(take_group(tensors, name))
