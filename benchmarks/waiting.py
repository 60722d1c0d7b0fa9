"""What waiting threads cost: `python -m benchmarks.waiting` (two cores, nothing else running; about three minutes).

A training step with two threads, in one process alone and in two at once, for three ways in which a thread may wait;
with `--demo` also `fedbicross demo`, alone and two at once (about fifteen minutes).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fedbicross.runs.environment import versions
from fedbicross.waiting import BRIEFLY, SAID_BY_USER

WAYS: dict[str, dict[str, str]] = {
    "torch's default": {},
    "briefly awake, then asleep (ours)": BRIEFLY,
    "asleep at once": {"OMP_WAIT_POLICY": "PASSIVE"},
}
THREADS, BATCH, SECONDS = 2, 32, 15.0


def train(seconds: float) -> None:
    """In a process of its own: says that it is ready, waits for a line, then takes steps and tells how many."""
    import torch

    from fedbicross import models

    torch.set_num_threads(THREADS)
    rng = torch.Generator().manual_seed(0)
    model = models.build("resnet18", 3, 8, 28)
    images, labels = torch.randn(BATCH, 3, 28, 28, generator=rng), torch.randint(8, (BATCH,), generator=rng)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimiser.step()

    for _ in range(3):
        step()
    print("ready", flush=True)
    sys.stdin.readline()
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        step()
        done += 1
    print((time.perf_counter() - began) / done, flush=True)


def measure(way: dict[str, str], processes: int, seconds: float) -> list[float]:
    """Milliseconds a step, for each of so many processes that train at the same time."""
    environment = {name: value for name, value in os.environ.items() if name not in SAID_BY_USER}
    words = [sys.executable, "-m", "benchmarks.waiting", "--train", str(seconds)]
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(words, env={**environment, **way}, **options) for _ in range(processes)]
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return [1000 * float(process.communicate()[0]) for process in started]


def demos(count: int, folder: Path) -> list[dict[str, Any]]:
    """So many `fedbicross demo` at the same time, as a user starts them: seconds, and the digest of their rows."""
    environment = {name: value for name, value in os.environ.items() if name not in SAID_BY_USER}
    words = [sys.executable, "-c", "from fedbicross.cli import main; main()", "demo", "--out"]
    outs = [folder / f"{count}-{number}" for number in range(count)]
    began, quiet = time.perf_counter(), {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    running = {out: subprocess.Popen([*words, str(out)], env=environment, **quiet) for out in outs}  # type: ignore[call-overload]
    seconds: dict[Path, float] = {}
    while len(seconds) < count:
        for out, process in running.items():
            if out not in seconds and process.poll() is not None:
                assert process.returncode == 0, f"the demo ended with {process.returncode}"
                seconds[out] = time.perf_counter() - began
        time.sleep(0.2)
    digests = [json.loads((out / "results.json").read_text(encoding="utf-8"))["rows_sha256"] for out in outs]
    return [{"seconds": seconds[out], "rows_sha256": digest} for out, digest in zip(outs, digests, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.waiting", description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/waiting.json"))
    parser.add_argument("--demo", action="store_true", help="the demos too")
    parser.add_argument("--train", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        return train(given.train)
    rows = []
    for name, way in WAYS.items():
        alone, at_once = measure(way, 1, given.seconds), measure(way, 2, given.seconds)
        rows.append({"way": name, "environment": way, "alone_ms": alone[0], "at_once_ms": at_once})
        print(json.dumps(rows[-1]), flush=True)
    made = {**versions("cpu"), "threads": THREADS, "cores": len(os.sched_getaffinity(0))}
    stored: dict[str, Any] = {
        "model": "resnet18",
        "batch": BATCH,
        "seconds": given.seconds,
        "rows": rows,
        "versions": made,
    }
    if given.demo:
        with tempfile.TemporaryDirectory() as folder:
            stored["demos"] = {"alone": demos(1, Path(folder)), "at_once": demos(2, Path(folder))}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(stored, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
