"""What each section of the page shows, as plain values and finished charts for the template to lay out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbicross.report import figures
from fedbicross.report.diagnosis import diagnosis
from fedbicross.report.metric import NAMES, judged_by
from fedbicross.report.summary import Alone, Summary, result_rows, seeds_of, training_alone
from fedbicross.report.text import (
    NA,
    PROTOCOL_NAMES,
    PROTOCOLS,
    clean,
    count,
    duration,
    fixed,
    flops,
    get,
    mapping,
    percent,
    percent_sd,
    plain,
    points,
    sequence,
    short,
    size,
    stat,
)
from fedbicross.report.verdict import Verdict, row_verdict

METRICS = {
    "accuracy": "accuracy %",
    "accuracy_weighted": "accuracy %, clients weighted by training images",
    "balanced_accuracy": "balanced accuracy %",
    "macro_auc": "macro AUC %",
    "macro_f1": "macro F1 %",
    "ece": "calibration error (ECE) %",
}
PATIENT_METRICS = tuple(metric for metric in METRICS if metric != "accuracy_weighted")
STAGES = ("local_training", "upload", "fuse", "personalize", "evaluate")  # in the order of a run; others follow
LONGEST_CONFIG = 60_000


def head(results: Mapping[str, Any]) -> dict[str, Any]:
    """Name and facts of the run."""
    data = mapping(results.get("dataset"))
    classes = sequence(data.get("classes"))
    seeds = seeds_of(results)
    counts = sorted({len(sequence(clients)) for clients in mapping(results.get("clients")).values()})
    clients = "–".join(str(value) for value in dict.fromkeys([counts[0], counts[-1]])) if counts else NA
    facts = [
        ("dataset", short(data.get("name"), 60)),
        ("hospitals (clients)", clients),
        ("classes", str(len(classes)) if classes else NA),
        ("training images", fixed(data.get("train_images"), 0)),
        ("test images", fixed(data.get("test_images"), 0)),
        ("image", f"{plain(data.get('image_size'))} px, {plain(data.get('channels'))} ch"),
        (
            count(len(seeds), "seed"),
            ", ".join(short(seed, 12) for seed in seeds[:8]) + (" …" if len(seeds) > 8 else ""),
        ),
    ]
    model = get(results, "config", "model")
    if model is not None:
        others = {
            str(m)
            for entries in mapping(results.get("clients")).values()
            for c in sequence(entries)
            if (m := mapping(c).get("model")) is not None
        } - {str(model)}
        own = f"; clients also {', '.join(short(name, 24) for name in sorted(others))}" if others else ""
        facts.append(("architecture", f"{short(model, 24)}{own}"))
    return {
        "name": short(results.get("name") or "unnamed run", 60),
        "complete": results.get("complete") is True,
        "facts": facts,
        "note": short(data["note"], 600) if data.get("note") else "",
    }


def tiles(summaries: Sequence[Summary], verdict: Verdict) -> list[dict[str, str]]:
    """The three figures behind the verdict."""
    alone, best = training_alone(summaries), verdict.best
    found = []
    if alone is not None:
        others = percent(alone.score["global"].mean)
        found.append(
            {
                "title": f"Training alone, {NAMES[alone.metric]}",
                "value": f"{percent(alone.score['matched'].mean)}\u00a0%",
                "note": f"own patients; {others}\u00a0% for patients from everywhere",
            }
        )
    if best is not None:
        name = short(best.method, 30)
        own, others = (percent(best.score[protocol].mean) for protocol in ("matched", "global"))
        gains = f"({points(best.gain.mean)}); {others}\u00a0% ({points(best.gain_elsewhere['global'].mean)})"
        note = f"own patients {gains} for patients from everywhere"
        found.append({"title": f"{name}, {NAMES[best.metric]}", "value": f"{own}\u00a0%", "note": note})
        found.append({"title": "Hospitals harmed", **_harmed(best, name)})
    return found


def _harmed(best: Summary, name: str) -> dict[str, str]:
    """How many, and how many more are lower by chance."""
    if best.harmed is None or best.lower is None:
        return {"value": NA, "note": f"by {name}"}
    more = best.lower - best.harmed
    by_chance = f"; {more}{' more' if best.harmed else ''} lower by chance" if more else ""
    return {"value": f"{best.harmed} of {best.judged}", "note": f"by {name}{by_chance}"}


def warnings(results: Mapping[str, Any]) -> dict[str, list[dict[str, str]]]:
    """What to be careful about: of the run, and of single methods; the same words of several rows stand once."""
    said: dict[str, list[str]] = {}
    for row in result_rows(results):
        for item in sequence(row.get("warnings")):
            said.setdefault(short(item, 400), []).append(short(row["method"]))
    run = list(dict.fromkeys(short(item, 400) for item in sequence(results.get("warnings"))))
    return {
        "run": [_warning(text, "") for text in run],
        "methods": [_warning(text, ", ".join(dict.fromkeys(methods))) for text, methods in said.items()],
    }


def _warning(text: str, who: str) -> dict[str, str]:
    """A fact as a sentence; what follows from it, or could be tried, stands apart."""
    fact, _, rest = text.partition("; ")
    return {"who": who, "fact": fact[:1].upper() + fact[1:], "rest": rest}


def kind(item: Summary) -> str:
    """How a method is drawn."""
    return "local" if item.is_local else item.role if item.role in ("baseline", "upper_bound") else "method"


def accuracy(results: Mapping[str, Any], summaries: Sequence[Summary]) -> dict[str, Any]:
    """The result table, its charts, and the table of all metrics."""
    total = len(seeds_of(results))
    alone = training_alone(summaries)
    rows = [
        {
            "method": short(item.method),
            "kind": kind(item),
            "seeds": f"{item.seeds} of {total} seeds" if item.seeds < total else "",
            "accuracy": [percent_sd(item.score[protocol]) for protocol in PROTOCOLS],
            "beside": [percent_sd(item.scores[name]["matched"]) for name in item.gain_beside],
            "worst": percent_sd(item.worst),
            "worst_client": short(item.worst_client, 24) if item.worst_client else "",
            "upload": size(item.upload.mean),
            "reply": size(item.reply.mean),
            "seconds": duration(item.seconds.mean),
            "loses": item.loses and not item.is_local,
            "verdict": row_verdict(item),
        }
        for item in summaries
    ]
    every_metric = [
        [
            [short(item.method), *(percent_sd(stat(get(row, name, protocol) for row in item.rows)) for name in METRICS)]
            for item in summaries
        ]
        for protocol in PROTOCOLS
    ]
    metric = str(judged_by(results)["judged_by"])
    return {
        "rows": rows,
        "metric": NAMES[metric],
        "beside": [name for key, name in NAMES.items() if key != metric],
        "charts": [_dots(summaries, alone, metric, protocol) for protocol in ("matched", "global")],
        "has_local": alone is not None,
        "told_from_chance": all(item.clearly_harmed is not None for item in summaries if item.lower is not None),
        "several_seeds": any(item.seeds > 1 for item in summaries),
        "metric_names": list(METRICS.values()),
        "patient_metrics": [METRICS[metric] for metric in PATIENT_METRICS],
        "protocols": [PROTOCOL_NAMES[protocol] for protocol in PROTOCOLS],
        "every_metric": every_metric,
        "patients": _by_patient(summaries) if any(row.get("patients") for row in result_rows(results)) else [],
    }


def _dots(summaries: Sequence[Summary], alone: Alone | None, metric: str, protocol: str) -> str:
    who = {"matched": "own patients (matched)", "global": "patients from everywhere (global)"}[protocol]
    return figures.score_dots(
        [(item.method, kind(item), item.score[protocol]) for item in summaries],
        None if alone is None else alone.score[protocol],
        f"{who}, {NAMES[metric]} in %",
        f"{NAMES[metric]} of every method, {who}",
    )


def _by_patient(summaries: Sequence[Summary]) -> list[list[list[str]]]:
    """Every metric with one answer a patient: by protocol, a line a method."""
    return [
        [
            [
                short(item.method),
                *(percent_sd(stat(get(row, "patients", m, protocol) for row in item.rows)) for m in PATIENT_METRICS),
            ]
            for item in summaries
        ]
        for protocol in PROTOCOLS
    ]


def costs(summaries: Sequence[Summary]) -> dict[str, Any]:
    """Bytes, seconds and operations, means over seeds."""
    kept = {stage for item in summaries for row in item.rows for stage in mapping(row.get("seconds_by_stage"))}
    names = [stage for stage in STAGES if stage in kept] + sorted(kept - set(STAGES))[:5]
    stages = [
        (item.method, [stat(get(row, "seconds_by_stage", stage) for row in item.rows).mean for stage in names])
        for item in summaries
    ]
    shown = [short("personalise" if stage == "personalize" else stage.replace("_", " "), 16) for stage in names]
    carried = [(item.method, [item.upload.mean, item.reply.mean]) for item in summaries]
    rows = [
        [
            short(item.method),
            size(item.upload.mean),
            size(item.reply.mean),
            flops(stat(row.get("client_flops") for row in item.rows).mean),
            flops(stat(row.get("server_flops") for row in item.rows).mean),
            *(duration(value) for value in values),
            duration(item.seconds.mean),
        ]
        for item, (_, values) in zip(summaries, stages, strict=True)
    ]
    return {
        "rows": rows,
        "stages": shown,
        "seconds": figures.stacked_bars(stages, shown, duration, "Seconds by stage"),
        "bytes": figures.stacked_bars(carried, ("upload", "reply"), size, "Bytes per client"),
    }


def upload_summaries(summaries: Sequence[Summary]) -> list[tuple[str, str, str]]:
    """What leaves the hospital, per method."""
    return [
        (
            short(item.method),
            short(item.rows[0].get("leaves_the_hospital") or "not stated", 500),
            size(item.upload.mean),
        )
        for item in summaries
    ]


def diagnoses(results: Mapping[str, Any], run_dir: Path | None) -> list[dict[str, Any]]:
    """Each row's own account, where its method gives one."""
    return [
        {"title": f"{short(row['method'])}, seed {short(row.get('seed'), 12)}", **diagnosis(row["diagnosis"], run_dir)}
        for row in result_rows(results)
        if row.get("diagnosis")
    ]


def provenance(results: Mapping[str, Any]) -> dict[str, Any]:
    """How to get these numbers again, and proof of what they were made from."""
    try:
        config = json.dumps(results.get("config"), indent=2, sort_keys=True, ensure_ascii=False, default=str)
    except (RecursionError, TypeError, ValueError):
        config = "cannot be shown; see results.json"
    hashes = {
        "dataset digest": get(results, "dataset", "digest"),
        "partition SHA-256": results.get("partition_sha256"),
        "rows SHA-256": results.get("rows_sha256"),
    }
    return {
        "config": "\n".join(_config_line(line) for line in config[:LONGEST_CONFIG].split("\n")),
        "cut": len(config) > LONGEST_CONFIG,
        "versions": [(short(name), short(value)) for name, value in mapping(results.get("versions")).items()],
        "hashes": [(name, short(value, 140)) for name, value in hashes.items() if value],
    }


def _config_line(line: str, limit: int = 200) -> str:
    """Printable, cut where one value would fill the page, and indented as before: that carries the structure."""
    cut = line if len(line) <= limit else line[:limit] + "…"
    return cut[: len(cut) - len(cut.lstrip())] + clean(cut)
