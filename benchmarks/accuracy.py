"""Whole methods on both paths: `python -m benchmarks.accuracy [CONFIG.toml] --set data.dir=DIR [--out FILE]`.

For every seed the run of the file is made three times, client training included: on the plain path in fp32, on the same
with one thread, and on the fast path in bf16. One thread adds up in another order, and shows how far apart two runs of
the same arithmetic end. Without a GPU the fast path is not recorded or compiled, and kernels of a GPU give way to their
formulas; folding, bf16 and everything else are as on one. What is done is kept: a second call makes what is missing.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from fedbicross.runs import runner
from fedbicross.runs.config import load_config
from fedbicross.runs.environment import versions
from fedbicross.runs.progress import PlainProgress

ROOT = Path(__file__).resolve().parents[1]
PLAIN, AGAIN, FAST = "plain fp32", "plain fp32, one thread", "fast bf16"


def measure(prepared: runner.Prepared, seed: int, way: str) -> list[dict[str, Any]]:
    """Accuracies of every method with this seed."""
    threads = 1 if way == AGAIN else prepared.config.threads
    config = prepared.config.model_copy(update={"seeds": [seed], "threads": threads})
    precision = "bf16" if way == FAST else "fp32"
    chosen = replace(prepared, config=config, precision=precision, fast=way == FAST)
    rows = runner.run_prepared(chosen, None, PlainProgress())["rows"]
    for row in rows:
        print(way, seed, row["method"], {name: round(value, 4) for name, value in row["accuracy"].items()}, flush=True)
    return [{"way": way, "seed": seed, "method": row["method"], "accuracy": row["accuracy"]} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=ROOT / "configs" / "both-paths.toml")
    parser.add_argument("--set", dest="assignments", action="append", default=[])
    parser.add_argument("--ways", nargs="+", default=[PLAIN, AGAIN, FAST], choices=[PLAIN, AGAIN, FAST])
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "benchmarks" / "accuracy.json")
    given = parser.parse_args()
    prepared = runner.prepare(load_config(given.file, assignments=given.assignments))
    config = prepared.config.model_dump(mode="json")
    config["data"]["dir"] = None  # where the data lay on this machine is nobody's business
    seeds = config.pop("seeds")  # more of them may be added later
    made: dict[str, Any] = {"config": config, "rows": [], "versions": versions(prepared.device)}
    if given.out.exists():
        before = json.loads(given.out.read_text(encoding="utf-8"))
        if before["config"] == config:
            made["rows"] = before["rows"]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for seed, way in product(seeds, given.ways):
        if (seed, way) not in {(row["seed"], row["way"]) for row in made["rows"]}:
            made["rows"] += measure(prepared, seed, way)
            given.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(f"stored in {given.out}")


if __name__ == "__main__":
    main()
