"""Making cells: one after another from the front of the suite, by as many processes as share the folder.

Every cell is a small run of `runs.runner` in a folder of its own under ``work/``, whose lock keeps other processes
away and whose checkpoints let a killed cell go on. What cells of one federation share (client models, features, and
everything of training alone) lies in one place beside them, kept by content as in any run. Finished work is
removed; the cell's JSON file is what stays.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any, Literal

from fedbicross.atomic import write_atomic
from fedbicross.bench import cells as stored
from fedbicross.bench.suite import Cell
from fedbicross.bundle.format import canonical_json
from fedbicross.context import Progress, Silent, Store
from fedbicross.engine.device import resolve_device
from fedbicross.engine.workers import QUIET, as_finished, import_ray
from fedbicross.errors import FedBiCrossError, RunError
from fedbicross.freed_memory import keep_freed_memory
from fedbicross.runs import runner
from fedbicross.runs.config import RunConfig, check, merge
from fedbicross.runs.store import DiskStore, RunFolder

Engine = Literal["local", "ray"]
SHARED = ("client_models/", "features/", "stages/training/")
SECONDS_BETWEEN_LOOKS = 1.0  # while all that is left is in the hands of other processes


class OutOfTime(Exception):
    """The minutes that were asked for are over."""


class Deadline:
    """Progress that ends the work when its time is over: as a kill would, so that it goes on from a checkpoint."""

    def __init__(self, inner: Progress, ends: float) -> None:
        self.inner, self.ends = inner, ends

    def start(self, label: str, total: int) -> Callable[[int, str], None]:
        """Begin a piece of work, if there is time."""
        self.check()
        update = self.inner.start(label, total)

        def tell(done: int, note: str) -> None:
            update(done, note)
            self.check()

        return tell

    def say(self, message: str) -> None:
        """One line for the person."""
        self.inner.say(message)

    def check(self) -> None:
        """Raise ``OutOfTime`` when it is."""
        if time.monotonic() >= self.ends:
            raise OutOfTime


class SharedStore:
    """A ``Store`` whose common names lie in the federation's folder and all others in the cell's own."""

    def __init__(self, own: Path, shared: Path, scopes: Sequence[str]) -> None:
        self.own, self.shared, self.scopes = DiskStore(own), DiskStore(shared), tuple(f"/{s}" for s in scopes)

    def _of(self, name: str) -> Store:
        common = name.startswith(SHARED) or any(f"{scope}/" in f"{name}/" for scope in self.scopes)
        # rows/seed-0/local_only.json is a file, not a folder
        return self.shared if common or any(name.endswith(f"{scope}.json") for scope in self.scopes) else self.own

    def load(self, name: str) -> bytes | None:
        """The bytes, or None."""
        return self._of(name).load(name)

    def lists(self, name: str) -> bool:
        """Whether it was ever saved."""
        return self._of(name).lists(name)

    def size(self, name: str) -> int:
        """Length in bytes; 0 where there is nothing."""
        return self._of(name).size(name)

    def save(self, name: str, data: bytes) -> None:
        """Keep the bytes."""
        self._of(name).save(name, data)

    def write(self, name: str, data: bytes) -> None:
        """Keep the bytes as a file of their own."""
        self.own.write(name, data)

    def drop(self, prefix: str) -> None:
        """Forget a name, or every name in a folder."""
        self._of(prefix).drop(prefix)


class CellFolder(RunFolder):
    """A run's folder that shares what the cells of a federation share, with the times that it took."""

    def __init__(self, path: Path, shared: Path, scopes: Sequence[str]) -> None:
        super().__init__(path)
        self.common = RunFolder(shared)
        self.scopes = frozenset(scopes)
        self.store = SharedStore(path, shared, scopes)  # type: ignore[assignment]  # all that a runner asks of it

    def __enter__(self) -> CellFolder:
        super().__enter__()
        try:
            lost = not os.path.samestat(os.fstat(self._lock or 0), (self.path / ".lock").stat())
        except FileNotFoundError:
            lost = True
        if lost:  # somebody removed the folder between the opening of the lock and its taking
            self.__exit__()
            raise RunError("locked", f"another process removed {self.path}")
        return self

    def event(self, **fields: Any) -> None:
        """Note times of shared work where everybody finds them."""
        common = fields.get("event") in ("trained", "encoded") or fields.get("scope") in self.scopes
        if common:
            self.common.event(**fields)
        else:
            super().event(**fields)

    def events(self) -> list[dict[str, Any]]:
        """What was noted there and here."""
        return [*self.common.events(), *super().events()]


@dataclass(frozen=True)
class Job:
    """Cells that are made by one run: all ways of training alone, or the variants of a method whose server's work is
    the same, which the run does once."""

    cells: tuple[Cell, ...]
    needs: frozenset[str] = frozenset()  # keys of cells that must be there before

    @property
    def name(self) -> str:
        """For the person."""
        first = self.cells[0]
        return f"{first.federation}: {', '.join(cell.method for cell in self.cells)}"

    def config(self, cells: Sequence[Cell]) -> RunConfig:
        """The run that makes some of its cells."""
        first = self.cells[0]
        if first.is_alone:
            return first.config
        table: dict[str, Any] = {}
        for cell in cells:
            table = merge(table, cell.config.method)
        methods = [*first.alone, *(cell.spec for cell in cells)]
        return first.config.model_copy(update={"methods": methods, "method": table})


def jobs(cells: Sequence[Cell]) -> list[Job]:
    """The pieces of work for these cells, in the order of the first of each."""
    found: dict[Hashable, list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.federation, cell.alone) if cell.is_alone else _server_work(cell), []).append(cell)
    out = []
    for members in found.values():
        first = members[0]
        alone = [] if first.is_alone else found.get((first.federation, first.alone), [])
        out.append(Job(tuple(members), frozenset(cell.key for cell in alone)))
    return out


def _server_work(cell: Cell) -> Hashable:
    """Equal where a method differs only in what it does at the client after the reply."""
    method = cell.config.build(cell.spec)
    settings = canonical_json(method.config.model_dump(exclude=set(method.at_client)))
    return cell.federation, cell.alone, cell.sweep, method.name, settings


@dataclass
class Outcome:
    """What a call did: keys of cells."""

    made: list[str] = field(default_factory=list)
    failed: dict[str, FedBiCrossError] = field(default_factory=dict)
    unavailable: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # there was no time for them


def run(
    cells: Sequence[Cell],
    out: Path,
    data_dir: Path | None = None,
    *,
    suite: Sequence[Cell] | None = None,
    progress: Progress | None = None,
    minutes: float | None = None,
    keep_work: bool = False,
) -> Outcome:
    """Make what is not there or stale, from the front. Ends when all of it is there, whoever made it, or time is over.

    ``suite`` are all cells of the suite: work that others of them could still use is kept.
    """
    ends = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    progress = Deadline(progress or Silent(), ends)
    outcome = Outcome()
    waiting = []
    for job in jobs(cells):
        if all(_current(cell, out) for cell in job.cells):
            continue
        if stored.place(job.cells[0], data_dir) is None:
            outcome.unavailable += [cell.key for cell in job.cells]
        else:
            waiting.append(job)
    total, done = len(waiting), 0
    everything = list(suite or cells)
    alone = {(job.cells[0].federation, job.cells[0].alone): job for job in jobs(everything) if job.cells[0].is_alone}
    try:
        while waiting:
            taken = _take(waiting, alone, out, data_dir, outcome, progress)
            if taken is None:  # all that is left is being made by others, or needs what they make
                progress.check()
                time.sleep(SECONDS_BETWEEN_LOOKS)
                continue
            waiting.remove(taken)
            done += 1
            progress.say(f"[{done}/{total}] {taken.name}: {_ended(taken, outcome)}")
            if not keep_work:
                _tidy(taken, everything, out)
    except OutOfTime:
        outcome.left = [cell.key for job in waiting for cell in job.cells if not _current(cell, out)]
    return outcome


def _ended(job: Job, outcome: Outcome) -> str:
    keys = [cell.key for cell in job.cells]
    broken = next((outcome.failed[key] for key in keys if key in outcome.failed), None)
    if broken is not None:
        return str(broken)
    return "made" if any(key in outcome.made for key in keys) else "made by another process"


def _current(cell: Cell, out: Path) -> bool:
    return stored.status_of(cell, out).state == "done"


def _take(
    waiting: Sequence[Job],
    alone: Mapping[tuple[str, tuple[str, ...]], Job],
    out: Path,
    data_dir: Path | None,
    outcome: Outcome,
    progress: Deadline,
) -> Job | None:
    """Make the first job that nobody else is at, or find that it has been made; None if there is none."""
    other = {cell.key for job in waiting for cell in job.cells}
    for job in waiting:
        broken = next((outcome.failed[key] for key in job.needs if key in outcome.failed), None)
        if broken is not None:
            outcome.failed |= {cell.key: broken for cell in job.cells}
            return job
        if any(key in other for key in job.needs):  # this call makes training alone itself, before
            continue
        progress.check()
        folder = _folder(job, out)
        try:
            with contextlib.ExitStack() as locks:
                if job.cells[0].is_alone:
                    locks.enter_context(folder)
                else:
                    first = alone.get((job.cells[0].federation, job.cells[0].alone))
                    with _folder(job, out, alone=True) as beside:
                        if first is not None and not all(_current(cell, out) for cell in job.cells):
                            _one_training(first, beside, out, data_dir, progress)
                        locks.enter_context(folder)  # before the other lock is free, so that nobody tidies in between
                todo = [cell for cell in job.cells if not _current(cell, out)]
                if todo and job.cells[0].is_alone:
                    todo = list(job.cells)  # each is measured against all
                if todo:
                    _make(job, todo, folder, out, data_dir, progress)
                    outcome.made += [cell.key for cell in todo]
        except RunError as error:
            if error.code == "locked":
                continue
            _fail(job, out, data_dir, outcome, error)
        except FedBiCrossError as error:
            _fail(job, out, data_dir, outcome, error)
        return job
    return None


def _one_training(alone: Job, folder: CellFolder, out: Path, data_dir: Path | None, progress: Progress) -> None:
    """Train alone again where the models are gone, or are not those of the stored cells.

    The store that a federation's jobs share has no lock of its own: only whoever holds ``alone`` may train in it. And a
    method must be measured against the training that its clients had; on a GPU no two are the same.
    """
    if all(_current(cell, out) and _shared(cell, folder, out) for cell in alone.cells):
        return
    progress.say(f"{alone.name}: again, its models are not here")
    _make(alone, alone.cells, folder, out, data_dir, progress)


def _shared(cell: Cell, folder: CellFolder, out: Path) -> bool:
    """Whether the models behind a cell of training alone lie in the shared store."""
    row = folder.store.load(f"rows/seed-{cell.seed}/{cell.spec.replace(':', '+')}.json")
    kept = (stored.load(stored.file_of(out, cell)) or {}).get("row", {})
    return row is not None and json.loads(row)["clients"] == kept.get("clients")


def _fail(job: Job, out: Path, data_dir: Path | None, outcome: Outcome, error: FedBiCrossError) -> None:
    """Note it and go on: one method that cannot work must not cost all others."""
    if error.code == "cannot_write":
        raise error
    for cell in job.cells:
        outcome.failed[cell.key] = error
        stored.save_error(out, cell, error, data_dir)


def _work(cell: Cell, out: Path) -> Path:
    return out / "work" / f"{cell.federation}-{stored.federation_digest(cell)[:12]}"


def _folder(job: Job, out: Path, alone: bool = False) -> CellFolder:
    """Of a job, or of training alone on its federation."""
    first = job.cells[0]
    base = _work(first, out)
    scopes = [f"seed-{first.seed}/{spec.replace(':', '+')}" for spec in first.alone]
    # Digests are in the name: what a method left under other settings must not be taken for this one's.
    digests = hashlib.sha256("".join(stored.digest(cell) for cell in job.cells).encode()).hexdigest()
    own = "alone" if alone or first.is_alone else f"{first.method.replace(':', '+')}-{digests[:12]}"
    return CellFolder(base / own, base / "shared", scopes)


def _make(
    job: Job, cells: Sequence[Cell], folder: CellFolder, out: Path, data_dir: Path | None, progress: Progress
) -> None:
    config = _at_home(job.config(cells), stored.place(cells[0], data_dir))
    check(config)
    prepared = _prepare(config)
    folder.clean()
    _same_data(folder.common.path / "partition.json", prepared.partition_text.encode())
    results = runner.run_prepared(prepared, folder, progress)
    for cell in cells:
        stored.save(out, cell, results)


def _at_home(config: RunConfig, place: tuple[str, str | None] | None) -> RunConfig:
    """With the place of the images on this machine."""
    assert place is not None  # jobs without images are not begun
    return config.model_copy(update={"data": config.data.model_copy(update={"name": place[0], "dir": place[1]})})


def _prepare(config: RunConfig) -> runner.Prepared:
    """Images and their partition, read once for all methods of a federation."""
    bare = config.model_copy(update={"methods": ["local_only"], "method": {}, "name": "bench"})
    found = _load(bare.model_dump_json())
    return replace(found, config=config)


@lru_cache(maxsize=1)
def _load(config: str) -> runner.Prepared:
    return runner.prepare(RunConfig.model_validate_json(config))


def _same_data(file: Path, text: bytes) -> None:
    """Refuse to mix results of other images or another partition into a federation."""
    try:
        known = file.read_bytes()
    except FileNotFoundError:
        write_atomic(file, text)
        return
    if known != text:
        raise RunError("changed", f"the data or their partition are not those of {file}; delete its folder")


def _tidy(job: Job, suite: Sequence[Cell], out: Path) -> None:
    """Remove the work of a finished job, and all of a federation once every cell on it is there."""
    first = job.cells[0]
    base = _work(first, out)
    if not first.is_alone and all(_current(cell, out) for cell in job.cells):
        _remove(_folder(job, out).path, out)
    mates = [cell for cell in suite if cell.federation == first.federation and _work(cell, out) == base]
    if base.is_dir() and all(_current(cell, out) for cell in mates):
        with contextlib.suppress(RunError), _folder(job, out, alone=True):  # nobody begins here without this lock
            if not _busy(base):
                _remove(base, out)


def _remove(path: Path, out: Path) -> None:
    """Away with a folder under its name at once: whoever comes next begins in one of its own."""
    gone = out / "work" / f".gone-{os.getpid()}-{path.name}"
    with contextlib.suppress(OSError):  # another process was first, or the system does not move open files
        path.rename(gone)
    for left in gone.parent.glob(".gone-*"):  # also what a kill in the middle of this left
        shutil.rmtree(left, ignore_errors=True)


def _busy(base: Path) -> bool:
    """Whether some process works at a method here, say for another budget."""
    return any(RunFolder(path).held() for path in base.iterdir() if path.is_dir() and path.name != "alone")


def run_in_processes(
    cells: Sequence[Cell],
    out: Path,
    data_dir: Path | None = None,
    *,
    workers: int,
    suite: Sequence[Cell] | None = None,
    progress: Progress | None = None,
    minutes: float | None = None,
    keep_work: bool = False,
) -> Outcome:
    """``run`` in several processes of this machine, which share its GPU; they end with this one, even if it is killed.

    If one dies, say for want of memory, the others make what it leaves.
    """
    make = partial(run, cells, out.resolve(), data_dir, suite=suite, minutes=minutes, keep_work=keep_work)
    outcomes: list[Outcome] = []
    with contextlib.ExitStack() as opened:
        # A pool each: the death of a process breaks all of its pool.
        pools = [ProcessPoolExecutor(1, get_context("spawn"), _end_with_parent) for _ in range(workers)]
        futures = [opened.enter_context(pool).submit(_worker, i, make) for i, pool in enumerate(pools, 1)]
        for future in as_completed(futures):
            try:
                outcomes.append(future.result())
                _tell(outcomes[-1], progress)
            except BrokenProcessPool:
                if progress is not None:
                    progress.say(f"worker {futures.index(future) + 1} died; the others go on")
    if not outcomes:
        raise RunError("workers_died", "all worker processes died, perhaps for want of memory; try fewer --workers")
    return _together(outcomes, cells, out)


def _end_with_parent() -> None:
    """In a worker: end as if killed when the process that started it is gone. Work goes on from its checkpoints."""
    keep_freed_memory()
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    Thread(target=wait, daemon=True).start()


class Numbered(Silent):
    """Says what is made, not every step, and who made it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def say(self, message: str) -> None:
        """One line for the person."""
        print(f"worker {self.number}: {message}", flush=True)


def run_on_ray(
    cells: Sequence[Cell],
    out: Path,
    data_dir: Path | None = None,
    *,
    suite: Sequence[Cell] | None = None,
    progress: Progress | None = None,
    minutes: float | None = None,
    keep_work: bool = False,
) -> Outcome:
    """``run`` in as many Ray workers as there are GPUs, or CPUs; all must see ``out`` and the data under one path."""
    ray = import_ray()
    if not ray.is_initialized():
        ray.init(**QUIET)  # $RAY_ADDRESS: join a cluster
    config = cells[0].config
    gpus = 1 if resolve_device(config.device) == "cuda" else 0
    have = ray.cluster_resources()
    count = int(have.get("GPU", 0)) if gpus else int(have.get("CPU", 1)) // (config.threads or 1)
    task = ray.remote(num_cpus=config.threads or 1, num_gpus=gpus)(_worker)
    make = partial(run, cells, out.resolve(), data_dir, suite=suite, minutes=minutes, keep_work=keep_work)
    waiting = [task.remote(None, make) for _ in range(max(1, count))]
    outcomes: list[Outcome] = []
    for outcome in as_finished(ray, waiting):
        outcomes.append(outcome)
        _tell(outcome, progress)
    return _together(outcomes, cells, out)


def _tell(outcome: Outcome, progress: Progress | None) -> None:
    if progress is not None:
        progress.say(f"a worker ended: {len(outcome.made)} cells made, {len(outcome.failed)} failed")


def _together(outcomes: Sequence[Outcome], cells: Sequence[Cell], out: Path) -> Outcome:
    """What all workers did; a cell that failed for one, or for which it had no time, may have been made by another."""
    made = [key for outcome in outcomes for key in outcome.made]
    failed = {key: error for outcome in outcomes for key, error in outcome.failed.items() if key not in made}
    left = {key for outcome in outcomes for key in outcome.left} - set(failed)
    still = [cell.key for cell in cells if cell.key in left and not _current(cell, out)]
    return Outcome(made, failed, outcomes[0].unavailable, still)


def _worker(number: int | None, make: Callable[..., Outcome]) -> Outcome:
    return make(progress=None if number is None else Numbered(number))
