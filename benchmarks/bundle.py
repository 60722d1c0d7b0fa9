"""``python -m benchmarks.bundle``: how fast a signed ResNet-18 upload is verified, and how much memory that takes.

Speed is one core's, the median of several passes. Memory is the peak of a fresh process over what it had before the
file was read, as a multiple of the file (both verification alone and verification with all tensors in memory).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedbicross import models, seeds
from fedbicross.bundle import UPLOAD, check_signer, inspect, read_file, sign, unpack, validate
from fedbicross.bundle.format import check_digests
from fedbicross.bundle.keys import generate_key, public_text
from fedbicross.context import Task
from fedbicross.messages import Upload

ARCHITECTURE = ("resnet18", 3, 8, 28)


def make(path: Path) -> dict[str, str]:
    """A signed upload in a file; the list of keys allowed."""
    name, channels, classes, size = ARCHITECTURE
    model = models.build(*ARCHITECTURE)
    models.initialise(model, seeds.torch_rng(0, "init"))
    state = {
        name: value + 100 if name.endswith("num_batches_tracked") else value
        for name, value in model.state_dict().items()
    }
    task = Task(tuple(f"class-{c}" for c in range(classes)), size, channels, name)
    key = generate_key()
    path.write_bytes(sign(Upload("site", task, state).pack(), key))
    return {"site": public_text(key)}


def verify(path: Path, allowed: dict[str, str]) -> bytes:
    """What a server does before it trusts a file: one read, header, signature, every digest."""
    data = read_file(path, UPLOAD)
    header = inspect(data, UPLOAD)
    check_signer(header, allowed)
    check_digests(data, header)
    return data


def accept(path: Path, allowed: dict[str, str]) -> Upload:
    """The same, then tensors, and whether they make sense."""
    data = verify(path, allowed)
    upload = Upload.unpack(data)
    validate.check_model_state(upload.tensors, *ARCHITECTURE)
    return upload


def speed(work: Callable[[], object], size: int, passes: int) -> float:
    """Megabytes (10⁶) a second of processor time, median: what one core does, however busy the machine is."""
    work()
    times = []
    for _ in range(passes):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return size / 1e6 / statistics.median(times)


def peak(path: Path, allowed: dict[str, str], stage: str) -> float:
    """Peak resident memory over the start, in files, measured in a process of its own (Linux)."""
    code = "import sys; from benchmarks.bundle import print_peak; print_peak(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(path), json.dumps(allowed), stage]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def print_peak(path: str, allowed: str, stage: str) -> None:
    """In that process: all of it once with a tiny file, so that imports do not count, then the real one."""
    torch.set_num_threads(1)
    key, small = generate_key(), Path(path).with_suffix(".small")
    small.unlink(missing_ok=True)
    small.write_bytes(sign(Upload("a", Task(("a", "b"), 8, 1, "cnn"), {"w": torch.ones(1000)}).pack(), key))
    verify(small, {"a": public_text(key)})
    validate.check_finite(Upload.unpack(small.read_bytes()).tensors)
    validate.model_tensors(*ARCHITECTURE)
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest value so far
    before = resident("VmRSS")
    kept = {"verify": verify, "accept": accept}[stage](Path(path), json.loads(allowed))
    print((resident("VmHWM") - before) / Path(path).stat().st_size)
    del kept


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def measure(passes: int) -> dict[str, Any]:
    """All numbers."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "upload.safetensors"
        allowed = make(path)
        size = path.stat().st_size
        data = path.read_bytes()
        header = inspect(data)
        return {
            "file_bytes": size,
            "verify_mb_per_s": speed(lambda: verify(path, allowed), size, passes),
            "accept_mb_per_s": speed(lambda: accept(path, allowed), size, passes),
            "unpack_mb_per_s": speed(lambda: unpack(data, "upload"), size, passes),
            "digests_mb_per_s": speed(lambda: check_digests(data, header), size, passes),
            "inspect_ms": 1e3 * size / 1e6 / speed(lambda: inspect(data), size, passes),
            "verify_peak_files": peak(path, allowed, "verify"),
            "accept_peak_files": peak(path, allowed, "accept"),
        }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    numbers = measure(options.passes)
    if options.json:
        print(json.dumps(numbers))
        return
    for name, value in numbers.items():
        print(f"{name:20} {value:>14,.2f}" if isinstance(value, float) else f"{name:20} {value:>14,}")


if __name__ == "__main__":
    main()
