"""Plain path against fast path on one GPU, in one run: `python -m benchmarks.gpu [--out FILE]`.

Five ResNet-18 clients, batch 256, 28x28x3 unless said. Times are medians over replays between CUDA events; the table
gives ratios first, because machines differ. The arithmetic floor counts forward passes at the measured bf16 rate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedbicross import models
from fedbicross.engine.ensemble import Ensemble
from fedbicross.engine.student import Student
from fedbicross.methods.synthesis import SynthesisConfig
from fedbicross.runs.environment import versions
from fedbicross.steps.inversion import Inversion, InversionSettings, balanced_labels
from fedbicross.steps.trajectory import Sample, Teacher

BATCH, CLASSES, SHAPE = 256, 8, (3, 28, 28)


def milliseconds(step: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def networks(count: int) -> list[torch.nn.Module]:
    out = []
    for number in range(count):
        model = models.build("resnet18", SHAPE[0], CLASSES, SHAPE[1])
        models.initialise(model, torch.Generator().manual_seed(number))
        out.append(model.cuda())
    return out


def matrix_rate() -> float:
    """bf16 FLOP per second of a large matrix product on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    a @ b
    return 2 * 8192**3 / (milliseconds(lambda: a @ b, 20) / 1e3)


def make(count: int, precision: str, fast: bool) -> dict[str, Callable[[], Any]]:
    ensemble = Ensemble(networks(count), precision, fast)
    rng = torch.Generator("cuda").manual_seed(0)
    settings = InversionSettings(batch=BATCH, steps=2000)
    inversion = Inversion.start(ensemble, balanced_labels(BATCH, CLASSES), SHAPE, settings, rng)
    teacher = Teacher(ensemble)
    student = Student(networks(1)[0], "cuda", precision, fast)
    config = SynthesisConfig()
    x = torch.randn((BATCH, *SHAPE), device="cuda", generator=rng)
    original, adapted, lam = teacher.speak(x, 0.5)
    sample = Sample(1, x, original, adapted, lam, None)
    return {
        "inversion step": inversion.step,
        "both teachers": lambda: teacher.speak(x, 0.5),
        "student step": lambda: config.learn(student, sample, 1e-3),
    }


def agreement(count: int) -> dict[str, float]:
    """Relative difference of the fast path from the plain one on the same inputs."""
    plain, fast = Ensemble(networks(count), "fp32"), Ensemble(networks(count), "bf16", fast=True)
    x = torch.randn((BATCH, *SHAPE), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    out = {}
    with torch.no_grad():
        for name in ("logits", "batch_logits"):
            a, b = getattr(plain, name)(x), getattr(fast, name)(x)
            out[name] = float((a - b).norm() / a.norm())
    gradients = []
    for ensemble in (plain, fast):
        leaf = x.clone().requires_grad_(True)
        logits, loss = ensemble.logits_and_bn_loss(leaf)
        total = (
            torch.nn.functional.cross_entropy(logits.mean(0), balanced_labels(BATCH, CLASSES, "cuda"))
            + 10 * loss.mean()
        )
        gradients.append(torch.autograd.grad(total, leaf)[0])
    out["input gradient"] = float((gradients[0] - gradients[1]).norm() / gradients[0].norm())
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/gpu.json"))
    parser.add_argument("--clients", type=int, default=5)
    given = parser.parse_args()
    rate = matrix_rate()
    forward = models.forward_flops("resnet18", SHAPE[0], CLASSES, SHAPE[1]) * BATCH
    floors = {
        "inversion step": 2 * given.clients * forward / rate * 1e3,
        "both teachers": 2 * given.clients * forward / rate * 1e3,
        "student step": 3 * forward / rate * 1e3,
    }
    paths = {"eager fp32": ("fp32", False), "eager bf16": ("bf16", False), "fast bf16": ("bf16", True)}
    table: dict[str, dict[str, float]] = {}
    for name, (precision, fast) in paths.items():
        began = time.perf_counter()
        for part, step in make(given.clients, precision, fast).items():
            for _ in range(3):
                step()
            torch.cuda.synchronize()
            warm = time.perf_counter() - began
            torch.cuda.reset_peak_memory_stats()
            entry = table.setdefault(part, {})
            entry[name] = milliseconds(step, 30 if not fast else 100)
            entry[f"{name}: first calls, s"] = warm
            entry[f"{name}: peak GB"] = torch.cuda.max_memory_allocated() / 1e9
            began = time.perf_counter()
    result = {"table": table, "floors_ms": floors, "bf16_tflops": rate / 1e12, "agreement": agreement(given.clients)}
    result["versions"] = versions("cuda")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1))
    print(f"bf16 matrix rate {rate / 1e12:.0f} TFLOP/s; agreement {result['agreement']}")
    for part, row in table.items():
        ratio = row["eager fp32"] / row["fast bf16"]
        times = "  ".join(f"{path} {row[path]:.2f} ms" for path in paths)
        first = row["fast bf16: first calls, s"]
        print(f"{part:16s} {ratio:5.1f}x  {times}  floor {floors[part]:.2f} ms  compile and record {first:.1f} s")


if __name__ == "__main__":
    main()
