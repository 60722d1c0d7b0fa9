"""Blocks of measured times: `make bench`, `benchmarks/gpu.py`, and the logs of whole runs."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from docs.parts import Row, link, load, read_stored, table


def cpu(_: str, page: Path, root: Path) -> str:
    """The table of `make bench`."""
    del page
    found = json.loads((root / "results" / "benchmarks" / "cpu.json").read_text(encoding="utf-8"))
    versions = found["versions"]
    values = [entry["value"] for entry in found["entries"]]
    shown = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values]
    rows = [
        (entry["group"], entry["what"], text, entry["unit"])
        for entry, text in zip(found["entries"], shown, strict=True)
    ]
    made = (
        f"Made by `make bench` on {versions['machine']}, {versions['cores']} cores, {versions['threads']} threads, "
        f"Python {versions['python']}, torch {versions['torch']}. "
        "One machine on one day: read the ratios, not the digits."
    )
    return f"{table(('', 'what', 'value', 'unit'), rows, 'llrl')}\n\n{made}"


def gpu(what: str, page: Path, root: Path) -> str:
    """Tables of `benchmarks/gpu.py`: steps, training, growth, memory or agreement."""
    del page
    found = json.loads((root / "results" / "benchmarks" / "gpu.json").read_text(encoding="utf-8"))
    versions, rate = found["versions"], found["bf16_tflops"]
    made = f"{versions['device']}, torch {versions['torch']}, bf16 matrix rate {rate:.0f} TFLOP/s"
    if what == "steps":
        paths = ["as released, eager fp32", "plain fp32", "plain bf16", "recorded bf16", "fast bf16"]
        rows = []
        for step, entry in found["steps"].items():
            times = [f"{entry[path]['ms']:.1f}" if path in entry else "" for path in paths]
            ratio = f"{entry['plain fp32']['ms'] / entry['fast bf16']['ms']:.1f}x"
            first, peak = f"{entry['fast bf16']['first_s']:.0f}", f"{entry['fast bf16']['peak_gb']:.1f}"
            rows.append((step, ratio, *times, f"{entry['floor_ms']:.1f}", first, peak))
        header = ("step", "plain fp32 / fast", *(f"{path}, ms" for path in paths), "floor, ms", "first, s", "peak, GB")
        return f"{table(header, rows, 'l' + 'r' * 9)}\n\n{made}."
    if what == "training":
        entry = found["training"]
        kinds = {
            f"one after another, plain fp32 (from {entry['eager_fp32_measured_epochs']} epochs)": entry["eager_fp32_s"],
            "side by side, bf16, recorded": entry["fast_s"],
            "the same, compiled too, compilation included": entry["compiled_s"],
        }
        rows = [(name, f"{value:.1f}", f"{entry['eager_fp32_s'] / value:.1f}x") for name, value in kinds.items()]
        return table(("five clients, 100 epochs", "seconds", "against plain fp32"), rows, "lrr")
    if what == "memory":
        rows = [
            (case, {"in groups": f"{entry['clients at once']} at once"}.get(how, how), *_time_and_memory(entry[how]))
            for case, entry in found["memory"].items()
            for how in ("all at once", "in groups")
        ]
        apart = [f"{entry['relative difference after 13 steps']:.1%}" for entry in found["memory"].values()]
        note = f"After 13 steps the images of the two ways differ by {' and '.join(apart)} of their norm."
        return f"{table(('inversion', 'clients', 'ms', 'peak, GB'), rows, 'llrr')}\n\n{note}"
    if what == "agreement":
        rows = [(name, f"{value:.2%}") for name, value in found["agreement"].items()]
        return table(("difference from plain fp32, relative norm", ""), rows, "lr")
    rows = [
        (name, point["x"], f"{point['ms']:.1f}", f"{point['peak_gb']:.1f}", f"{entry['exponent']:.2f}")
        for name, entry in found["growth"].items()
        for point in entry["points"]
    ]
    least, most = found["growth"]["K"]["ms_per_K_squared"]
    grown = table(("growth with", "value", "ms", "peak, GB", "exponent"), rows, "lrrrr")
    return f"{grown}\n\nStage 2 takes {least:.1f} to {most:.1f} ms per K²."


def membership(what: str, page: Path, root: Path) -> str:
    """`python -m benchmarks.membership`: who can be told to have been trained on, by model, beside its accuracy."""
    name = f"membership-{what}.json" if what else "membership.json"
    file = root / "results" / "privacy" / name
    if not file.exists():
        return "Not measured yet."
    found = json.loads(file.read_text(encoding="utf-8"))

    def interval(value: Mapping[str, float], scale: float = 1, digits: int = 3) -> str:
        shown = [f"{scale * value[key]:.{digits}f}" for key in ("value", "low", "high")]
        return f"{shown[0]} ({shown[1]}–{shown[2]})"

    rows = []
    for row in found["rows"]:
        ratio, plain, canaries = row["likelihood_ratio"], row["confidence"], row["canaries"]
        rows.append(
            (
                row["model"],
                row["seed"],
                f"{100 * row['accuracy']:.1f}",
                interval(ratio["auc"]),
                interval(ratio["tpr_at_0.01"], 100, 1),
                interval(ratio["tpr_at_0.001"], 100, 1) if ratio["tpr_at_0.001"] else "too few controls",
                interval(plain["auc"]),
                interval(row["difference_without_membership"]),
                f"{row['shadows_attacked']:.3f}",
                "" if canaries is None else f"{canaries['epsilon']:.2f}",
            )
        )
    titles = ("model", "seed", "accuracy, %", "AUC, shadows", "found at 1 % false alarms, %", "at 0.1 %, %")
    config, versions = found["config"], found["versions"]
    each = [f"ε = {name}: {one['epochs']}" for name, one in config.get("private", {}).items()]
    noisy = f", with noise {', '.join(each)}" if each else ""
    made = (
        f"{config['data']}, {config['clients']} sites of {config['train_images']} images, {config['model']}, "
        f"{config['training']['epochs']} epochs ({config['training']['recipe']}){noisy}; {row['members']} members of "
        f"one site, {row['controls']:,} controls, {config['shadows']} shadow networks of each kind; "
        f"{versions['device']}, torch {versions['torch']}. Made by "
        f"`python -m benchmarks.membership`; raw results: [`{name}`]({link(file, page)})."
    )
    titles = (*titles, "AUC, confidence alone", "control: AUC to networks that saw neither", "AUC on shadows")
    shown = table((*titles, "canaries: ε ≥"), rows, "lr" + "r" * 8)
    return f"{shown}\n\n{made}"


AGAINST = {
    "plain fp32, one thread": "one thread - two, points (each seed)",
    "fast bf16": "fast bf16 - plain, points (each seed)",
}


def bn_distance(_: str, page: Path, root: Path) -> str:
    """`python -m benchmarks.inversion`: the batch-norm term as it is and over each layer's spread."""
    file, found = read_stored(root, "benchmarks/inversion.json")
    rows = [
        (
            row["architecture"],
            row["init_scheme"],
            row["bn_distance"],
            f"{row['term_of_real_images']:.2f}",
            f"{row['term_at_the_end']:.2f}",
            f"{row['cross_entropy_at_the_end']:.2f}",
            f"{100 * row['recognised']:.0f}",
        )
        for row in found["rows"]
    ]
    titles = (
        "network",
        "first weights",
        "`bn_distance`",
        "term of real images",
        "at the end",
        "cross-entropy at the end",
    )
    made = f"One seed each, torch {found['versions']['torch']}. From [`inversion.json`]({link(file, page)})."
    return f"{table((*titles, 'recognised, %'), rows, 'lll' + 'r' * 4)}\n\n{made}"


def accuracy(_: str, page: Path, root: Path) -> str:
    """Whole methods on both paths: means over seeds, and the differences seed by seed."""
    file = root / "results" / "benchmarks" / "accuracy.json"
    if not file.exists():
        return "Not measured with the present initialisation yet."
    found = json.loads(file.read_text(encoding="utf-8"))
    config, versions = found["config"], found["versions"]
    seeds = sorted({row["seed"] for row in found["rows"]})
    rows: list[Row] = []
    ways = [way for way in AGAINST if any(row["way"] == way for row in found["rows"])]
    for method, protocol in product(dict.fromkeys(row["method"] for row in found["rows"]), ("global", "matched")):
        value = {
            (row["way"], row["seed"]): 100 * row["accuracy"][protocol]
            for row in found["rows"]
            if row["method"] == method
        }
        plain, *others = (np.array([value[way, seed] for seed in seeds]) for way in ("plain fp32", *ways))
        apart = [f"{(d := other - plain).mean():+.1f} ± {d.std(ddof=1):.1f}" for other in others]
        each = [", ".join(f"{point:+.1f}" for point in other - plain) for other in others]
        shown = [f"{mean} ({points})" for mean, points in zip(apart, each, strict=True)]
        rows.append((method, protocol, f"{plain.mean():.1f} ± {plain.std(ddof=1):.1f}", *shown))
    head = ("method", "protocol", "plain fp32, %", *(AGAINST[way] for way in ways))
    made = (
        f"Mean ± standard deviation over {len(seeds)} seeds; {config['clients']} clients, {config['model']}, "
        f"{versions['machine']}, torch {versions['torch']}. From [`accuracy.json`]({link(file, page)})."
    )
    return f"{table(head, rows, 'llr' + 'r' * len(ways))}\n\n{made}"


def at_once(_: str, page: Path, root: Path) -> str:
    """Trainings at once and in turn: time, last losses, and whether all weights have the same bits."""
    file, found = read_stored(root, "benchmarks/at-once.json")
    rows = [
        (
            run["way"],
            f"{run['seconds']:.1f}",
            ", ".join(f"{loss:.4f}" for loss in run["last_train_loss"]),
            run["sha256"][:12],
        )
        for run in found["runs"]
    ]
    head = ("five trainings", "seconds", "last training losses", "SHA-256 of all weights")
    note = f"From [`at-once.json`]({link(file, page)}); the first run also warms the GPU up."
    return f"{table(head, rows, 'lrll')}\n\n{note}"


def waiting(_: str, page: Path, root: Path) -> str:
    """A step alone and beside a neighbour that takes the same steps, for each way to wait."""
    file, found = read_stored(root, "benchmarks/waiting.json")
    rows = [
        (row["way"], f"{row['alone_ms']:.0f}", ", ".join(f"{ms:.0f}" for ms in row["at_once_ms"]))
        for row in found["rows"]
    ]
    versions = found["versions"]
    head = ("threads that wait", "alone, ms a step", "two processes at once, ms a step")
    made = (
        f"{found['model']}, batch {found['batch']}, {versions['threads']} threads, {versions['cores']} cores, torch "
        f"{versions['torch']}. From [`waiting.json`]({link(file, page)})."
    )
    if "demos" in found:
        alone, first, second = found["demos"]["alone"] + found["demos"]["at_once"]
        same = len({demo["rows_sha256"] for demo in (alone, first, second)}) == 1
        times = [f"{demo['seconds'] / 60:.1f}" for demo in (alone, first, second)]
        made += (
            f"\n\n`fedbicross demo` on these cores: alone {times[0]} min, two at once {times[1]} and {times[2]} min, "
            f"{'with the same' if same else 'with OTHER'} rows."
        )
    return f"{table(head, rows, 'lrr')}\n\n{made}"


def soak(_: str, page: Path, root: Path) -> str:
    """What `make soak` found: uploads made up and fused, verbs killed, files damaged."""
    file, found = read_stored(root, "benchmarks/soak.json")
    fuzz, versions = found["fuzz"], found["versions"]
    wrong = f"{fuzz['refused']:,} refused with a code, {fuzz['accepted']:,} accepted, {fuzz['tracebacks']} tracebacks"
    first = f"**Uploads made up**: {fuzz['cases']:,} through the checks of {fuzz['methods']} methods: {wrong}."
    if "fused" in fuzz:
        tried = fuzz["fused"] + fuzz["refused_at_fusion"] + fuzz["fusion_failures"]
        first += (
            f" {tried:,} of those accepted were fused with two honest uploads: {fuzz['fused']:,} times finite replies, "
            f"{fuzz['refused_at_fusion']:,} refused with a code, {fuzz['fusion_failures']} failures."
        )
    killed = [row for row in found["kills"] if row["kills"]]
    kills = [(f"`{r['verb']}`", *(str(r.get(key, 0)) for key in ("kills", "same", "refused", "bad"))) for r in killed]
    counted = ("files", "cases", "refused", "same", "silent", "tracebacks", "hangs")
    damage = [(f"`{row['verb']}`", *(str(row[key]) for key in counted)) for row in found["damage"]]
    head = ("verb", "files it may read", "damaged, one at a time", "refused with a code", "same result")
    tables = [
        table(("verb", "killed", "run again: the same result", "refused plainly", "anything else"), kills, "lrrrr"),
        table((*head, "another result, silently", "tracebacks", "hangs"), damage, "lrrrrrrr"),
    ]
    made = (
        f"{found['failed']} failures in {found['minutes']:.0f} minutes with seed {found['seed']}, "
        f"Python {versions['python']}, torch {versions['torch']}. From [`soak.json`]({link(file, page)})."
    )
    return "\n\n".join([first, *tables, made])


def suite(_: str, page: Path, root: Path) -> str:
    """The tests under every setting: counts and minutes."""
    file, found = read_stored(root, "benchmarks/suite.json")
    rows = [
        (
            row["setting"],
            " ".join(f"`{name}={value}`" for name, value in row["environment"].items()),
            *(row[count] for count in ("passed", "failed", "skipped")),
            f"{row['seconds'] / 60:.1f}",
            row["commit"],
            row["note"],
        )
        for row in found["rows"]
    ]
    head = ("setting", "set to", "passed", "failed", "skipped", "minutes", "commit", "")
    made = f"Two workers, torch {found['versions']['torch']}. From [`suite.json`]({link(file, page)})."
    return f"{table(head, rows, 'llrrrrll')}\n\n{made}"


def superseded(_: str, page: Path, root: Path) -> str:
    """Old values of results that were taken out, beside what has been made again."""
    file, found = read_stored(root, "benchmarks/superseded.json")
    rows: list[Row] = []
    for old in found["rows"]:
        stored = root / "results" / old["run"] / "results.json"
        new = {row["method"]: row for row in load(old["run"], root)["rows"]} if stored.exists() else {}
        again = new.get(old["method"])
        if old["method"] != "majority":
            rows.append((old["run"], old["method"], _three(old), "not made again" if again is None else _three(again)))
    head = ("stored result", "method", "old: global / matched / label-set %", "new")
    made = f"Old values: commit {found['commit']}, [`superseded.json`]({link(file, page)}). One seed each."
    return f"{table(head, rows, 'llrr')}\n\n{made}"


def _three(row: Mapping[str, Mapping[str, float]]) -> str:
    return " / ".join(f"{100 * row['accuracy'][protocol]:.1f}" for protocol in ("global", "matched", "label_set"))


def _time_and_memory(entry: Mapping[str, float]) -> tuple[str, str]:
    return f"{entry['ms']:.1f}", f"{entry['peak_gb']:.1f}"


def longer(run: str, page: Path, root: Path) -> str:
    """From a run of one seed, perhaps with fewer epochs than the paper's, and its progress: the time of all of them."""
    from fedbicross.methods import METHODS

    results, file = load(run, root), root / "results" / run / "progress.csv"
    with file.open(encoding="utf-8", newline="") as lines:
        stamps = list(csv.DictReader(lines))
    rows: list[Row] = []
    for row in results["rows"]:
        stages = {stamp["stage"] for stamp in stamps if stamp["stage"].startswith(f"{row['method']}: ")}
        for stage in sorted(name for name in stages if name.endswith("distillation")):
            own_stamps = [stamp for stamp in stamps if stamp["stage"] == stage]
            calls, seeds = {stamp["call"] for stamp in own_stamps}, results["config"]["seeds"]
            if len(own_stamps) < 2 or len(calls) > 1 or len(seeds) > 1:
                raise ValueError(f"{run}: {stage} was not made in one call with one seed, or too fast to be measured")
            seen = [(float(stamp["seconds"]), int(stamp["done"])) for stamp in own_stamps]
            (began, first), (ended, last) = seen[0], seen[-1]
            each = (ended - began) / (last - first)
            epochs: int = METHODS[row["method"]].Config().epochs  # type: ignore[attr-defined]
            whole = last * epochs // results["config"]["method"].get(row["method"], {}).get("epochs", epochs)
            own = row["seconds"] - row["seconds_by_stage"]["local_training"]
            full = own + (whole - last) * each
            rows.append((stage, f"{last:,}", f"{1e3 * each:.1f}", f"{own:.0f}", f"{whole:,}", f"{full:.0f}"))
    head = ("stage", "steps measured", "ms a step", "whole method, s", "steps in the paper", "with these, s")
    source = f"[`results/{run}/results.json`]({link(root / 'results' / run / 'results.json', page)})"
    log = f"[`progress.csv`]({link(file, page)}) beside it, the log of that run"
    return f"{table(head, rows, 'lrrrrr')}\n\nFrom {source} and {log}."


def stages(run: str, page: Path, root: Path) -> str:
    """Seconds of each stage of a run's FedBiCross rows, client training left out."""
    shown = ("upload", "fuse", "personalize")
    rows: list[Row] = []
    for row in load(run, root)["rows"]:
        if row["method"].startswith("fedbicross"):
            seconds = [row["seconds_by_stage"][stage] for stage in shown]
            rows.append((row["method"], *(f"{value:.1f}" for value in seconds), f"{sum(seconds):.1f}"))
    source = f"[`results/{run}/results.json`]({link(root / 'results' / run / 'results.json', page)})"
    return f"{table(('method', *shown, 'all, s'), rows, 'lrrrr')}\n\nFrom {source}."


PRIMUM_AND_ITS_TEACHER = ("ensemble:consensus", "primum:student")


def primum_levels(_: str, page: Path, root: Path) -> str:
    """`python -m benchmarks.gates`: what the level of the mixture's test lets in, and what that wins and loses."""
    file, stored = read_stored(root, "primum/gates.json")
    found = stored["levels"]
    keys = ("level", "trials", "let_in", "won", "lost", "lower")
    rows = [tuple("none" if key == "level" and row[key] == 1 else row[key] for key in keys) for row in found]
    titles = ("level", "trials", "mixtures let in", "answers won", "lost", "trials with more lost than won")
    return f"{table(titles, rows, 'r' * 6)}\n\nFrom [`gates.json`]({link(file, page)})."


def primum_estimated(_: str, page: Path, root: Path) -> str:
    """`python -m benchmarks.gates`: the student under three class mixes, beside training alone."""
    file, found = read_stored(root, "primum/gates.json")
    rows = []
    for cell in found["cells"]:
        data, partition, _, seed = cell["cell"].split("-")
        everybody = "primum:estimated, everybody's patients"
        shown = [(cell["alone"], "matched"), ("primum:student", "matched"), ("primum:estimated", "matched")]
        shown += [("primum:student", "global"), (everybody, "global")]
        rows.append((f"{data}, {partition}", seed, *(f"{100 * cell['accuracy'][m][p]:.1f}" for m, p in shown)))
    titles = ("data, α", "seed", "own patients: alone %", "student %", "estimated %")
    titles = (*titles, "everybody's: student %", "estimated %")
    return f"{table(titles, rows, 'l' + 'r' * 6)}\n\nFrom [`gates.json`]({link(file, page)})."


def primum_no_counts(_: str, page: Path, root: Path) -> str:
    """`python -m benchmarks.no_counts`: what is read off the networks, and what the teacher loses."""
    file, found = read_stored(root, "primum/no-counts.json")
    rows = [
        (
            row["alpha"],
            row["seed"],
            f"{row['found']} of {row['classes']}",
            f"{row['taken_for_present']} of {row['missing']}",
            f"{row['rank_correlation']:.2f}",
            f"{row['exponent']:.2f}",
            *(f"{100 * row['accuracy'][way]:.1f}" for way in ("counts", "shown", "alike")),
        )
        for row in found["rows"]
    ]
    titles = ("α", "seed", "classes found", "absent ones taken for present", "rank correlation", "exponent")
    ways = ("teacher % with true counts", "with counts read off", "all alike")
    return f"{table((*titles, *ways), rows, 'r' * 9)}\n\n{_drawn_cells(found, file, page)}"


def primum_one_class(_: str, page: Path, root: Path) -> str:
    """`python -m benchmarks.one_class`: the teacher with and without made-up outliers at hospitals with one class."""
    file, found = read_stored(root, "primum/one-class.json")
    ways = list(found["rows"][0]["accuracy"])
    rows = [
        (row["partition"], row["seed"], row["lone"], row["clients"], *(f"{100 * row['accuracy'][w]:.1f}" for w in ways))
        for row in found["rows"]
    ]
    titles = ("partition", "seed", "with one class", "of N", *(f"teacher %, {way}" for way in ways))
    return f"{table(titles, rows, 'l' + 'r' * (len(titles) - 1))}\n\n{_drawn_cells(found, file, page)}"


def _drawn_cells(found: Mapping[str, Any], file: Path, page: Path) -> str:
    config, training = found["config"], found["config"]["training"]
    images = config["data"]["train_size"]
    return (
        f"Drawn cells, {images:,} training images, {config['model']}, {training['epochs']} epochs, torch "
        f"{found['versions']['torch']}. From [`{file.name}`]({link(file, page)})."
    )


def primum_greys(_: str, page: Path, root: Path) -> str:
    """`python -m benchmarks.greys`: X-rays read as grey and as colour."""
    file, found = read_stored(root, "primum/greys.json")
    rows = [
        (
            "colour" if row["channels"] == 3 else "grey",
            row["seed"],
            *(f"{100 * row[spec][key]:.1f}" for key in ("accuracy", "balanced") for spec in PRIMUM_AND_ITS_TEACHER),
        )
        for row in sorted(found["rows"], key=lambda row: (row["channels"], row["seed"]))
    ]
    names = [f"{spec}, {key} %" for key in ("accuracy", "balanced") for spec in ("teacher", "student")]
    made = f"Chest X-rays at {found['rows'][0]['pixels']} px, α = 0.1, N = 5, resnet8, {found['epochs']} epochs"
    source = f"torch {found['versions']['torch']}. From [`greys.json`]({link(file, page)})."
    return f"{table(('read as', 'seed', *names), rows, 'lrrrrr')}\n\n{made}, {source}"


def primum_margins(_: str, page: Path, root: Path) -> str:
    """What the margin of a referral was chosen by."""
    file, stored = read_stored(root, "primum/gates.json")
    found = stored["margins"]
    rows = [
        (
            f"{row['margin']:.1f}",
            row["partition"].replace("-", ", "),
            row["clients"],
            f"{row['lost_per_thousand']:.2f}",
            f"{100 * row['alone_everywhere']:.1f}",
            f"{100 * row['primum_everywhere']:.1f}",
        )
        for row in found
    ]
    titles = (
        "margin",
        "data, α",
        "clients",
        "own answers lost, ‰",
        "alone, everywhere %",
        "with referral, everywhere %",
    )
    return f"{table(titles, rows, 'rlrrrr')}\n\nFrom [`gates.json`]({link(file, page)})."


def primum_development(_: str, page: Path, root: Path) -> str:
    """What primum's settings were chosen by."""
    file, found = read_stored(root, "primum/development.json")
    teacher = [
        (entry["seed"], *(entry[by] for by in ("counts", "contrast", "root"))) for entry in found["teacher_weights"]
    ]
    keys = ("start", "zoom", "cutmix", "lr", "steps_distil")
    variants = [
        (*(entry[key] for key in keys), *entry["accuracy"], f"{np.mean(entry['accuracy']):.1f}")
        for entry in found["variants"]
    ]
    first = table(("seed", "teacher by counts %", "by contrast %", "by its root %"), teacher, "rrrr")
    titles = ("start", "zoom", "cutmix", "rate", "steps", *(f"seed {seed} %" for seed in range(3)), "mean %")
    second = table(titles, variants, "l" + "r" * (len(titles) - 1))
    earlier = [(e["seed"], e["alpha_bn"], e["temperature"], e["accuracy"]) for e in found["students"] if e["seed"]]
    third = table(("seed", "α_BN", "τ", "student %"), earlier, "rrrr")
    words = f"Blood, {found['partition']}, N = {found['clients']}, official validation images."
    return f"{first}\n\n{second}\n\n{third}\n\n{words} From [`development.json`]({link(file, page)})."


def threads(_: str, page: Path, root: Path) -> str:
    """FedISCA's quick settings with two threads and with one."""
    del page
    found = json.loads((root / "results" / "benchmarks" / "threads.json").read_text(encoding="utf-8"))
    seeds = sorted({row["seed"] for row in found["rows"]})
    rows, means = [], {}
    for count in (2, 1):
        values = [
            100 * row["accuracy"]["global"]
            for seed in seeds
            for row in found["rows"]
            if (row["threads"], row["seed"], row["method"]) == (count, seed, "fedisca")
        ]
        means[count] = values
        rows.append(
            (count, *(f"{value:.1f}" for value in values), f"{np.mean(values):.1f}", f"{np.std(values, ddof=1):.1f}")
        )
    apart = np.subtract(means[2], means[1])
    error = np.std(apart, ddof=1) / len(apart) ** 0.5
    words = f"Two less one: {np.mean(apart):+.1f} on average, standard error {error:.1f}."
    header = ("threads", *(f"seed {seed}" for seed in seeds), "mean", "sd")
    return f"{table(header, rows, 'r' * len(header))}\n\n{words}"


def house(_: str, page: Path, root: Path) -> str:
    """The size of the code before and after the rebuild, by `benchmarks.house`."""
    file, found = read_stored(root, "benchmarks/house.json")
    before, now, commits = found["before"], found["now"], found["commits"]

    def lines(kind: str) -> tuple[str, ...]:
        then, today, rebuilt = before[f"{kind}_lines"], now[f"{kind}_lines"], found["rebuilt_lines"][kind]
        return f"lines in `{kind}`", f"{then:,}", f"{today:,}", f"{rebuilt:+,}", f"{today - then - rebuilt:+,}"

    def plain(title: str, of: Callable[[Mapping[str, Any]], object]) -> tuple[str, ...]:
        return title, str(of(before)), str(of(now)), "", ""

    rows = [
        lines("src"),
        lines("tests"),
        plain("modules", lambda tree: tree["modules"]),
        plain("imports inside functions", lambda tree: tree["inner_imports"]),
        plain("lines of the longest method", lambda tree: "{1} (`{0}`)".format(*tree["longest_method"])),
        plain("files to read for stage 2 of FedBiCross", lambda tree: len(tree["stage_2"])),
        plain("modules that a run of FedBiCross imports", lambda tree: tree["run_imports"]),
        plain("modules of which it calls a function", lambda tree: tree["run_calls"]),
    ]
    header = ("", f"before (`{commits['before']}`)", f"now (`{commits['now']}`)", "by the rebuild", "by all else")
    return f"{table(header, rows, 'lrrrr')}\n\nRaw numbers: [`house.json`]({link(file, page)})."


def kernels(how: str, page: Path, root: Path) -> str:
    """`python -m benchmarks.kernels`: the same run under other kernels and threads. ``short``: one sentence."""
    file, found = read_stored(root, "benchmarks/kernels.json")
    runs = {(run["setting"], run["seed"]): run for run in found["runs"]}
    settings = list(dict.fromkeys(setting for setting, _ in runs))
    seeds = sorted({seed for _, seed in runs if all((setting, seed) in runs for setting in settings)})
    first, others = settings[0], [setting for setting in settings[1:] if not setting.endswith("again")]
    value = {
        (*key, row["method"], protocol): 100 * row["accuracy"][protocol]
        for key, run in runs.items()
        for row in run["rows"]
        for protocol in ("matched", "global")
    }
    names = [(row["method"], p) for row in runs[first, seeds[0]]["rows"] for p in ("matched", "global")]

    def apart(setting: str, name: tuple[str, str]) -> list[float]:
        return [value[setting, seed, *name] - value[first, seed, *name] for seed in seeds]

    if how == "short":
        moved = sorted((abs(d), name[0]) for s in others for name in names for d in apart(s, name))
        alone = [size for size, method in moved if method.startswith("local_only")]
        return (
            "A smaller run of the same kind, made under other kernels and with another number of threads: training "
            f"alone moved by up to {alone[-1]:.1f} points, no row by more than {moved[-1][0]:.1f} (`{moved[-1][1]}`). "
            f"[All rows]({link(root / 'docs' / 'reproduce.md', page)}#on-another-processor)."
        )
    rows: list[Row] = []
    for name in names:
        start = ", ".join(f"{value[first, seed, *name]:.1f}" for seed in seeds)
        each = [", ".join(f"{point:+.1f}" for point in apart(setting, name)) for setting in others]
        rows.append((f"`{name[0]}`", name[1], start, *each))
    head = ("method", "protocol", f"{first}, %", *(f"{setting}, points" for setting in others))
    again = [key for key in runs if key[0].endswith("again")]
    same = all(runs[key]["rows_sha256"] == runs[first, key[1]]["rows_sha256"] for key in again)
    config, versions = found["config"], found["versions"]
    made = (
        f"Seed {', '.join(map(str, seeds))}; {config['data']['train_size']:,} drawn cells, "
        f"{config['data']['test_size']:,} test images, {config['model']}, {config['training']['epochs']} epochs; "
        f"{versions['cpu']}, as it is with torch's {versions['cpu_capability']} kernels, torch {versions['torch']}. "
        f"The first column made again has {'the same' if same else 'OTHER'} bytes. "
        f"From [`kernels.json`]({link(file, page)})."
    )
    return f"{table(head, rows, 'll' + 'r' * (1 + len(others)))}\n\n{made}"


def privacy(what: str, page: Path, root: Path) -> str:
    """`python -m benchmarks.privacy`: accuracy against ε, or by the number of random directions."""
    name = f"{what}.json"
    file = root / "results" / "privacy" / name
    if not file.exists():
        return "Not measured yet."
    found = json.loads(file.read_text(encoding="utf-8"))
    groups: dict[tuple[float, int], dict[str, list[Any]]] = {}
    for row in found["rows"]:
        settings = row["settings"]
        key = (settings.get("epsilon") or float("inf"), settings["projection"] or 10**9)
        groups.setdefault(key, {}).setdefault(row["sites"], []).append(row)
    places = list(dict.fromkeys(row["sites"] for row in found["rows"]))
    rows: list[Row] = []
    for (epsilon, width), cells in sorted(groups.items(), reverse=True):
        noise = "none" if epsilon == float("inf") else f"{epsilon:g}"
        features = "all" if width == 10**9 else str(width)
        rows.append((noise, features, *(_mean_and_spread(cells.get(place, [])) for place in places)))
    seeds = len({row["seed"] for row in found["rows"]})
    single = ", one seed without noise" if any("epsilon" not in row["settings"] for row in found["rows"]) else ""
    about = (
        f"Accuracy (balanced accuracy) in %, on {found['test_images']:,} images: {found['scored_on']}; mean ± standard "
        f"deviation over {seeds} seeds of noise and partition{single}; δ = {found['delta']:g} for each "
        f"site. Raw results: [`{name}`]({link(file, page)}), torch {found['versions']['torch']}."
    )
    return f"{table(('ε', 'features', *places), rows, 'll' + 'r' * len(places))}\n\n{about}"


def audit_time(what: str, page: Path, root: Path) -> str:
    """`python -m benchmarks.audit`: one line."""
    file, found = read_stored(root, "privacy/audit-time.json")
    each = ", ".join(f"{row['model']} {row['seconds']:.0f} s" for row in found["rows"])
    return (
        f"With `--quick`, measured: {each} ({found['size']} pixels, {found['images']:,} images, {found['threads']} "
        f"threads of an {found['versions']['cpu']}; from [`audit-time.json`]({link(file, page)}))."
    )


def private_training(what: str, page: Path, root: Path) -> str:
    """`python -m benchmarks.private_training`: alone, with noise, together, and behind the gate."""
    file = root / "results" / "privacy" / f"{what}.json"
    if not file.exists():
        return "Not measured yet."
    found = json.loads(file.read_text(encoding="utf-8"))
    lines = {(one["data"], one["partition"], one["model"], one["epsilon"]): one for one in found["summary"]}
    places = list(dict.fromkeys((data, kind) for data, kind, _, _ in lines))
    rows: list[Row] = []
    for model, epsilon in dict.fromkeys((model, epsilon) for _, _, model, epsilon in lines):
        cells = [lines.get((*place, model, epsilon)) for place in places]
        name = model if model.startswith(("alone", "the same")) else f"`{model}`"
        rows.append((name, "none" if epsilon is None else f"{epsilon:g}", *map(_beside_alone, cells)))
    seeds = sorted({row["seed"] for row in found["rows"]})
    sizes = f"5 sites of {found['images']} images on average" if found["images"] else "5 sites"
    tests = f" (of {found['tests']:,} test images)" if found["tests"] else ""
    titles = [f"{data}, {'alike' if kind == 'iid' else 'α = 0.5'}" for data, kind in places]
    about = (
        f"Accuracy in % on a site's own test images / on all of them{tests}, means over {sizes} and "
        f"{'one seed' if len(seeds) == 1 else f'{len(seeds)} seeds'}; in brackets how many sites are better and "
        "worse off than alone without noise, "
        f"on their own images, beyond chance. δ = {found['delta']:g}. "
    )
    if "chosen" in found:
        settings = [
            f"ε = {epsilon}: {one['epochs']} epochs, batches of {one['batch_size']}, rate {one['lr']:g}"
            for epsilon, one in found["chosen"].items()
        ]
        about += (
            f"{found['model']} with group normalisation where nothing else is said; DP-SGD with {'; '.join(settings)}, "
            f"the best of {len(found['development']) // len(found['chosen'])} on images that one site of "
            f"{found['developed_on']} held back. "
        )
    if len({line["sites"] for line in found["summary"]}) > 1:
        about += "A site too small for any class to be told from the noise has no such model, and is not in that mean. "
    versions = found["versions"]
    about += f"Raw results: [`{what}.json`]({link(file, page)}), {versions['device']}, torch {versions['torch']}."
    return f"{table(('model', 'ε', *titles), rows, 'll' + 'r' * len(places))}\n\n{about}"


def _beside_alone(line: Mapping[str, Any] | None) -> str:
    if line is None:
        return "–"
    shown = f"{100 * line['matched']:.1f} / {100 * line['global']:.1f}"
    changed = line["matched_better"] or line["matched_worse"]
    return f"{shown} (+{line['matched_better']} −{line['matched_worse']})" if changed else shown


def _mean_and_spread(rows: list[Any]) -> str:
    if not rows:
        return "–"
    accuracy = 100 * np.array([row["accuracy"] for row in rows])
    balanced = 100 * np.mean([row["balanced_accuracy"] for row in rows])
    spread = f" ± {accuracy.std(ddof=1):.1f}" if len(rows) > 1 else ""
    return f"{accuracy.mean():.1f}{spread} ({balanced:.1f})"


def poison(what: str, page: Path, root: Path) -> str:
    """`python -m benchmarks.poison`: attacks, personal models under them, several attackers, honest sites; rules."""
    if what == "rules":
        return _rules()
    if what == "trigger":
        return _trigger(page, root)
    file, found = read_stored(root, "benchmarks/poison.json")
    blocks = {"attacks": _attacks, "personal": _personal_under_attack, "hostile": _hostile, "doors": _doors}
    blocks["half"] = _half
    made = blocks[what](found) if what in blocks else _honest(found[what])  # "honest" or "fresh"
    return made + (f"\n\nMade by `python -m benchmarks.poison`; raw results: [`poison.json`]({link(file, page)}).")


def _rules() -> str:
    from fedbicross.parts import defence as d

    rows = [
        ("weights of any layer, the last one with its bias", f"over {d.MOST_SIZE:g} times the others'", "left out"),
        ("the last layer alone", f"over {d.MOST_HEAD:g} times", "made as large as theirs"),
        ("batch-normalisation statistics", f"over {d.MOST_STATISTICS:g} times as large or small", "left out"),
        (
            "cosine with the start that all share, of trunk or head",
            f"under {d.LEAST_START:g} of the others', where these keep over {d.CLEAR_START:g}",
            "left out",
        ),
        ("features of a frozen encoder", f"over {d.MOST_LENGTH:g} times as long as the others'", "left out"),
        ("images claimed", f"over {d.MOST_SEEN:g} times those in the batches that the network counted", "left out"),
        ("images claimed", f"over {d.MOST_CLAIMED:,.0f} times the others'", "left out"),
        ("images claimed", f"over {d.MOST_IMAGES:g} times", "they count for no more"),
        (
            f"agreement with the others on {d.PROBES} images of noise, about {d.SHARED} or more shared classes of "
            f"{d.KNOWN} or more images",
            f"under {d.LEAST_AGREEMENT:g}",
            "left out",
        ),
    ]
    return table(("what is compared", "limit", "beyond it"), rows)


def _trigger(page: Path, root: Path) -> str:
    file, found = read_stored(root, "benchmarks/trigger.json")
    rows, lines = found["rows"], []
    for kind, words in (("pink", "pink noise"), ("inverted", "images inverted from the network itself")):
        bad = ", ".join(f"{row[kind]['times_smaller']:.1f}" for row in rows)
        honest = sorted((times for row in rows for times in row[kind]["honest_times_smaller"]), reverse=True)
        least = min(row[kind]["times_smaller"] for row in rows)
        above = sum(times >= least for times in honest)
        seconds = max(row[kind]["seconds_per_network"] for row in rows)
        lines.append((words, bad, f"{honest[0]:.1f}", f"{above} of {len(honest)}", f"{seconds:.0f} s"))
    head = ("searched on", "behind the back door", "most, honest", "honest classes at least as far", "per network")
    opened = " and ".join(_percent(row["opened"]) for row in rows)
    return (
        f"{table(head, lines, 'lrrrr')}\n\nThe back doors open for {opened} of test images. Made by "
        f"`python -m benchmarks.trigger`; raw results: [`trigger.json`]({link(file, page)})."
    )


def _attacks(found: Mapping[str, Any]) -> str:
    cells: dict[tuple[str, str], dict[bool, Any]] = {}
    for row in found["attacks"]:
        cells.setdefault((row["attack"], row["method"]), {})[row["defended"]] = row
    attacks, methods = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    rows = []
    for attack in attacks:
        both = [cells[attack, method] for method in methods if (attack, method) in cells]
        opened = ""
        if attack.startswith("back door"):
            opened = ", ".join(f"{_percent(b[False]['opened'])} / {_percent(b[True]['opened'])}" for b in both)
        rows.append((attack, *(_outcome(b) for b in both), opened))
    header = ("attacker's upload", *(f"`{method}`" for method in methods), "back door opens, in this order")
    return f"{table(header, rows, 'l' + 'r' * len(methods) + 'l')}\n\n{_beyond_the_rules(found)}"


def _beyond_the_rules(found: Mapping[str, Any]) -> str:
    """Which attacks are not left out although they cost honest sites more than 3 points."""
    rows = {(row["method"], row["attack"]): row for row in found["attacks"] if row["defended"]}

    def worst(beside: str) -> str:
        lost: dict[str, list[str]] = {}
        for (method, attack), row in rows.items():
            points = 100 * (rows[method, beside]["accuracy"] - row["accuracy"])
            gone = row["refused"] or any(note["attacker"] and note["left_out"] for note in row["notes"])
            if points > 3 and not gone and attack not in ("honest", "left out"):
                lost.setdefault(attack, []).append(f"`{method}` {points:.1f}")
        return "; ".join(f"{attack} ({', '.join(each)})" for attack, each in lost.items()) or "nothing"

    return (
        "With the rules more than 3 points below the federation in which that site is honest, and not left out: "
        f"{worst('honest')}. More than 3 points below the one without that site, and not left out: {worst('left out')}."
    )


def _outcome(both: Mapping[bool, Any]) -> str:
    """Accuracy without and with the defence, and what the defence did to the attacker."""
    mine = [note for note in both[True]["notes"] if note["attacker"]]
    done = "refused" if both[True]["refused"] else "left out" if any(n["left_out"] for n in mine) else "limited"
    before = f"{100 * both[False]['accuracy']:.1f}" if False in both else "not run"
    text = f"{before} / {100 * both[True]['accuracy']:.1f}"
    return f"{text}, {done}" if mine or both[True]["refused"] else text


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _personal_under_attack(found: Mapping[str, Any]) -> str:
    """Means over honest sites; the largest loss of any; how many used the shared model."""
    rows = []
    made = {(row["method"], row["attack"], row["defended"]): row for row in found["personal"]}
    for method, attack in dict.fromkeys(key[:2] for key in made):
        off, on = made[method, attack, False], made[method, attack, True]
        cells = [f"{100 * _mean(off, 'alone'):.1f}"]
        for row in (off, on):
            sites = [site for site in row["sites"] if site["images"]]
            worst = max(site["alone"] - site["personal"] for site in sites)
            used = sum(site["let_in"] for site in sites)
            cells += [f"{100 * _mean(row, 'personal'):.1f}", f"{100 * worst:+.1f}", f"{used} of {len(sites)}"]
        doors = (_mean(off, "alone_opened"), _mean(off, "personal_opened"), _mean(on, "personal_opened"))
        cells.append(" / ".join(map(_percent, doors)) if off["attack"].startswith("back door") else "")
        rows.append((f"`{method}`", attack, *cells))
    ways = [f"{way}{what}" for way in ("trusting", "defended") for what in ("", ": most lost", ": used by")]
    header = ("method", "attacker's upload", "alone", *ways, "back door opens, in this order")
    return table(header, rows, "ll" + "r" * 7 + "l")


def _mean(row: Mapping[str, Any], what: str) -> float:
    return float(np.mean([site[what] for site in row["sites"] if site["images"]]))


def _half(found: Mapping[str, Any]) -> str:
    """What a cap at half of all images costs honest federations, where it applies."""
    methods = [name for name, value in found["half"][0].items() if isinstance(value, dict)]
    rows = []
    for name in dict.fromkeys(row["partition"] for row in found["half"]):
        mine = [row for row in found["half"] if row["partition"] == name]
        hit = [row for row in mine if any(row[method]["limited"] for method in methods)]
        if hit:
            lost = [", ".join(f"{100 * row[method]['lost']:.1f}" for row in hit) for method in methods]
            rows.append((name, len(mine), len(hit), *lost))
    header = ("federations", "how many", "limited", *(f"`{method}`: points lost in these" for method in methods))
    return table(header, rows, "l" + "r" * (2 + len(methods)))


def _doors(found: Mapping[str, Any]) -> str:
    """Accuracy on all test images, and how many marked ones are said to be of the attacker's class, by length."""
    kinds = ("honest", "left out", "back door")
    rows = []
    for steps in sorted({row["steps"] for row in found["doors"]}):
        made = {(row["seed"], row["upload"]): row for row in found["doors"] if row["steps"] == steps}
        seeds = sorted({seed for seed, _ in made})
        rows += [(steps, seed, *(_door([made[seed, kind]]) for kind in kinds)) for seed in seeds]
        rows.append((steps, "mean", *(f"**{_door([made[seed, kind] for seed in seeds])}**" for kind in kinds)))
    return table(("steps of an inversion", "seed", *kinds), rows, "rrrrr")


def _door(rows: Sequence[Any]) -> str:
    accuracy, opened = (100 * sum(row[name] for row in rows) / len(rows) for name in ("accuracy", "opened"))
    return f"{accuracy:.1f} / {opened:.0f}"


def _hostile(found: Mapping[str, Any]) -> str:
    kinds: dict[tuple[str, str], list[Any]] = {}
    for row in found["hostile"]:
        kinds.setdefault((row["partition"], f"{row['hostile']} of {row['sites']}"), []).append(row)
    rows = []
    for (name, share), several in kinds.items():
        cells: list[str] = []
        for attack in ("logits x100", "labels flipped"):
            mine = [row for row in several if row["attack"] == attack]
            each = [(row["hostile"], row[spec]) for row in mine for spec in row if isinstance(row[spec], dict)]
            sums = [sum(one[1][k] for one in each) for k in ("found", "wronged")]
            cells += [f"{sums[0]} of {sum(one[0] for one in each)}", str(sums[1])]
        rows.append((name, len({row["seed"] for row in several}), share, *cells))
    wronged = "honest ones left out"
    header = ("federations", "how many", "hostile", "logits x100: found", wronged, "labels flipped: found", wronged)
    return table(header, rows, "lrrrrrr")


def _honest(found: Sequence[Any]) -> str:
    kinds: dict[str, list[Any]] = {}
    for row in found:
        kinds.setdefault(row["partition"], []).append(row)
    rows = []
    for name, several in kinds.items():
        each = [row[spec] for row in several for spec in row if isinstance(row[spec], dict)]
        sums = [sum(len(one["notes"]) for one in each), *(sum(one[k] for one in each) for k in ("left_out", "limited"))]
        rows.append((name, len(several), *sums, f"{100 * max(one['lost'] for one in each):.1f}"))
    return table(
        ("federations", "how many", "notes", "left out", "limited", "largest loss, points"), rows, "l" + "r" * 5
    )
