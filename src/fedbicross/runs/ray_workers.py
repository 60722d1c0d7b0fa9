"""A run as jobs, one for each seed and method, that Ray's workers or this process carry out.

Each job is a small run in a folder of its own under ``<out>.parts``; at the end their files are put together and the
ordinary ``resume`` makes the results from them. So the engine cannot change a result, and a killed run goes on where
it stopped. Training alone comes first in every seed, in all of its ways at once: its networks are those that all other
methods of that seed share, and the best of them is what they are measured against.

With Ray the jobs run wherever its workers are. All of them must see the run's folder and the data under the same path,
as on one machine or a shared disk.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedbicross import sums
from fedbicross.atomic import TEMPORARY, write_atomic
from fedbicross.context import Progress, Silent
from fedbicross.engine.device import resolve_device
from fedbicross.engine.workers import QUIET, as_finished, import_ray
from fedbicross.errors import ConfigError
from fedbicross.evaluate.summary import local_baselines
from fedbicross.runs import runner
from fedbicross.runs.config import RunConfig
from fedbicross.runs.store import DiskStore
from fedbicross.settings import as_toml

Engine = Literal["local", "ray"]
_NOT_COPIED = {"config.toml", "partition.json", "results.json", "events.jsonl", ".lock", sums.NAME}


@dataclass(frozen=True)
class Job:
    """One piece of work: some methods of one seed, beginning with the files of an earlier job."""

    config: RunConfig
    folder: str
    begins_with: str | None = None

    def work(self) -> str:
        """Run it, or the rest of it, and return its folder."""
        folder = Path(self.folder)
        _begin(folder, self.config, [Path(self.begins_with)] if self.begins_with else [])
        runner.resume(folder)
        return self.folder


def run(config: RunConfig, out: Path, engine: Engine = "local", progress: Progress | None = None) -> dict[str, Any]:
    """The results of ``runner.run``, with the jobs carried out by ``engine``."""
    progress = progress or Silent()
    if config.data.name.startswith("python:"):
        raise ConfigError("engine", "a run on arrays from Python cannot be spread; save them as an .npz file first")
    runner.check_place(out, replace=False)
    run_jobs = _local if engine == "local" else _ray(config)
    parts = out.with_name(f"{out.name}.parts")
    first, then = jobs(config, parts)
    update = progress.start(f"cells ({engine})", len(first) + len(then))
    finished: list[str] = []
    for group in (first, then):
        for folder in run_jobs(group):
            finished.append(folder)
            update(len(finished), Path(folder).name)
    _begin(out, config, [Path(folder) for folder in sorted(finished)])
    results = runner.resume(out, progress=progress)
    shutil.rmtree(parts, ignore_errors=True)
    return results


def jobs(config: RunConfig, parts: Path) -> tuple[list[Job], list[Job]]:
    """The jobs that can start at once, and those that need the results of the first."""
    specs = config.all_methods()
    local = local_baselines(specs)
    if not local:  # nothing that methods could share: a job is a whole seed
        return [Job(_only(config, seed, specs), str(parts / f"seed-{seed}")) for seed in config.seeds], []
    first, then = [], []
    for seed in config.seeds:
        alone = Job(_only(config, seed, local), str(parts / f"seed-{seed}.alone"))
        first.append(alone)
        for spec in specs:
            if spec not in local:
                folder = parts / f"seed-{seed}.{spec.replace(':', '+')}"
                then.append(Job(_only(config, seed, [*local, spec]), str(folder), alone.folder))
    return first, then


def _only(config: RunConfig, seed: int, specs: Sequence[str]) -> RunConfig:
    """The same run with one seed and these methods."""
    known = {spec.partition(":")[0] for spec in specs} | set(specs)
    method = {name: table for name, table in config.method.items() if name in known}
    return config.model_copy(update={"seeds": [seed], "baselines": [], "methods": list(specs), "method": method})


def _begin(folder: Path, config: RunConfig, sources: Sequence[Path]) -> None:
    """A run's folder with the finished files of other runs; config.toml is written last, as it marks a run."""
    if (folder / "config.toml").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    store = DiskStore(folder)
    events = []
    for source in sources:
        done = DiskStore(source)
        for path in sorted(source.rglob("*")):
            name = path.relative_to(source)
            wanted = path.is_file() and name.parts[0] not in (*_NOT_COPIED, "objects")
            if wanted and not path.name.startswith(TEMPORARY):
                store.save(name.as_posix(), done.load(name.as_posix()) or b"")
        log = source / "events.jsonl"
        events.append(log.read_bytes() if log.is_file() else b"")
    write_atomic(folder / "events.jsonl", b"".join(events))
    store.write("partition.json", runner.prepare(config).partition_text.encode())
    store.write("config.toml", as_toml(config).encode())


RunJobs = Callable[[Sequence[Job]], Iterator[str]]


def _local(group: Sequence[Job]) -> Iterator[str]:
    for job in group:
        yield job.work()


def _ray(config: RunConfig) -> RunJobs:
    """Each job as a Ray task, on one GPU where the run wants one."""
    ray = import_ray()
    if not ray.is_initialized():
        ray.init(**QUIET)  # $RAY_ADDRESS: join a cluster
    gpus = 1 if resolve_device(config.device) == "cuda" else 0
    task = ray.remote(num_cpus=config.threads or 1, num_gpus=gpus)(_work)

    return lambda group: as_finished(ray, [task.remote(job) for job in group])


def _work(job: Job) -> str:
    return job.work()
