"""Runs of the papers' settings on a GPU: `python -m benchmarks.papers CONFIG.toml [--case NAME ...] --out DIR`.

Each case of the file, or each that is named, is a run of `fedbicross run`. It is kept under --models so that a call
which was stopped goes on at the next one, and so that runs share client models and features. Results are stored without
weights, and beside them NAME.csv: when which stage had made how many steps, from which the time of a longer run can be
told. `--as-recommended` makes a second run of each, named NAME-repeated, in which every FedBiCross row has the number
of trajectories that the diagnosis of the first recommends.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedbicross.report.tables import markdown
from fedbicross.runs import runner
from fedbicross.runs.config import RunConfig, cases, load_config
from fedbicross.runs.progress import SECONDS_BETWEEN_LINES, PlainProgress
from fedbicross.runs.store import DiskStore
from fedbicross.settings import as_toml


class Stamped(PlainProgress):
    """Progress that is also kept in a file: call, seconds since it began, stage, steps done, steps in all."""

    def __init__(self, file: Path) -> None:
        self.file, self.began = file, time.perf_counter()
        before = list(csv.DictReader(file.open(encoding="utf-8", newline=""))) if file.exists() else []
        self.call = int(before[-1]["call"]) + 1 if before else 1
        if not before:
            file.write_text("call,seconds,stage,done,total\n", encoding="utf-8")

    def start(self, label: str, total: int) -> Callable[[int, str], None]:
        """Begin a piece of work."""
        shown, last = super().start(label, total), -math.inf

        def update(done: int, note: str) -> None:
            nonlocal last
            shown(done, note)
            now = time.perf_counter() - self.began
            if done >= total or now - last >= SECONDS_BETWEEN_LINES:
                last = now
                with self.file.open("a", encoding="utf-8", newline="") as out:
                    csv.writer(out).writerow([self.call, f"{now:.1f}", label, done, total])

        return update


def run(name: str, config: RunConfig, models: Path, out: Path) -> dict[str, Any]:
    folder = models / name
    store = DiskStore(folder)
    text = as_toml(config).encode()
    if not (folder / "config.toml").exists() or (folder / "config.toml").read_bytes() != text:
        shutil.rmtree(folder, ignore_errors=True)
        store.write("partition.json", runner.prepare(config).partition_text.encode())
        store.write("config.toml", text)
        for shared in ("client_models", "features"):
            (models / shared).mkdir(exist_ok=True)
            (folder / shared).symlink_to(models / shared)
    for shared in ("client_models", "features"):  # what other runs wrote there is as good as this run's own
        for path in sorted((models / shared).iterdir()):
            store.sums.note(f"{shared}/{path.name}", hashlib.sha256(path.read_bytes()).hexdigest())
    out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    try:
        results = runner.resume(folder, progress=Stamped(out / f"{name}.csv"))
    finally:  # the rows that were finished are worth having, whatever stopped the rest
        found = folder / "results.json"
        if found.exists():
            stored = json.loads(found.read_text())
            stored["config"]["data"]["dir"] = None  # where the data lay on this machine is nobody's business
            (out / f"{name}.json").write_text(json.dumps(stored, separators=(",", ":")))
    for number, picture in enumerate(sorted((folder / "diagnosis").rglob("*.png"))[:2]):
        shutil.copy(picture, out / f"{name}-{number}.png")
    print(f"{name}: {time.perf_counter() - began:.0f} s", markdown(results), sep="\n", flush=True)
    for row in results["rows"]:
        print(row["method"], row["seconds_by_stage"])
    return results


def recommended(config: RunConfig, results: dict[str, Any]) -> RunConfig:
    """The same FedBiCross rows with the number of trajectories that their own diagnosis asks for."""
    table = dict(config.method)
    for row in results["rows"]:
        wanted = row["diagnosis"].get("scalars", {}).get("recommended trajectories")
        if wanted is not None:
            table[row["method"]] = {**table.get(row["method"], {}), "trajectories": wanted}
            print(f"{row['method']}: {wanted} trajectories", flush=True)
    methods = [spec for spec in config.methods if spec in table]
    return config.model_copy(update={"method": table, "methods": methods, "name": f"{config.name}-repeated"})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--case", dest="cases", action="append", help="default: all of the file")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=Path("runs/papers"))
    parser.add_argument("--set", dest="assignments", action="append", default=[])
    parser.add_argument("--as-recommended", action="store_true")
    given = parser.parse_args()
    for case in given.cases or cases(given.file) or [None]:  # a file without cases is one run
        config = load_config(given.file, assignments=given.assignments, case=case)
        name = case or given.file.stem
        results = run(name, config, given.models.resolve(), given.out)
        if given.as_recommended:
            run(f"{name}-repeated", recommended(config, results), given.models.resolve(), given.out)


if __name__ == "__main__":
    main()
