"""primum beside training alone and its own teacher: `python -m benchmarks.primum CELL ... --data-dir DIR [--out DIR]`.

A cell is `data/partition/clients/seed`, e.g. `bloodmnist/0.1/5/0` or `dermamnist/iid/5/2`; the partition is `iid` or
the concentration of a Dirichlet partition. Every cell becomes one JSON file, a `results.json` without training curves;
one that exists is not made again. `--minutes` stops before a cell that would begin later than that. Settings were
chosen on the official validation images of Blood alone; see docs/methods/primum.md.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from fedbicross.runs import runner
from fedbicross.runs.config import load_config
from fedbicross.runs.progress import PlainProgress

ROOT = Path(__file__).resolve().parents[1]
METHODS = ["fedavg", "ensemble:class_weighted", "ensemble:consensus", "primum", "primum:student"]
BASELINES = ["majority", "local_only", "local_only:balanced", "ensemble"]


class Quiet(PlainProgress):
    """Says which method runs, not every step."""

    def start(self, label: str, total: int) -> Any:
        """No steps."""
        del label, total
        return lambda done, note: None


def config_of(cell: str, data_dir: Path, methods: list[str], assignments: list[str]) -> Any:
    """The configuration of a cell."""
    data, partition, clients, seed = cell.split("/")
    kind = {"kind": "iid"} if partition == "iid" else {"kind": "dirichlet", "alpha": float(partition)}
    flags = {
        "name": cell.replace("/", "-"),
        "data": {"name": data, "dir": str(data_dir)},
        "model": "resnet18",
        "clients": int(clients),
        "partition": kind,
        "training": {"recipe": "modern", "epochs": 60},
        "methods": methods,
        "baselines": BASELINES,
        "seeds": [int(seed)],
    }
    return load_config(None, flags, assignments)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.primum", description=__doc__)
    parser.add_argument("cells", nargs="+")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--set", dest="assignments", action="append", default=[])
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "primum")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    for cell in given.cells:
        file = given.out / f"{cell.replace('/', '-')}.json"
        if file.exists():
            continue
        if time.monotonic() - began > given.minutes * 60:
            print(f"no time left for {cell}")
            break
        start = time.monotonic()
        results = runner.run(config_of(cell, given.data_dir, given.methods, given.assignments), progress=Quiet())
        results = {**results, "training": {}}
        results["config"]["data"]["dir"] = None  # where the data lay is nobody's business
        file.write_text(json.dumps(results, separators=(",", ":"), sort_keys=True) + "\n", encoding="utf-8")
        print(f"{cell}: {time.monotonic() - start:.0f} s", flush=True)
        for row in results["rows"]:
            accuracy = " ".join(f"{100 * row['accuracy'][name]:6.2f}" for name in ("global", "matched", "label_set"))
            gains = [round(100 * client["gain_over_local"]["matched"], 2) for client in row["clients"]]
            fuse = row["seconds_by_stage"].get("fuse", 0)
            print(f"  {row['method']:24s} {accuracy}  gain by client {gains}  fuse {fuse:.0f} s", flush=True)


if __name__ == "__main__":
    main()
