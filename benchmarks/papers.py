"""Runs of the papers' settings on a GPU: `python -m benchmarks.papers CONFIG.toml ... --out DIR`.

Each file is a run of `fedbicross run`; the client models are trained first, several at once in processes of their own,
because one small network alone leaves a large GPU mostly idle. Results are stored without weights.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import time
from pathlib import Path

from fedbicross.context import Context, Task
from fedbicross.report.tables import markdown
from fedbicross.runs import runner
from fedbicross.runs.config import RunConfig, load_config
from fedbicross.runs.progress import PlainProgress
from fedbicross.runs.store import DiskStore


def contexts(config: RunConfig, seed: int, folder: Path) -> tuple[runner.Prepared, Context]:
    prepared = runner.prepare(config)
    data = prepared.dataset
    task = Task(tuple(data.classes), data.image_size, data.channels, config.model)
    store = DiskStore(folder)
    values = {"seed": seed, "device": prepared.device, "precision": prepared.precision, "store": store}
    return prepared, Context(task, config.training, **values)


def train_one(file: str, assignments: list[str], seed: int, index: int, folder: str) -> None:
    prepared, ctx = contexts(load_config(Path(file), assignments=assignments), seed, Path(folder))
    clients, _ = runner.make_clients(prepared.dataset, prepared.partitions[seed])
    ctx.local_model(clients[index])


def run(file: Path, assignments: list[str], models: Path, out: Path, workers: int) -> None:
    config = load_config(file, assignments=assignments)
    work = models / f"run-{file.stem}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    shared = models / "client_models"
    shared.mkdir(exist_ok=True)
    (work / "client_models").symlink_to(shared)
    began = time.perf_counter()
    jobs = [(str(file), assignments, seed, i, str(work)) for seed in config.seeds for i in range(config.clients)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.starmap(train_one, jobs)
    print(f"{file.stem}: clients trained in {time.perf_counter() - began:.0f} s", flush=True)
    final = models / f"final-{file.stem}"
    shutil.rmtree(final, ignore_errors=True)
    prepared = runner.prepare(config)
    from fedbicross.runs.config import as_toml
    from fedbicross.runs.store import write_atomic

    write_atomic(final / "partition.json", prepared.partition_text.encode())
    write_atomic(final / "config.toml", as_toml(config).encode())
    (final / "client_models").symlink_to(shared)
    out.mkdir(parents=True, exist_ok=True)
    try:
        results = runner.resume(final, progress=PlainProgress())
    finally:  # the rows that were finished are worth having, whatever stopped the rest
        shutil.copy(final / "results.json", out / f"{file.stem}.json")
    for number, picture in enumerate(sorted((final / "diagnosis").rglob("*.png"))[:3]):
        shutil.copy(picture, out / f"{file.stem}-{number}.png")
    print(markdown(results), flush=True)
    for row in results["rows"]:
        print(row["method"], row["seconds_by_stage"], row["diagnosis"].get("scalars", {}))
        print("   ", *row["warnings"], sep="\n    ")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=Path(".gpu-models"))
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--set", dest="assignments", action="append", default=[])
    given = parser.parse_args()
    given.models.mkdir(exist_ok=True)
    for file in given.files:
        run(file, given.assignments, given.models.resolve(), given.out, given.workers)


if __name__ == "__main__":
    main()
