"""Blocks of configs/README.md and results/README.md: which run is described where, and what made each stored file."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from docs.parts import Row, link, table

SPECIAL = {  # (what, made by) of every stored file that is no case of configs/ and no cell of benchmarks.primum
    "demo/results.json": ("the demo", "`fedbicross demo`, then `python -m docs.store runs/demo`"),
    "benchmarks/accuracy.json": (
        "methods on the plain and the fast path",
        "`python -m benchmarks.accuracy --set data.dir=DIR`",
    ),
    "benchmarks/fedbicross-rates.json": (
        "rates of FedBiCross's stage 3, on training images held back",
        "`python -m benchmarks.fedbicross_stages --data-dir DIR --develop`",
    ),
    "benchmarks/fedbicross-stages.json": (
        "FedBiCross taken apart, stage by stage",
        "`python -m benchmarks.fedbicross_stages --data-dir DIR`",
    ),
    "benchmarks/fedisca-student.json": (
        "FedISCA's student after every trajectory, with one thing changed at a time",
        "`python -m benchmarks.fedisca_student --data-dir DIR`; three of its six cells, not every way in each",
    ),
    "benchmarks/falcon-teachers.json": (
        "FALCON's teachers on the uploaded sequences, and their students",
        "`python -m benchmarks.falcon_teachers --data-dir DIR`",
    ),
    "benchmarks/at-once.json": ("trainings at once and in turn", "`python -m benchmarks.at_once`"),
    "benchmarks/cpu.json": ("speed of a processor", "`make bench`"),
    "benchmarks/gpu.json": (
        "speed, growth and memory on a GPU",
        "`python -m benchmarks.gpu --data-dir DIR`; `--parts training` in a call of its own, with nothing compiled yet",
    ),
    "benchmarks/house.json": ("the size of the code", "`python -m benchmarks.house --before CHECKOUT` (of df06ece)"),
    "benchmarks/inversion.json": (
        "what the batch-norm term of a synthesis weighs",
        "`python -m benchmarks.inversion --data-dir DIR`",
    ),
    "benchmarks/kernels.json": (
        "the demo's run, smaller, under other kernels and threads",
        "`python -m benchmarks.kernels`",
    ),
    "benchmarks/soak.json": ("what made-up uploads, kills and damaged files do", "`make soak`"),
    "benchmarks/poison.json": ("attacks of one site, and honest federations", "`python -m benchmarks.poison`"),
    "privacy/audit-time.json": ("seconds of an audit with `--quick`", "`python -m benchmarks.audit`"),
    "privacy/membership.json": (
        "membership inference on single networks, the student and the personal model",
        "`python -m benchmarks.membership --data-dir DIR`",
    ),
    "benchmarks/trigger.json": ("a search for back doors that did not work", "`python -m benchmarks.trigger`"),
    "benchmarks/suite.json": ("the tests under other kernels", "`python -m benchmarks.suite SETTING` for each setting"),
    "benchmarks/superseded.json": ("old values of results", "copied from the results of the commit that it names"),
    "benchmarks/threads.json": (
        "FedISCA with one thread and two",
        "no command is kept; its configuration is in the file",
    ),
    "benchmarks/waiting.json": ("how threads wait for each other", "`python -m benchmarks.waiting`"),
    "privacy/membership-memorised.json": (
        "membership inference where networks memorise, and with DP-SGD",
        "`python -m benchmarks.membership --data-dir DIR --device cuda --jobs 6 --epochs 100 --no-augment --shadows 16 "
        "--epsilons 1 4 8 --out results/privacy/membership-memorised.json`",
    ),
    "privacy/dp-sgd.json": (
        "DP-SGD on real images: alone, together, behind the gate",
        "`python -m benchmarks.private_training --data-dir DIR --device cuda --jobs 8 --seeds 0`",
    ),
    "privacy/dp-features.json": (
        "`analytic` on real images: alone, together, behind the gate",
        "`python -m benchmarks.private_training --data-dir DIR --data bloodmnist --partitions dirichlet --seeds 0 "
        "--images 600 --tests 1000 --features DIR`",
    ),
    "privacy/cxr.json": (
        "accuracy against ε for analytic on chest X-rays",
        "`python -m benchmarks.privacy IMAGES --features DIR`",
    ),
    "privacy/cxr-development.json": (
        "what the number of random directions was chosen by, on training images",
        "`python -m benchmarks.privacy IMAGES --features DIR --develop`",
    ),
    "privacy/bloodmnist.json": (
        "the same on bloodmnist",
        "`python -m benchmarks.privacy bloodmnist --data-dir DIR --size 28 --encoder-size 96 --features DIR`",
    ),
    "privacy/dermamnist.json": (
        "the same on dermamnist",
        "`python -m benchmarks.privacy dermamnist --data-dir DIR --size 28 --encoder-size 96 --features DIR`",
    ),
    "primum/gates.json": (
        "primum's gate on the logits of its cells, and the margins it was chosen from",
        "`python -m benchmarks.primum CELLS --data-dir DIR --logits LOGITS`, then `python -m benchmarks.gates LOGITS`",
    ),
    "primum/no-counts.json": ("primum's teacher without class counts", "`python -m benchmarks.no_counts`"),
    "primum/greys.json": ("chest X-rays read as grey and as colour", "`python -m benchmarks.greys --data-dir DIR`"),
    "primum/one-class.json": ("hospitals with one class and made-up outliers", "`python -m benchmarks.one_class`"),
    "primum/development.json": (
        "what primum's settings were chosen by",
        "no command is kept; its settings are in the file",
    ),
}
ALSO = {"blood-orders-as-drawn": ("blood-orders", ["method.falcon.calibrate=false"])}  # a case with another setting
CELL = re.compile(r"primum/(\w+)-(iid|[\d.]+)-(\d+)-(\d+)\.json")
WHERE = frozenset({"name", "data.dir", "device", "threads"})  # where a run was made, not what


def configs(_: str, page: Path, root: Path) -> str:
    """Every run that the files in configs/ describe."""
    rows: list[Row] = []
    for name, (file, config) in _described(root).items():
        found = next((root / "results" / name).glob("*.json"), None)
        stored = f"[yes]({link(found, page)})" if found else "no"
        rows.append((f"[`{file.name}`]({link(file, page)})", f"`{name}`", _what(config.model_dump()), stored))
    return table(("file", "run", "what", "result stored"), rows)


def results(_: str, page: Path, root: Path) -> str:
    """Every stored file: what it is, the command that made it, and where."""
    rows: list[Row] = []
    described = _described(root)
    for file in sorted((root / "results").rglob("*.*")):
        if file.suffix not in (".json", ".csv"):
            continue
        name = file.relative_to(root / "results").as_posix()
        if name.startswith("bench/"):  # hundreds of cells, each with the command that makes it on their own page
            continue
        found = json.loads(file.read_text(encoding="utf-8")) if file.suffix == ".json" else {}
        what, command = SPECIAL.get(name) or _run(name, found, described, root)
        rows.append((f"[{name}]({link(file, page)})", what, command, _machine(found)))
    cells = root / "results" / "bench" / "cells"
    if cells.is_dir():
        what = f"{len(list(cells.rglob('*.json'))):,} cells of `fedbicross bench`, one file each"
        rows.append(("`bench/cells/`", what, "`fedbicross bench run SUITE --out results/bench`", ""))
    return table(("file", "what", "made by", "on"), rows)


def _described(root: Path) -> dict[str, tuple[Path, Any]]:
    """Every run of configs/ by name: its file, and its configuration."""
    from fedbicross.runs.config import cases, load_config

    out: dict[str, tuple[Path, Any]] = {}
    for file in sorted((root / "configs").glob("*.toml")):
        out |= {name: (file, load_config(file, case=name, check_machine=False)) for name in cases(file)}
        if not cases(file):
            out[file.stem] = (file, load_config(file, check_machine=False))
    return out


def _what(config: Mapping[str, Any]) -> str:
    partition = config["partition"]
    skew = f", α = {partition['alpha']}" if partition["kind"] == "dirichlet" else ""
    data = Path(config["data"]["name"]).name
    return f"{data}, {config['clients']} clients, {partition['kind']}{skew}: {', '.join(config['methods'])}"


def _run(name: str, found: Mapping[str, Any], described: Mapping[str, tuple[Path, Any]], root: Path) -> tuple[str, str]:
    """What a stored file of a run is, and the command that made it."""
    run, _, kind = name.partition("/")
    if kind == "progress.csv":
        return "which step was done when", "written along with `results.json` beside it"
    if cell := CELL.fullmatch(name):
        what, note = _what(found["config"]), found.get("note")
        settings = [f"{key}={value}" for key, value in _flat({"method": found["config"]["method"]}).items()]
        words = ["python -m benchmarks.primum", "/".join(cell.groups()), "--data-dir DIR"]
        command = f"`{' '.join([*words, *(f'--set {setting}' for setting in settings)])}`"
        return f"{what}. {note}" if note else what, command
    case, settings = ALSO.get(run, (run, []))
    file, config = described[case]  # an unknown name is an error: nothing is stored without saying how it was made
    if kind == "results.json":
        settings = list(_differences(found["config"], config.model_dump()))
    words = ["python -m benchmarks.papers", file.relative_to(root).as_posix(), "--case", case, "--out DIR"]
    command = f"`{' '.join([*words, *(f'--set {shlex.quote(setting)}' for setting in settings)])}`"
    if kind == "results.json":
        return _what(found["config"]), command
    audit = f"`fedbicross audit run runs/papers/{case} --epochs {found['settings']['epochs']}`"
    return f"audit of {_what(config.model_dump())}", f"{command}, then {audit}"


def _differences(stored: Mapping[str, Any], described: Mapping[str, Any]) -> Iterator[str]:
    """What was set on the command line; a setting that is newer than the stored run is none."""
    old, new = _flat(stored), _flat(described)
    for key in sorted(set(old) - WHERE):
        known = key in new or key.startswith("method.")
        if known and old[key] != new.get(key):
            yield f"{key}={old[key] if isinstance(old[key], str) else json.dumps(old[key])}"
    if missing := [key for key in new if key.startswith("method.") and key not in old]:
        raise ValueError(f"{stored['name']}: stored without {', '.join(missing)}")


def _flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= _flat(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
    return out


def _machine(found: Mapping[str, Any]) -> str:
    versions = found.get("versions")
    if not versions:
        return ""
    python = f", Python {versions['python']}" if "python" in versions else ""
    device = versions.get("cpu", "cpu") if versions["device"] == "cpu" else versions["device"]
    return f"{device}, torch {versions['torch']}{python}"
