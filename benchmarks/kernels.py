"""How far the same run ends elsewhere on another processor: `python -m benchmarks.kernels [--out FILE]`.

A processor can be told to leave its newer instructions alone. Each set of kernels adds up in another order, as does
another number of threads: this stands for other processors, of which only one is at hand. The demo's run, smaller, is
made under each setting in a process of its own. What is done is kept: a second call makes what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import fedbicross

ROOT = Path(__file__).resolve().parents[1]
RUN: dict[str, Any] = {
    "methods": ["fedavg", "ensemble:consensus", "primum"],
    "baselines": ["local_only", "ensemble", "centralised"],
    "method": {"primum": {"pool": 10, "steps_distil": 400}},
    "model": "resnet8",
    "clients": 5,
    "partition": {"kind": "dirichlet", "alpha": 0.3},
    "data": {"train_size": 1500, "test_size": 1000},
    "training": {"recipe": "modern", "epochs": 8, "batch_size": 32},
    "device": "cpu",
}
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
SSE = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
SETTINGS: dict[str, tuple[dict[str, str], int]] = {  # environment and threads; differences are to the first
    "as it is, two threads": ({}, 2),
    "as it is, two threads, again": ({}, 2),
    "as it is, one thread": ({}, 1),
    "avx2, two threads": (AVX2, 2),
    "no avx, two threads": (SSE, 2),
}


def measure(threads: int, seed: int) -> dict[str, Any]:
    """In the process with the setting: the run, and what it ran on."""
    found = fedbicross.run("cells", **RUN, quick=True, threads=threads, seeds=[seed], progress=False)
    rows = [{"method": row["method"], "accuracy": row["accuracy"]} for row in found["rows"]]
    return {"rows": rows, "rows_sha256": found["rows_sha256"], "versions": found["versions"]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "benchmarks" / "kernels.json")
    parser.add_argument("--measure", type=int, nargs=2, metavar=("THREADS", "SEED"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(*given.measure)))
        return
    made = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {"config": RUN, "runs": []}
    if made["config"] != RUN:
        made = {"config": RUN, "runs": []}
    for seed, (name, (environment, threads)) in product(given.seeds, SETTINGS.items()):
        if (name, seed) in {(run["setting"], run["seed"]) for run in made["runs"]}:
            continue
        words = [sys.executable, "-m", "benchmarks.kernels", "--measure", str(threads), str(seed)]
        done = subprocess.run(words, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout)
        made["versions"] = made.get("versions", found["versions"])
        made["runs"].append({"setting": name, "seed": seed, "environment": environment, **found})
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(made, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        print(name, seed, found["versions"]["cpu_capability"], found["rows_sha256"][:12], flush=True)


if __name__ == "__main__":
    main()
