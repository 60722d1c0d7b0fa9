"""Plain path against fast path on one GPU, in one run: `python -m benchmarks.gpu [--out FILE] [--data-dir DIR]`.

Five ResNet-18 clients, batch 256, 28x28x3 unless said. Times are medians between CUDA events; ratios come first,
because machines differ. "as released" is the reference of the papers' code: eager fp32, gradients also to the frozen
weights, hooks that copy every activation. The arithmetic floor counts forward passes at the measured bf16 rate.
Whole methods are timed by `benchmarks.papers`. Stored with versions; `docs/performance.md` is made from the file.
`--parts` measures some of it anew and leaves the rest of the file as it is.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbicross import models
from fedbicross.engine import fast as fast_path
from fedbicross.engine.device import set_precision
from fedbicross.engine.ensemble import Ensemble
from fedbicross.engine.recipe import Training
from fedbicross.engine.student import Student
from fedbicross.engine.train import train_together, training
from fedbicross.parts.settings import SynthesisConfig
from fedbicross.parts.students import learn
from fedbicross.runs.environment import versions
from fedbicross.steps.bilevel import CrossCluster, split_batch
from fedbicross.steps.inversion import (
    Inversion,
    InversionSettings,
    balanced_labels,
    clients_that_fit,
    total_variation,
)
from fedbicross.steps.trajectory import Sample, Teacher

BATCH, CLASSES, SHAPE = 256, 8, (3, 28, 28)


class Way(NamedTuple):
    """How a step is made: in which precision, recorded as a graph or not, its passes compiled or not."""

    precision: str
    fast: bool = False
    compile: bool = False

    def ensemble(self, models: Sequence[nn.Module]) -> Ensemble:
        made = Ensemble(models, self.precision, self.fast)
        made.compile = made.compile if self.compile else ()
        return made

    def student(self, model: nn.Module) -> Student:
        return Student(model, "cuda", self.precision, self.fast, fast_path.WORTH_COMPILING if self.compile else 0)


FAST = Way("bf16", fast=True, compile=True)
WAYS = {
    "plain fp32": Way("fp32"),
    "plain bf16": Way("bf16"),
    "recorded bf16": Way("bf16", fast=True),
    "fast bf16": FAST,
}


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


def measure(step: Callable[[], object], repeats: int) -> dict[str, float]:
    """Time to the first result (compilation and recording), time of a step, and peak memory."""
    began = time.perf_counter()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    torch.cuda.reset_peak_memory_stats()
    ms = milliseconds(step, repeats)
    return {"ms": ms, "first_s": first, "peak_gb": torch.cuda.max_memory_reserved() / 1e9}


def clear() -> None:
    """Recorded steps hold their memory until they are collected."""
    gc.collect()
    torch.cuda.empty_cache()


def networks(count: int, size: int = 28) -> list[nn.Module]:
    out = []
    for number in range(count):
        model = models.build("resnet18", SHAPE[0], CLASSES, size)
        models.initialise(model, torch.Generator().manual_seed(number))
        out.append(model.cuda())
    return out


def matrix_rate() -> float:
    """bf16 FLOP per second of a large matrix product on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    a @ b
    return 2 * 8192**3 / (milliseconds(lambda: a @ b, 20) / 1e3)


# --- the steps ---------------------------------------------------------------------------------------------------


def start_inversion(count: int, way: Way, batch: int = BATCH, size: int = 28, at_once: int | None = None) -> Inversion:
    ensemble = way.ensemble(networks(count, size))
    ensemble.at_once = at_once
    rng = torch.Generator("cuda").manual_seed(0)
    settings = InversionSettings(batch=batch, steps=2000)
    return Inversion.start(ensemble, balanced_labels(batch, CLASSES), (SHAPE[0], size, size), settings, rng)


def inversion(count: int, way: Way, batch: int = BATCH, size: int = 28) -> Callable[[], object]:
    return start_inversion(count, way, batch, size).step


def inversion_as_released(count: int) -> Callable[[], object]:
    """The reference of the papers' code, written anew: what its costs come from is kept, nothing else."""
    clients, seen = networks(count), list[Tensor]()

    def hook(layer: nn.BatchNorm2d, inputs: tuple[Tensor], _: Tensor) -> None:
        x = inputs[0]
        flat = x.permute(1, 0, 2, 3).contiguous().view(x.shape[1], -1)
        var, mean = flat.var(1, unbiased=False), x.mean((0, 2, 3))
        seen.append(torch.norm(layer.running_var - var, 2) + torch.norm(layer.running_mean - mean, 2))

    for client in clients:
        client.eval()  # the weights still ask for gradients
        for layer in client.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.register_forward_hook(hook)
    x = torch.randn((BATCH, *SHAPE), device="cuda", requires_grad=True)
    labels = balanced_labels(BATCH, CLASSES, "cuda")
    optimiser = torch.optim.Adam([x], lr=5e-2)

    def step() -> None:
        seen.clear()
        optimiser.zero_grad()
        for client in clients:
            client.zero_grad()
        shifted = torch.roll(x, (1, -1), (2, 3))
        logits = torch.stack([client(shifted) for client in clients]).mean(0)
        loss = F.cross_entropy(logits, labels) + 10 * sum(seen) + 2.5e-5 * total_variation(shifted)
        loss.backward()
        optimiser.step()
        loss.item()

    return step


def teachers(count: int, way: Way, batches: int = 1) -> Callable[[], object]:
    teacher = Teacher(way.ensemble(networks(count)))
    x = torch.randn((BATCH, *SHAPE), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    if batches == 1:
        return lambda: teacher.soft_labels(x, 0.5)
    return lambda: teacher.soft_labels_of_batches([x] * batches, [0.5] * batches)


def soft(seed: int) -> Tensor:
    return torch.randn((BATCH, CLASSES), device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).softmax(-1)


def sample(seed: int) -> Sample:
    x = torch.randn((BATCH, *SHAPE), device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
    return Sample(1, x, soft(seed), soft(seed + 100), 0.5, None)


def student(way: Way, given: Sample | None = None) -> Callable[[], object]:
    learner, config = way.student(networks(1)[0]), SynthesisConfig()
    lesson = given or sample(0)
    return lambda: learn(learner, lesson, config, 1e-3)


def stage_two(clusters: int, way: Way) -> Callable[[], object]:
    rows, held = split_batch(BATCH, CLASSES, 0.2)
    stage = CrossCluster(
        [way.student(model) for model in networks(clusters)],
        torch.full((clusters, clusters), 1 / clusters, device="cuda"),
        torch.tensor(rows, device="cuda"),
        torch.tensor(held, device="cuda"),
        temperature=SynthesisConfig().temperature,
        momentum=0.9,
        weight_decay=5e-4,
        lr_weights=0.1,
        weight_step="projected",
        unit_hypergradient=True,
        own_only=False,
    )
    samples = [sample(k) for k in range(clusters)]
    return lambda: stage.step(samples, 1e-3)


# --- what is measured --------------------------------------------------------------------------------------------


def steps_table(count: int, rate: float) -> dict[str, Any]:
    forward = models.forward_flops("resnet18", SHAPE[0], CLASSES, SHAPE[1]) * BATCH
    floor = lambda passes: passes * forward / rate * 1e3  # noqa: E731
    kinds: dict[str, tuple[Callable[..., Callable[[], object]], float]] = {
        "inversion": (partial(inversion, count), floor(2 * count)),
        "both teachers": (partial(teachers, count), floor(2 * count)),
        "both teachers, four batches": (partial(teachers, count, batches=4), floor(8 * count)),
        "student": (student, floor(3)),
        "stage 2, K=4": (partial(stage_two, 4), floor(3 * 4 * (4 * 0.8 + 0.2))),
    }
    table: dict[str, Any] = {}
    set_precision("fp32")
    for name, (make, least) in kinds.items():
        table[name] = {"floor_ms": least}
        if name == "inversion":
            table[name]["as released, eager fp32"] = measure(inversion_as_released(count), 10)
        for path, way in WAYS.items():
            set_precision(way.precision)
            table[name][path] = measure(make(way), 100 if way.fast else 15)
            set_precision("fp32")
            clear()
        ratio = table[name]["plain fp32"]["ms"] / table[name]["fast bf16"]["ms"]
        line = "  ".join(f"{path} {entry['ms']:.2f} ms" for path, entry in table[name].items() if path != "floor_ms")
        print(f"{name:14s} {ratio:5.1f}x  {line}  floor {least:.2f} ms", flush=True)
    return table


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Slope of the straight line through log y over log x."""
    return float(np.polyfit(np.log(xs), np.log(ys), 1)[0])


def growth() -> dict[str, Any]:
    def series(name: str, values: Sequence[int], make: Callable[[int], Callable[[], object]]) -> dict[str, Any]:
        found = []
        for value in values:
            clear()
            found.append({"x": value, **measure(make(value), 20)})
        slope = exponent(values, [entry["ms"] for entry in found])
        shown = "  ".join(f"{e['x']}: {e['ms']:.2f} ms {e['peak_gb']:.1f} GB" for e in found)
        print(f"growth with {name}: exponent {slope:.2f}   {shown}", flush=True)
        return {"points": found, "exponent": slope}

    out = {
        "N": series("N, inversion", [1, 5, 10, 20, 50], lambda n: inversion(n, FAST)),
        "K": series("K, stage 2", [2, 3, 4, 6, 8], lambda k: stage_two(k, FAST)),
        "B": series("B, inversion", [96, 256, 1024], lambda b: inversion(5, FAST, batch=b)),
        "pixels": series("pixels, inversion, B=96", [28, 56, 224], lambda s: inversion(5, FAST, 96, s)),
    }
    k_squared = [entry["ms"] / entry["x"] ** 2 for entry in out["K"]["points"]]
    out["K"]["ms_per_K_squared"] = [min(k_squared), max(k_squared)]
    return out


def in_24_gb() -> dict[str, Any]:
    """Inversions too large for a GPU of 24 GB, with clients in groups; and how far the images are off then."""
    cases = {"50 clients, 28 px, B=256": (50, 28, 256), "5 clients, 224 px, B=96": (5, 224, 96)}
    out: dict[str, Any] = {}
    for name, (count, size, batch) in cases.items():
        fit = clients_that_fit(["resnet18"], (SHAPE[0], CLASSES, size), batch, "cpu")  # the rule for 24 GB
        found, images = {}, []
        for label, at_once in {"all at once": None, "in groups": fit}.items():
            clear()
            share = 1.0 if at_once is None else 24e9 / torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(share)
            try:
                run = start_inversion(count, FAST, batch, size, at_once)
                found[label] = measure(run.step, 10)
                images.append(run.images)
                del run
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0)
        off = float((images[1] - images[0]).norm() / images[0].norm())
        out[name] = {**found, "clients at once": fit, "relative difference after 13 steps": off}
        shown = "  ".join(f"{label} {e['ms']:.1f} ms {e['peak_gb']:.1f} GB" for label, e in found.items())
        print(f"{name}: {fit} clients at once  {shown}  images differ by {off:.1e}", flush=True)
    return out


def kernels(count: int, most: int = 12) -> dict[str, Any]:
    """Where the time of a fast step goes: its kernels by time, in ms and launches per step."""
    from torch.profiler import ProfilerActivity, profile

    half = sample(0)
    half = half._replace(**{name: getattr(half, name)[: BATCH // 2] for name in ("images", "original", "adapted")})
    kinds: dict[str, Callable[[], Callable[[], object]]] = {  # made one by one: each compiles
        "student": lambda: student(FAST),
        "student, half a batch": lambda: student(FAST, half),
        "both teachers of four batches": lambda: teachers(count, FAST, 4),
        "both teachers": lambda: teachers(count, FAST),
        "inversion": lambda: inversion(count, FAST),
    }
    out: dict[str, Any] = {}
    for name, make in kinds.items():
        step = make()
        for _ in range(5):
            step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(10):
                step()
            torch.cuda.synchronize()
        found = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)
        total = sum(e.self_device_time_total for e in found) / 1e4
        top = [{"kernel": e.key[:90], "ms": e.self_device_time_total / 1e4, "launches": e.count / 10} for e in found]
        out[name] = {"ms": milliseconds(step, 50), "summed_ms": total, "kernels": top[:most]}
        print(
            f"{name}: {out[name]['ms']:.2f} ms, kernels {total:.2f} ms, {sum(e['launches'] for e in top):.0f} launches"
        )
        for entry in top[:most]:
            print(f"  {entry['ms']:6.3f} ms  {entry['launches']:5.1f} x  {entry['kernel']}", flush=True)
    return out


@torch.no_grad()
def disturb(network: nn.Module, rng: torch.Generator) -> None:
    """Batch normalisation as after a training: scales, shifts and statistics differ by channel."""
    drawn = lambda like, low, high: torch.empty_like(like).uniform_(low, high, generator=rng)  # noqa: E731
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.weight.copy_(drawn(layer.weight, 0.5, 1.5))
            layer.bias.copy_(drawn(layer.bias, -0.3, 0.3))
    network.train()
    x = torch.randn((BATCH, *SHAPE), device="cuda", generator=rng)
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 1.0  # the statistics of this batch become the stored ones
    network(x)
    network.eval()


def agreement(count: int) -> dict[str, float]:
    """Relative difference of the fast path from the plain one on the same inputs."""
    set_precision("fp32")
    clients = networks(count)
    for number, client in enumerate(clients):  # fresh ones shift nothing and scale nothing: a fault would not show
        disturb(client, torch.Generator("cuda").manual_seed(number))
    ensembles = {name: way.ensemble(clients) for name, way in WAYS.items()}
    x = torch.randn((BATCH, *SHAPE), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    out, reference = {}, dict[str, Tensor]()
    for label, ensemble in ensembles.items():
        leaf = x.clone().requires_grad_(True)
        logits, loss = ensemble.logits_and_bn_loss(leaf)
        total = F.cross_entropy(logits.mean(0), balanced_labels(BATCH, CLASSES, "cuda")) + 10 * loss.mean()
        with torch.no_grad():
            found = {"logits": ensemble.logits(x), "batch logits": ensemble.batch_logits(x), "BN terms": loss.detach()}
        found["input gradient"] = torch.autograd.grad(total, leaf)[0]
        reference = reference or found
        if label != "plain fp32":
            out |= {f"{label}: {k}": float((v - reference[k]).norm() / reference[k].norm()) for k, v in found.items()}
    return out


def five_trainings(folder: Path, epochs: int) -> dict[str, Any]:
    """Five IID clients of BloodMNIST, batch 128: eager fp32 one after another, and all at once on the fast path."""
    with np.load(folder / "bloodmnist.npz", allow_pickle=False) as data:
        images = np.concatenate([data["train_images"], data["val_images"]])
        labels = np.concatenate([data["train_labels"], data["val_labels"]]).ravel().astype(np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    parts = np.array_split(order, 5)

    def jobs(epochs: int, precision: str, fast: bool) -> list[Any]:
        recipe = Training(recipe="paper", epochs=epochs)
        given = {"seed": 0, "device": "cuda", "precision": precision, "fast": fast}
        return [
            training(model, "resnet18", images[p], labels[p], None, recipe, stream=(f"c{i}",), **given)
            for i, (model, p) in enumerate(zip(networks(5), parts, strict=True))
        ]

    def seconds(epochs: int, precision: str, fast: bool) -> float:
        set_precision(precision)
        began = time.perf_counter()
        trained = train_together(jobs(epochs, precision, fast), "cuda" if fast else "cpu")
        torch.cuda.synchronize()
        last = statistics.mean(t.history[-1]["val_accuracy"] for t in trained)
        took = time.perf_counter() - began
        print(
            f"five trainings, {epochs} epochs, {precision} fast={fast}: {took:.1f} s, validation {last:.3f}", flush=True
        )
        return took

    few = max(2, epochs // 20)
    seconds(1, "fp32", False)
    slow = seconds(few, "fp32", False) * epochs / few
    fast = seconds(epochs, "bf16", True)  # recording included, and compilation where it is thought to pay
    worth = fast_path.WORTH_COMPILING
    try:
        fast_path.WORTH_COMPILING = 0
        compiled = seconds(epochs, "bf16", True)
    finally:
        fast_path.WORTH_COMPILING = worth
    return {
        "epochs": epochs,
        "eager_fp32_s": slow,
        "eager_fp32_measured_epochs": few,
        "fast_s": fast,
        "compiled_s": compiled,
        "ratio": slow / fast,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/gpu.json"))
    parser.add_argument("--data-dir", type=Path, help="where bloodmnist.npz lies; without it no training is timed")
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument(
        "--parts", default="steps,agreement,training,growth,memory", help="which, in this order; kernels too"
    )
    given = parser.parse_args()
    rate = matrix_rate()
    print(f"bf16 matrix rate {rate / 1e12:.0f} TFLOP/s", flush=True)
    result: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    result |= {"clients": given.clients, "batch": BATCH}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Callable[[], Any]] = {
        "steps": lambda: steps_table(given.clients, rate),
        "agreement": lambda: agreement(given.clients),
        "training": lambda: five_trainings(given.data_dir, given.epochs),
        "growth": growth,
        "memory": in_24_gb,
        "kernels": lambda: kernels(given.clients),
    }
    chosen = given.parts.split(",")
    unknown = set(chosen) - set(parts)
    if "steps" in chosen:  # the floors are made with it
        result["bf16_tflops"] = rate / 1e12
    if unknown:
        parser.error(f"no part is called {', '.join(sorted(unknown))}; known: {', '.join(parts)}")
    for name in chosen:
        if name == "training" and given.data_dir is None:
            continue
        began = time.perf_counter()
        try:
            result[name] = parts[name]()
            result["versions"] = versions("cuda")
        except Exception:  # time on such a machine is dear: the other parts are still worth having
            traceback.print_exc()
        clear()
        given.out.write_text(json.dumps(result, indent=1, allow_nan=False))  # what is done is kept
        print(f"-- {name}: {time.perf_counter() - began:.0f} s", flush=True)
    print({name: result.get(name) for name in ("agreement", "training")})


if __name__ == "__main__":
    main()
