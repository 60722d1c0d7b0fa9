"""Pull the plug at any moment: `resume` ends with the bytes of a run that nobody disturbed."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cli.console import CONFIG, artefacts, config_file, results, timeless
from faults.forge import Forge, leftovers

MOMENTS = 12
MIDWAY = 7
METHODS = '["local_only", "fedavg:uniform", "ensemble:class_weighted", "primum", "primum:student"]'
PRIMUM = "[method.primum]\npool = 3\nsteps = 4\nbatch = 8\nsteps_distil = 3\n"  # the two share the server's work
TEXT = CONFIG.replace('["local_only", "fedavg"]', METHODS) + '[method."fedavg:uniform"]\nrounds = 3\n' + PRIMUM


@dataclass(frozen=True)
class Undisturbed:
    """A run that ended by itself, and how long it took from the moment that its folder appeared."""

    config: Path
    out: Path
    seconds: float


@pytest.fixture(scope="module")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    forge = Forge(tmp_path_factory.mktemp("forge") / "log")
    yield forge
    forge.close()


@pytest.fixture(scope="module")
def undisturbed(forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("undisturbed")
    config = config_file(folder, TEXT)
    seconds = []
    for number in range(2):  # the second is the fair measure: files are in the cache
        out = folder / f"run-{number}"
        forge.start("run", config, "--out", out)
        appeared = wait_for(out)
        assert forge.wait() == 0, forge.said()
        seconds.append(time.monotonic() - appeared)
    assert timeless(results(folder / "run-0")) == timeless(results(folder / "run-1"))
    assert artefacts(folder / "run-0") == artefacts(folder / "run-1")
    return Undisturbed(config, folder / "run-1", seconds[1])


def wait_for(path: Path) -> float:
    """When ``path`` appeared."""
    began = time.monotonic()
    while not path.exists():
        assert time.monotonic() - began < 60, f"{path} never appeared"
        time.sleep(0.0005)
    return time.monotonic()


def begin_and_kill(forge: Forge, delay: float, out: Path, *args: str | Path) -> bool:
    """Start a command and kill it ``delay`` seconds after the folder is there; whether it was still running."""
    child = forge.start(*args)
    wait_for(out)
    time.sleep(delay)
    return forge.kill(child, signal.SIGKILL) == -signal.SIGKILL


def finish(forge: Forge, config: Path, out: Path) -> None:
    """What a user does after a crash: resume; where the run had not even begun, run again."""
    if not out.exists() or not (out / "config.toml").exists():
        assert forge.run("resume", out) == 4
        assert "not_a_run" in forge.said()
        assert forge.run("run", config, "--out", out) == 0, forge.said()
    assert forge.run("resume", out) == 0, forge.said()


def same(out: Path, expected: Path) -> None:
    assert results(out)["complete"] is True
    assert timeless(results(out)) == timeless(results(expected))
    assert artefacts(out) == artefacts(expected)
    assert leftovers(out) == []
    named = {path.stat().st_ino for path in out.rglob("*") if path.is_file() and path.parent.name != "objects"}
    assert {path.stat().st_ino for path in (out / "objects").iterdir()} <= named, "content that nothing names"
    assert (out / "report.html").is_file()


@pytest.mark.slow
def test_killed_at_twelve_moments(forge: Forge, undisturbed: Undisturbed, tmp_path: Path) -> None:
    rng = random.Random(0)
    midway, begun = 0, 0
    for number in range(MOMENTS):
        # One moment in each twelfth of the run, so that every part of it is hit.
        delay = (number + rng.random()) / MOMENTS * undisturbed.seconds * 0.95
        out = tmp_path / f"killed-{number}"
        killed = begin_and_kill(forge, delay, out, "run", undisturbed.config, "--out", out)
        begun += (out / "config.toml").exists()
        midway += killed and not (out / "report.html").exists()
        finish(forge, undisturbed.config, out)
        same(out, undisturbed.out)
        shutil.rmtree(out)
    assert midway >= MIDWAY, f"only {midway} of {MOMENTS} runs were killed midway"
    assert begun >= MIDWAY, f"only {begun} of {MOMENTS} runs had begun"


@pytest.mark.slow
def test_killed_just_before_a_file_changes(forge: Forge, undisturbed: Undisturbed, tmp_path: Path) -> None:
    """Between creating, writing, linking and renaming there is no time to hit by chance, so it is counted."""
    whole = tmp_path / "whole"
    forge.start("run", undisturbed.config, "--out", whole, under=whole)
    assert forge.wait() == 0, forge.said()
    writes = forge.writes()
    assert writes > 100
    first = list(range(1, 10))  # the folder, its lock, partition.json and config.toml
    for moment in first + random.Random(3).sample(range(10, writes), 5):
        out = tmp_path / f"killed-{moment}"
        forge.start("run", undisturbed.config, "--out", out, under=out, die_at=moment)
        assert forge.wait() == -signal.SIGKILL
        finish(forge, undisturbed.config, out)
        same(out, undisturbed.out)
        shutil.rmtree(out)


@pytest.mark.slow
def test_killed_in_the_middle_of_a_file(forge: Forge, undisturbed: Undisturbed, tmp_path: Path) -> None:
    """The kernel ends the process when a file grows too large: half of it is on disk."""
    config = (undisturbed.out / "config.toml").stat().st_size
    partition = (undisturbed.out / "partition.json").stat().st_size
    model = next((undisturbed.out / "client_models").iterdir()).stat().st_size
    for limit in (partition // 2, config - 10, model // 2, model + 1000):
        out = tmp_path / f"killed-{limit}"
        forge.start("run", undisturbed.config, "--out", out, file_limit=limit)
        assert forge.wait() == -signal.SIGXFSZ, forge.said()
        finish(forge, undisturbed.config, out)
        same(out, undisturbed.out)


@pytest.mark.slow
def test_killed_again_while_resuming(forge: Forge, undisturbed: Undisturbed, tmp_path: Path) -> None:
    rng = random.Random(1)
    interrupted = 0
    for number in range(3):
        out = tmp_path / f"killed-{number}"
        begin_and_kill(
            forge, undisturbed.seconds * 0.2 * (1 + rng.random()), out, "run", undisturbed.config, "--out", out
        )
        for _ in range(2):
            interrupted += begin_and_kill(forge, undisturbed.seconds * 0.3 * rng.random(), out, "resume", out)
        finish(forge, undisturbed.config, out)
        same(out, undisturbed.out)
    assert interrupted >= 3


@pytest.mark.slow
def test_killed_while_an_earlier_run_is_replaced(forge: Forge, undisturbed: Undisturbed, tmp_path: Path) -> None:
    """Whatever is left, the same command may be given again."""
    rng = random.Random(2)
    for number in (0, 3):
        out = tmp_path / f"replaced-{number}"
        shutil.copytree(undisturbed.out, out)
        child = forge.start("run", undisturbed.config, "--out", out, "--overwrite")
        began = time.monotonic()
        while len(list(out.iterdir())) > 12 - number and time.monotonic() - began < 30:  # it is being emptied
            time.sleep(0.0002)
        time.sleep(rng.random() * 0.005)
        forge.kill(child, signal.SIGKILL)
        assert forge.run("run", undisturbed.config, "--out", out, "--overwrite") == 0, forge.said()
        same(out, undisturbed.out)


@pytest.mark.slow
def test_a_finished_run_resumes_to_itself(forge: Forge, undisturbed: Undisturbed, tmp_path: Path) -> None:
    before = {path: path.stat().st_ino for path in (undisturbed.out / "models").rglob("*")}
    assert forge.run("resume", undisturbed.out) == 0
    assert "training" not in forge.said()
    assert {path: path.stat().st_ino for path in (undisturbed.out / "models").rglob("*")} == before
