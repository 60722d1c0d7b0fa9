"""primum beside training alone and its own teacher: `python -m benchmarks.primum CELL ... --data-dir DIR [--out DIR]`.

A cell is `data/partition/clients/seed`, e.g. `bloodmnist/0.1/5/0` or `dermamnist/iid/5/2`; the partition is `iid` or
the concentration of a Dirichlet partition. Data that is not known by name is a folder of images in DIR whose name ends
in their size, such as `kermany_cxr_224`. Every cell becomes one JSON file, a `results.json` without training curves;
one that exists is not made again. `--minutes` stops before a cell that would begin later than that. With `--logits DIR`
the answers of every network to every image are kept too, so that gates can be tried without a GPU
(`benchmarks/gates.py`). Settings were chosen on validation images of Blood alone; see docs/methods/primum.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedbicross.context import Context, Task
from fedbicross.data import DATASETS
from fedbicross.engine import fast
from fedbicross.engine.device import to_device
from fedbicross.engine.predict import load_model, member_logits
from fedbicross.messages import Reply
from fedbicross.runs import runner
from fedbicross.runs.config import load_config
from fedbicross.runs.progress import PlainProgress
from fedbicross.runs.store import RunFolder

ROOT = Path(__file__).resolve().parents[1]
METHODS = ["fedavg", "ensemble:class_weighted", "ensemble:consensus", "primum", "primum:student"]
BASELINES = ["majority", "local_only", "local_only:balanced", "ensemble"]


class Quiet(PlainProgress):
    """Says which method runs, not every step."""

    def start(self, label: str, total: int) -> Any:
        """No steps."""
        del label, total
        return lambda done, note: None


def config_of(cell: str, data_dir: Path, methods: list[str], baselines: list[str], assignments: list[str]) -> Any:
    """The configuration of a cell."""
    data, partition, clients, seed = cell.split("/")
    source: dict[str, Any] = {"name": data, "dir": str(data_dir)}
    if data not in DATASETS:
        source = {"name": str(data_dir / data), "image_size": int(data.rsplit("_", 1)[1])}
    kind = {"kind": "iid"} if partition == "iid" else {"kind": "dirichlet", "alpha": float(partition)}
    flags = {
        "name": cell.replace("/", "-"),
        "data": source,
        "model": "resnet18",
        "clients": int(clients),
        "partition": kind,
        "training": {"recipe": "modern", "epochs": 60},
        "methods": methods,
        "baselines": baselines,
        "seeds": [int(seed)],
    }
    return load_config(None, flags, assignments)


def keep_logits(config: Any, folder: Path, file: Path) -> None:
    """What each client's two networks and the student say of all clients' images and of the test images, as float16.

    Arrays: ``plain``, ``balanced`` [N, images, C] and ``student`` [images, C], with ``labels``, ``client`` (the owner
    of a training image, -1 for test images), ``held_back`` (for validation), ``own_test`` (the client that a test
    image is dealt to, -1 for nobody) and ``counts`` [N, C].
    """
    prepared = runner.prepare(config)
    (seed, partition), data = next(iter(prepared.partitions.items())), prepared.dataset
    clients, _ = runner.make_clients(data, partition)
    task = Task(tuple(data.classes), data.image_size, data.channels, config.model)
    where = {"device": prepared.device, "precision": prepared.precision, "fast": prepared.fast}
    with RunFolder(folder) as opened:
        ctx = Context(task, config.training, seed=seed, store=opened.store, **where)
        both = [[ctx.with_loss(loss).local_model(c).state for c in clients] for loss in ("cross_entropy", "balanced")]
        reply = Reply.unpack(next(folder.glob("replies/*/primum*/*.safetensors")).read_bytes())
        images = np.concatenate([*[c.images for c in clients], data.test.images])
        held = [np.isin(np.arange(len(c.labels)), ctx.validation_rows(c)) for c in clients]
    networks = [
        load_model(config.model, state, data.channels, len(data.classes), data.image_size)
        for state in (*both[0], *both[1], reply.tensors)
    ]
    networks = [network.to(prepared.device) for network in networks]
    parts = torch.split(to_device(images, prepared.device), 500)
    logits = torch.cat([member_logits(networks, part, "fp32").cpu() for part in parts], dim=1).numpy()
    owner = np.concatenate([np.full(len(c.labels), i) for i, c in enumerate(clients)])
    tests, count = len(data.test.labels), len(clients)
    np.savez_compressed(
        file,
        plain=logits[:count].astype(np.float16),
        balanced=logits[count : 2 * count].astype(np.float16),
        student=logits[-1].astype(np.float16),
        labels=np.concatenate([*[c.labels for c in clients], data.test.labels]),
        client=np.concatenate([owner, np.full(tests, -1)]),
        held_back=np.concatenate([*held, np.zeros(tests, bool)]),
        own_test=np.concatenate([np.full(len(owner), -1), partition.test_owner]),
        counts=np.array([c.class_counts(len(data.classes)) for c in clients]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.primum", description=__doc__)
    parser.add_argument("cells", nargs="+")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--baselines", nargs="+", default=BASELINES)
    parser.add_argument("--set", dest="assignments", action="append", default=[])
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--logits", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "primum")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    fast.WORTH_COMPILING //= len(given.cells)  # what is compiled for one cell serves the next ones
    began = time.monotonic()
    for cell in given.cells:
        file = given.out / f"{cell.replace('/', '-')}.json"
        if file.exists():
            continue
        if time.monotonic() - began > given.minutes * 60:
            print(f"no time left for {cell}")
            break
        start = time.monotonic()
        config = config_of(cell, given.data_dir, given.methods, given.baselines, given.assignments)
        with tempfile.TemporaryDirectory() as folder:
            results = runner.run(config, Path(folder) / "run", progress=Quiet())
            if given.logits:
                given.logits.mkdir(parents=True, exist_ok=True)
                keep_logits(config, Path(folder) / "run", given.logits / f"{file.stem}.npz")
        results = {**results, "training": {}}
        results["config"]["data"].update(name=cell.split("/")[0], dir=None)  # where the data lay is nobody's business
        file.write_text(json.dumps(results, separators=(",", ":"), sort_keys=True) + "\n", encoding="utf-8")
        print(f"{cell}: {time.monotonic() - start:.0f} s", flush=True)
        for row in results["rows"]:
            accuracy = " ".join(f"{100 * row['accuracy'][name]:6.2f}" for name in ("global", "matched", "label_set"))
            gains = [round(100 * client["gain_over_local"]["matched"], 2) for client in row["clients"]]
            fuse = row["seconds_by_stage"].get("fuse", 0)
            print(f"  {row['method']:24s} {accuracy}  gain by client {gains}  fuse {fuse:.0f} s", flush=True)


if __name__ == "__main__":
    main()
