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


def _each(values: Sequence[float]) -> str:
    """Percent, every seed by itself: two or three are too few for a spread."""
    return " / ".join(f"{100 * value:.1f}" for value in values)


def fedbicross_stages(what: str, page: Path, root: Path) -> str:
    """FedBiCross taken apart by `benchmarks.fedbicross_stages`; ``rates``: on held-back training images."""
    file = root / "results" / "benchmarks" / f"fedbicross-{what or 'stages'}.json"
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


def fedisca_student(_: str, page: Path, root: Path) -> str:
    """FedISCA's student after every trajectory, by `benchmarks.fedisca_student`."""
    file = root / "results" / "benchmarks" / "fedisca-student.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    out = []
    for partition in dict.fromkeys(row["partition"] for row in found["rows"]):
        rows: list[dict[str, Any]] = [row for row in found["rows"] if row["partition"] == partition]
        ways = list(dict.fromkeys(row["way"] for row in rows))
        numbers = sorted({row["trajectory"] for row in rows})
        after = {
            (way, n): [r for r in rows if (r["way"], r["trajectory"]) == (way, n)] for way in ways for n in numbers
        }
        kinds = list(after[ways[0], 1][0]["statistics"])
        lines, other = [], []
        for way in ways:
            first, last = after[way, numbers[0]], after[way, numbers[-1]]
            means = [f"{100 * fmean(row['accuracy'] for row in after[way, n]):.1f}" for n in numbers]
            agree = [_from_to(first, last, where) for where in ("newest", "fresh", "test")]
            lines.append((way, len(last), *means, *agree))
            measured = [_each([row["statistics"][kind] for row in last]) for kind in kinds]
            other.append((way, _each([row["accuracy"] for row in last]), *measured))
        plain = [("as they are", lines[0][2 : 2 + len(numbers)])]
        for kind in kinds:
            means = [f"{100 * fmean(row['statistics'][kind] for row in after[ways[0], n]):.1f}" for n in numbers]
            plain.append((kind, tuple(means)))
        heads = (f"{partition}: student", "seeds", *map(str, numbers), "newest images", "fresh images", "test images")
        again = (f"{partition}: after trajectory {numbers[-1]}", "as they are", *kinds)
        over = (f"{partition}, {ways[0]}: statistics", *map(str, numbers))
        teachers = [
            row["accuracy"] for row in found["teachers"] if (row["partition"], row["way"]) == (partition, ways[0])
        ]
        out += [
            table(heads, lines, "l" + "r" * (len(heads) - 1)),
            f"The teacher of the first row: {_each(teachers)} % of the test images.",
            table(over, [(name, *means) for name, means in plain], "l" + "r" * len(numbers)),
            table(again, other, "l" + "r" * (len(again) - 1)),
        ]
    said = (
        "First tables: accuracy on test images after each trajectory, in %; then how often student and teacher agree, "
        "after the first and after the last, in %. *Newest*: finished images of the newest trajectory. *Fresh*: "
        "finished images of one more trajectory, from which no student learns. Other tables: accuracy in %, with the "
        "same weights and batch-norm statistics measured on other images. Means over seeds; a / b: each seed by itself."
    )
    return "\n\n".join([*out, f"{said} Raw results: [`{file.name}`]({link(file, page)})."])


def _from_to(first: Sequence[dict[str, Any]], last: Sequence[dict[str, Any]], where: str) -> str:
    return " → ".join(f"{100 * fmean(row['agreement'][where] for row in rows):.0f}" for rows in (first, last))


def falcon_teachers(_: str, page: Path, root: Path) -> str:
    """FALCON's teachers and students, by `benchmarks.falcon_teachers`."""
    file = root / "results" / "benchmarks" / "falcon-teachers.json"
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["rows"]
    columns = {"teacher": ("accuracy", "balanced"), "student": ("of_sequences", "accuracy", "balanced")}
    lines = []
    for what in dict.fromkeys(row["what"] for row in rows if row["kind"] == "student"):
        cells: list[str] = []
        for kind, names in columns.items():
            mine = [row for row in rows if (row["kind"], row["what"]) == (kind, what)]
            cells += [_each([row[name] for row in mine]) if mine else "" for name in names]
        students, plain = (
            [row for row in rows if (row["kind"], row["what"]) == ("student", name)] for name in (what, "no teacher")
        )
        gains = [own["balanced"] - other["balanced"] for own, other in zip(students, plain, strict=True)]
        lines.append((what, *cells, _each(gains) if what != "no teacher" else ""))
    heads = (
        "teacher",
        "right about uploaded sequences %",
        "balanced %",
        "its student: the same sequences %",
        "test images %",
        "balanced %",
        "balanced, less that without a teacher",
    )
    seeds = len({row["seed"] for row in rows})
    said = f"a / b: each of {seeds} seeds by itself. Raw results: [`{file.name}`]({link(file, page)})."
    return f"{table(heads, lines, 'l' + 'r' * (len(heads) - 1))}\n\n{said}"
