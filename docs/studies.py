"""Blocks of small studies: why a method does what it does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from docs.parts import link, table

ALL = 0.99


def _spread(values: Sequence[float]) -> str:
    """Percent, mean ± sd."""
    mean = f"{100 * fmean(values):.1f}"
    return mean if len(values) < 2 else f"{mean} ± {100 * stdev(values):.1f}"


def fedbicross_stages(_: str, page: Path, root: Path) -> str:
    """FedBiCross taken apart, by `benchmarks.fedbicross_stages`."""
    file = root / "results" / "benchmarks" / "fedbicross-stages.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = found["rows"]
    alphas = sorted({row["alpha"] for row in rows}, reverse=True)
    kinds = list(dict.fromkeys((row["stage"], row["what"]) for row in rows))
    lines = []
    for stage, what in kinds:
        cells: list[str] = []
        for alpha in alphas:
            mine = [row for row in rows if (row["stage"], row["what"], row["alpha"]) == (stage, what, alpha)]
            cells += [_spread([row[name] for row in mine]) for name in ("matched", "global")]
            own = [value for row in mine for value in row.get("own_weights", [])]
            cells += [f"{sum(value > ALL for value in own)} of {len(own)}" if own else ""]
        lines.append((stage, what, *cells))
    heads = [f"α = {alpha:g}: {name}" for alpha in alphas for name in ("matched %", "global %", "by itself")]
    seeds = {alpha: len({row["seed"] for row in rows if row["alpha"] == alpha}) for alpha in alphas}
    said = ", ".join(f"{count} seed{'s' * (count > 1)} at α = {alpha:g}" for alpha, count in seeds.items())
    made = f"Raw results: [`{file.name}`]({link(file, page)}); {said}."
    weights = "*By itself*: clusters that listen to none but themselves after stage 2, w_kk over 0.99."
    return f"{table(('stage', 'what', *heads), lines, 'll' + 'r' * len(heads))}\n\n{made} {weights}"
