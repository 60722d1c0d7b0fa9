"""The same seed gives the same bytes, whatever surrounds the run and in whatever order the clients are named."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import random
import signal
import stat
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rich.style  # draws one number from `random` when it is first imported, by whomever: not ours to prevent
import torch
from PIL import Image

import fedbicross
from cli.console import CONFIG, ENTRY, artefacts, call, config_file, environment, ok, results, timeless
from faults.forge import Forge, leftovers
from fedbicross.bundle.format import canonical_json
from fedbicross.context import Context, MemoryStore
from fedbicross.data import Partition, load_dataset
from fedbicross.federation import records, simulate
from fedbicross.messages import Client, Predictor
from fedbicross.methods import METHODS, create
from fedbicross.methods.base import Method
from small import TINY_METHODS, tiny_clients, tiny_context

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {  # whatever of these a method has: seconds instead of hours
    "rounds": 2,
    "steps": 4,
    "batch": 8,
    "epochs": 2,
    "memory": 2,
    "pool": 6,
    "steps_distil": 3,
    "noise_images": 16,
    "trajectories": 2,
    "probes": 8,
    "images_per_class": 4,
    "bn_steps": 1,
    "batch_synthesis": 8,
    "epochs_personal": 1,
    "batch_personal": 8,
}


def small_context(store: MemoryStore | None = None) -> Context:
    """One epoch of training, and a checkpoint at every step of a method."""
    return replace(tiny_context(epochs=1), store=store or MemoryStore(), seconds_between_stages=0.0)


def small_settings(name: str) -> dict[str, Any]:
    fields = METHODS[name].Config.model_fields
    small = {key: value for key, value in SMALL.items() if key in fields}
    return {**TINY_METHODS.get(name, {}), **small} if "encoder" in fields else small


def small_method(name: str) -> Method[Any]:
    return create(name, {name: small_settings(name)}, quick=True)


def run_small(name: str, clients: list[Client], ctx: Context) -> tuple[dict[str, Predictor], list[dict[str, Any]]]:
    method = small_method(name)
    predictors = simulate(method, clients, ctx)
    return predictors, records(ctx, sorted(client.name for client in clients), method.rounds)


def packed(predictors: dict[str, Predictor]) -> dict[str, bytes]:
    return {name: predictor.pack() for name, predictor in predictors.items()}


# --- surroundings -------------------------------------------------------------------------------------------------


def run_in(folder: Path, umask: int, **env: str) -> dict[str, Any]:
    """A new process in ``folder``, by relative paths."""
    folder.mkdir(parents=True)
    config_file(folder)
    done = subprocess.run(
        [sys.executable, "-c", ENTRY, "run", "tiny.toml", "--out", "out", "--json"],
        cwd=folder,
        env=environment(**env),
        capture_output=True,
        text=True,
        encoding="utf-8",
        umask=umask,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.slow
def test_two_processes_in_different_surroundings(tmp_path: Path) -> None:
    plain = run_in(tmp_path / "plain", 0o022, PYTHONHASHSEED="0", TZ="UTC", LC_ALL="C.UTF-8")
    odd = tmp_path / "two words" / "Krankenhaus Köln 病院"
    other = run_in(odd, 0o077, PYTHONHASHSEED="1", TZ="Asia/Kathmandu", LC_ALL="C", PYTHONUTF8="0")
    assert plain == results(tmp_path / "plain" / "out"), "standard output is the JSON and nothing else"
    assert other["rows_sha256"] == plain["rows_sha256"]
    assert timeless(other) == timeless(plain)
    assert artefacts(odd / "out") == artefacts(tmp_path / "plain" / "out")
    first, second = ((folder / "out" / "partition.json").read_bytes() for folder in (odd, tmp_path / "plain"))
    assert first == second
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (odd / "out").rglob("*") if path.is_file()}
    assert all(mode & 0o077 == 0 for mode in modes), "the user's umask is kept"


# --- every method -------------------------------------------------------------------------------------------------


class CutStore(MemoryStore):
    """A store that fails at the chosen saves: each time the end of the process as far as a method can tell."""

    def __init__(self, *cuts: int | str) -> None:
        super().__init__()
        self.cuts = set(cuts)  # numbers of saves, or names
        self.saved: list[str] = []

    def save(self, name: str, data: bytes) -> None:
        for cut in {len(self.saved) + 1, name} & self.cuts:
            self.cuts.remove(cut)
            raise InterruptedError
        self.saved.append(name)
        super().save(name, data)


@cache
def undisturbed(name: str) -> tuple[dict[str, bytes], str, list[str]]:
    """What a method makes of three clients, what is recorded, and the names of what was saved on the way."""
    store = CutStore()
    predictors, kept = run_small(name, tiny_clients(3, per_client=12), small_context(store))
    return packed(predictors), canonical_json(kept), store.saved


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_order_of_clients_changes_nothing(name: str) -> None:
    clients = tiny_clients(3, per_client=12)
    found, kept = run_small(name, [clients[index] for index in (2, 0, 1)], small_context())
    assert (packed(found), canonical_json(kept)) == undisturbed(name)[:2]


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_cut_at_any_save_and_continued(name: str) -> None:
    """With a checkpoint at every step. What is kept survives; everything else is made again to the same bytes."""
    expected, kept, saved = undisturbed(name)
    moments = random.Random(name).sample(range(1, len(saved) + 1), min(5, len(saved)))
    # The server's work is done and its last checkpoint written, but not its result: nothing may be left to do.
    fused = {record for record in saved if record.startswith("records/fuse")}
    store = CutStore(*fused, *(moment for moment in moments if saved[moment - 1] not in fused))
    for left in range(len(store.cuts), 0, -1):
        assert len(store.cuts) == left
        with pytest.raises(InterruptedError):
            run_small(name, tiny_clients(3, per_client=12), small_context(store))
    found, found_kept = run_small(name, tiny_clients(3, per_client=12), small_context(store))
    assert packed(found) == expected, f"saves {moments} of {len(saved)}"
    assert canonical_json(found_kept) == kept, f"saves {moments} of {len(saved)}"


# --- odd clients --------------------------------------------------------------------------------------------------


def hospital_files(folder: Path) -> Path:
    """Sites with many images, one image and one class, and one that only ever tests."""
    rng = np.random.default_rng(0)
    sites = [("large", "train", [0, 1, 2] * 8), ("tiny", "train", [1]), ("narrow", "train", [2] * 6)]
    sites += [(site, "test", [0, 1, 2] * 2) for site in ("large", "narrow", "only-tests")]
    rows = []
    for site, split, labels in sites:
        for number, label in enumerate(labels):
            name = f"{site}-{split}-{number}.png"
            pixels = rng.normal(60 + 60 * label, 20, (8, 8, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name)
            rows.append({"path": name, "label": f"class {label}", "site": site, "split": split})
    manifest = folder / "list.csv"
    with manifest.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return manifest


def global_state() -> list[Any]:
    numbers = np.random.get_state()  # noqa: NPY002  the state that must not be touched
    switches = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled())
    state = [random.getstate(), numbers[1].tolist(), numbers[2], torch.get_rng_state().tolist(), switches]
    return [*state, torch.get_num_threads()]


@dataclass(frozen=True)
class OddRun:
    """One run of every method, and what is global before and after it."""

    manifest: Path
    out: Path
    results: dict[str, Any]
    before: list[Any]
    after: list[Any]


@pytest.fixture(scope="module")
def odd_run(tmp_path_factory: pytest.TempPathFactory) -> OddRun:
    folder = tmp_path_factory.mktemp("odd")
    manifest = hospital_files(folder)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    assert rich.style
    before = global_state()
    results = fedbicross.run(
        str(manifest),
        model="resnet8",
        data={"image_size": 8},
        partition={"kind": "natural"},
        training={"recipe": "modern", "epochs": 1, "batch_size": 32},
        methods=list(METHODS),
        baselines=[],
        method={name: small_settings(name) for name in METHODS},
        device="cpu",
        threads=1,
        out=folder / "out",
    )
    return OddRun(manifest, folder / "out", results, before, global_state())


@pytest.mark.slow
def test_global_random_state_and_torch_settings_are_untouched(odd_run: OddRun) -> None:
    assert odd_run.after == odd_run.before


@pytest.mark.slow
def test_one_image_one_class_and_a_site_without_training_images(odd_run: OddRun, tmp_path: Path) -> None:
    found = odd_run.results
    assert [row["method"] for row in found["rows"]] == list(METHODS)
    counts = {client["num_samples"]: client["class_counts"] for client in found["clients"]["0"]}
    assert counts == {24: [8, 8, 8], 1: [0, 1, 0], 6: [0, 0, 6]}
    for row in found["rows"]:
        assert row["num_clients"] == 3
        assert all(value is None or 0 <= value <= 1 for value in row["accuracy"].values()), row["method"]
        assert row["accuracy"]["global"] is not None
    owners = json.loads((odd_run.out / "partition.json").read_text())["partitions"]["0"]["test_owner"]
    assert owners.count(-1) == 6, "nobody owns the test images of a site that trains nothing"
    assert (odd_run.out / "report.html").is_file()
    # Once more, by the command line: some of the methods tell, since no row depends on the others.
    chosen = ["local_only", "fedavg", "fedbicross"]
    text = CONFIG.replace("train_size = 60\ntest_size = 30\n", "").replace('["local_only", "fedavg"]', str(chosen))
    for name in chosen:
        text += f"[method.{name}]\n" + "".join(
            f"{key} = {json.dumps(value)}\n" for key, value in small_settings(name).items()
        )
    args = ("--data", odd_run.manifest, "--partition", "natural", "--out", tmp_path / "again", "--json")
    again = ok("run", config_file(tmp_path, text), *args)
    assert timeless(again.json()) == timeless({"rows": [row for row in found["rows"] if row["method"] in chosen]})


@pytest.mark.slow
def test_a_client_without_images_takes_no_part(tmp_path: Path) -> None:
    config = config_file(tmp_path)
    assert call("run", config, "--methods", "majority", "--out", tmp_path / "full").code == 0
    saved = json.loads((tmp_path / "full" / "partition.json").read_text())
    dataset = load_dataset("cells", image_size=8, train_size=60, test_size=30)
    whole = Partition.from_json(saved["partitions"]["0"], dataset)
    first, second, third = whole.train_indices
    merged = (np.concatenate([first, third]), second, np.empty(0, np.int64))
    owner = np.where(whole.test_owner == 2, 0, whole.test_owner)
    saved["partitions"]["0"] = dataclasses.replace(whole, train_indices=merged, test_owner=owner).to_json()
    (tmp_path / "empty.json").write_text(json.dumps(saved))
    file = f"partition.file={tmp_path / 'empty.json'}"
    outcome = ok("run", config, "--set", file, "--out", tmp_path / "out", "--json")
    found = outcome.json()
    assert {row["num_clients"] for row in found["rows"]} == {2}
    assert [client["excluded"] for client in found["clients"]["0"]] == [False, False, True]
    assert "client-2 has no images and takes no part" in found["warnings"]
    assert call("resume", tmp_path / "out").code == 0


# --- two at once, and Ctrl-C --------------------------------------------------------------------------------------


def stopped(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=True).stdout
    assert "Z" not in state, "it has ended"
    return "T" in state


@pytest.mark.slow
def test_a_second_runner_is_refused_at_once(forge: Forge, tmp_path: Path) -> None:
    config, out = config_file(tmp_path), tmp_path / "out"
    child = forge.start("run", config, "--out", out, under=out, at=20, send=signal.SIGSTOP)
    while not stopped(child):  # it holds its folder for as long as we look
        time.sleep(0.01)
    held = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for args in (["resume", out], ["run", config, "--out", out], ["run", config, "--out", out, "--overwrite"]):
        second = call(*args)
        assert (second.code, second.out) == (4, "")
        assert second.err == f"error[locked]: another process is running in {out}\n"
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == held
    os.kill(child, signal.SIGCONT)
    assert forge.wait() == 0, forge.said()
    assert results(out)["complete"]


@pytest.mark.slow
def test_control_c_is_one_line_and_can_be_resumed(forge: Forge, tmp_path: Path) -> None:
    config, whole = config_file(tmp_path), tmp_path / "whole"
    forge.start("run", config, "--out", whole, under=whole)
    assert forge.wait() == 0, forge.said()
    writes = forge.writes()
    for number in range(5):  # delays: in the middle of training, too
        out = tmp_path / f"stopped-{number}"
        moment = 20 + (writes - 20) * number // 6  # a run begins with its config.toml, before the twentieth
        forge.start("run", config, "--out", out, under=out, at=moment, delay=0.005 * number, send=signal.SIGINT)
        assert forge.wait() == 130, forge.said()
        lines = forge.said().splitlines()[:-1]  # the last is the forge's own
        assert "Traceback" not in forge.said()
        assert lines[-1].startswith("stopped; `fedbicross resume")
        assert [line for line in lines if "stopped" in line] == lines[-1:]
        assert forge.run("resume", out) == 0, forge.said()
        assert timeless(results(out)) == timeless(results(whole))
        assert artefacts(out) == artefacts(whole)
        assert leftovers(out) == []
