"""``make bench``: how fast the product is on this machine's processor, in a few minutes.

Prints a table and stores every number with the versions behind it in ``results/benchmarks/cpu.json``.
``python -m benchmarks.cpu --seconds 0.05 --out try.json`` is a quick try that leaves the stored file alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from fedbicross import models, seeds
from fedbicross.bundle import pack, unpack
from fedbicross.context import Task
from fedbicross.messages import Predictor
from fedbicross.runs.environment import versions
from fedbicross.runs.store import DiskStore

ROOT = Path(__file__).parents[1]
SHAPE = (3, 8, 28)  # channels, classes, pixels: BloodMNIST and cells
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
Entry = dict[str, Any]


def rate(work: Callable[[], object], amount: float, seconds: float) -> float:
    """Amount a second: the median over calls that together last about ``seconds``, after one to warm up."""
    work()
    times: list[float] = []
    while sum(times) < seconds or len(times) < 3:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return amount / statistics.median(times)


def shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def entry(group: str, what: str, value: float, unit: str) -> Entry:
    print(f"{group:<12} {what:<44} {shown(value):>12} {unit}", flush=True)
    return {"group": group, "what": what, "value": value, "unit": unit}


def start_up(repeats: int) -> Iterator[Entry]:
    """Whole processes, since that is what a person waits for."""
    run = [sys.executable, "-c", "from fedbicross.cli import main; main()"]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "run.toml"
        config.write_text('model = "resnet8"\nmethods = ["fedavg"]\n', encoding="utf-8")
        commands = {
            "python with nothing": [sys.executable, "-c", "pass"],
            "import fedbicross": [sys.executable, "-c", "import fedbicross"],
            "fedbicross --help": [*run, "--help"],
            "fedbicross validate": [*run, "validate", str(config)],
            "fedbicross list methods": [*run, "list", "methods"],
            "import torch": [sys.executable, "-c", "import torch"],
        }
        for what, command in commands.items():
            times = []
            for _ in range(repeats):
                began = time.perf_counter()
                subprocess.run(command, check=True, capture_output=True, cwd=folder)
                times.append(time.perf_counter() - began)
            yield entry("start-up", what, min(times), "s")


def training(seconds: float) -> Iterator[Entry]:
    """Forward, backward and optimiser step of ResNet-8."""
    for layout, memory_format in LAYOUTS.items():
        for batch in (16, 32, 128, 512):
            rng = seeds.torch_rng(0, "benchmark")
            model = models.build("resnet8", *SHAPE)
            models.initialise(model, rng)
            model = model.to(memory_format=memory_format).train()
            optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            images = torch.rand((batch, SHAPE[0], SHAPE[2], SHAPE[2]), generator=rng)
            images = images.contiguous(memory_format=memory_format)
            labels = torch.randint(SHAPE[1], (batch,), generator=rng)

            def step(model: Any = model, optimiser: Any = optimiser, x: Any = images, y: Any = labels) -> None:
                optimiser.zero_grad(set_to_none=True)
                F.cross_entropy(model(x), y).backward()
                optimiser.step()

            yield entry("training", f"resnet8, batch {batch}, {layout}", rate(step, batch, seconds), "images/s")


def prediction(seconds: float) -> Iterator[Entry]:
    """What a hospital does with its final model, loading of the weights included."""
    import numpy as np

    task = Task(tuple(map(str, range(SHAPE[1]))), SHAPE[2], SHAPE[0], "resnet8")
    for name, count, members in (("resnet8", 1000, 1), ("resnet8", 1000, 5), ("resnet18", 250, 1)):
        model = models.build(name, *SHAPE)
        models.initialise(model, seeds.torch_rng(0, "benchmark"))
        predictor = Predictor(task, (name,) * members, (model.state_dict(),) * members)
        images = np.zeros((count, SHAPE[2], SHAPE[2], SHAPE[0]), np.uint8)
        what = f"{name}, {members} network{'s' if members > 1 else ''}"
        value = rate(lambda p=predictor, x=images: p.probabilities(x), count, seconds)  # type: ignore[misc]
        yield entry("prediction", what, value, "images/s")


def storage(seconds: float) -> Iterator[Entry]:
    """The run folder's store, with its fsync, and the bundle that travels."""
    model = models.build("resnet18", *SHAPE)
    models.initialise(model, seeds.torch_rng(0, "benchmark"))
    state = model.state_dict()
    data = pack("benchmark", state, {})
    size = len(data) / 1e6
    yield entry("bundle", "resnet18 state", size, "MB")
    yield entry("bundle", "pack", rate(lambda: pack("benchmark", state, {}), size, seconds), "MB/s")
    yield entry("bundle", "unpack and verify", rate(lambda: unpack(data, "benchmark"), size, seconds), "MB/s")
    with tempfile.TemporaryDirectory() as folder:
        store = DiskStore(Path(folder))
        fresh, number = bytearray(data), iter(range(10**9))

        def write() -> None:  # new content every time: equal bytes would only be linked
            fresh[-8:] = next(number).to_bytes(8, "big")
            store.save("upload", fresh)  # type: ignore[arg-type]

        yield entry("store", "write new bytes", rate(write, size, seconds), "MB/s")
        yield entry("store", "write known bytes", rate(lambda: store.save("again", data), size, seconds), "MB/s")
        yield entry("store", "read from the cache", rate(lambda: store.load("upload"), size, seconds), "MB/s")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="about how long each measurement lasts")
    parser.add_argument("--repeats", type=int, default=5, help="processes started for each start-up time")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "benchmarks" / "cpu.json")
    arguments = parser.parse_args()
    entries = list(start_up(arguments.repeats))
    for group in (training, prediction, storage):
        entries += group(arguments.seconds)
    made = {"schema": 1, "entries": entries, "versions": {**versions("cpu"), "cores": os.cpu_count()}}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(f"stored in {arguments.out}")


if __name__ == "__main__":
    main()
