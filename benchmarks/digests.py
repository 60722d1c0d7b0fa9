"""One digest for each row of a small run of every method: `python -m benchmarks.digests [NAME ...]`.

A change that keeps every behaviour keeps every line, on the same machine with the same packages:
`python -m benchmarks.digests > before`, change something, `python -m benchmarks.digests | diff before -`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import fedbicross
from fedbicross.methods import METHODS, create, method_names
from fedbicross.sums import rows_digest

SMALL = {  # whatever of these a method has
    "rounds": 2,
    "shots": 2,
    "steps": 2,
    "batch": 8,
    "batch_synthesis": 8,
    "batch_personal": 8,
    "epochs": 2,
    "epochs_generator": 2,
    "epochs_classifier": 2,
    "epochs_global": 2,
    "epochs_personal": 1,
    "steps_distil": 3,
    "bn_steps": 1,
    "memory": 2,
    "pool": 3,
    "noise_images": 16,
    "images_per_class": 4,
    "trajectories": 2,
    "probes": 8,
    "clusters": 2,
    "components": 2,
    "latent": 8,
    "width": 16,
    "encoder": "tiny",
}
RUN: dict[str, Any] = {
    "baselines": [],
    "model": "resnet8",
    "clients": 3,
    "partition": {"kind": "dirichlet", "alpha": 0.5},
    "data": {"train_size": 90, "test_size": 40, "image_size": 12},
    "training": {"recipe": "modern", "epochs": 2, "batch_size": 8},
    "device": "cpu",
    "threads": 1,
}


def all_names() -> list[str]:
    """Every method and variant, and every model for all behind a gate."""
    names = method_names()
    return [*names, *(f"{name}:personal" for name in names if not create(name).gate_problem)]


def small_settings(spec: str) -> dict[str, Any]:
    """Small numbers for a method or variant: a variant keeps its words, its switches and its small numbers."""
    name, _, variant = spec.partition(":")
    cls = METHODS[name]
    if variant == "private":
        return {"epsilon": 100.0}  # with less, thirty images are not told from noise
    if not variant:
        return {key: value for key, value in SMALL.items() if key in cls.Config.model_fields}
    preset = cls.variants.get(variant, {})
    return {key: min(value, SMALL[key]) for key, value in preset.items() if type(value) is type(SMALL.get(key)) is int}


def table(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The settings of a run of these: those of a method, and over them those of a variant."""
    families = [name.partition(":")[0] for name in names]
    variants = [name for name in names if name in method_names()]
    return {name: small_settings(name) for name in (*families, *variants)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.digests", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="these only, e.g. fedbicross or primum:student")
    names = parser.parse_args().names or all_names()
    # One run, so that the clients are trained once for all methods.
    found = fedbicross.run("cells", **RUN, methods=names, method=table(names))
    for row in found["rows"]:
        print(rows_digest([row]), row["method"], flush=True)


if __name__ == "__main__":
    main()
