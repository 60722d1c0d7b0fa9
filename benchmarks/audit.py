"""How long `fedbicross audit upload --quick` takes on this machine: `python -m benchmarks.audit`.

One site of drawn cells of 28 pixels audits its own network, small and large, with the settings of `--quick`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from fedbicross.context import Context, Task
from fedbicross.data.cells import load_cells
from fedbicross.disclosure.audit import audit
from fedbicross.disclosure.effort import effort
from fedbicross.engine.recipe import Training
from fedbicross.messages import Client
from fedbicross.methods import create
from fedbicross.runs.environment import versions

ROOT = Path(__file__).resolve().parents[1]


def seconds(model: str, size: int, images: int, held_out: int, epochs: int, trying: dict[str, Any]) -> float:
    """Of the audit alone; the training of the network that it audits comes before."""
    cells = load_cells(size, 0, images + held_out, 8)
    mine, others = (
        Client("site", cells.train.images[rows], cells.train.labels[rows])
        for rows in (slice(0, images), slice(images, None))
    )
    ctx = Context(Task(tuple(cells.classes), size, 3, model), Training(recipe="modern", epochs=epochs, batch_size=32))
    method = create("primum")
    upload = method.upload(mine, ctx.with_loss(method.loss))
    start = time.monotonic()
    audit(method, upload, mine, others, ctx, effort(quick=True, **trying))
    return time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "privacy" / "audit-time.json")
    parser.add_argument("--models", nargs="+", default=["resnet8", "resnet18"])
    parser.add_argument("--size", type=int, default=28)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--held-out", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=5)
    given = parser.parse_args()
    rows = []
    for model in given.models:
        took = seconds(model, given.size, given.images, given.held_out, given.epochs, {})
        rows.append({"model": model, "seconds": round(took, 1)})
        print(rows[-1], flush=True)
    found = {"rows": rows, "size": given.size, "images": given.images, "held_out": given.held_out}
    found |= {"threads": torch.get_num_threads(), "versions": versions("cpu")}
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
