"""Pull the plug at any moment: `resume` ends with the bytes of a run that nobody disturbed."""

from __future__ import annotations

import random
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from cli.console import CONFIG, artefacts, config_file, results, timeless
from faults.forge import KILLED, Forge, leftovers

MOMENTS = 12
BEGUN = 10  # changes to files by then: the folder, its lock, partition.json and config.toml
METHODS = '["local_only", "fedavg:uniform", "ensemble:class_weighted", "primum", "primum:student"]'
PRIMUM = "[method.primum]\npool = 3\nsteps = 4\nbatch = 8\nsteps_distil = 3\n"  # the two share the server's work
TEXT = CONFIG.replace('["local_only", "fedavg"]', METHODS) + '[method."fedavg:uniform"]\nrounds = 3\n' + PRIMUM


@dataclass(frozen=True)
class Undisturbed:
    """A run that ended by itself, and how many changes to files it made."""

    config: Path
    out: Path
    writes: int


@pytest.fixture(scope="module")
def undisturbed(forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("undisturbed")
    config = config_file(folder, TEXT)
    writes = []
    for number in range(2):
        out = folder / f"run-{number}"
        forge.start("run", config, "--out", out, under=out)
        assert forge.wait() == 0, forge.said()
        writes.append(forge.writes())
    assert timeless(results(folder / "run-0")) == timeless(results(folder / "run-1"))
    assert artefacts(folder / "run-0") == artefacts(folder / "run-1")
    assert writes[0] == writes[1] > 100
    return Undisturbed(config, folder / "run-1", writes[1])


def begin_and_kill(forge: Forge, at: int, delay: float, out: Path, *args: str | Path) -> None:
    forge.start(*args, under=out, at=at, delay=delay)
    assert forge.wait() in KILLED, forge.said()


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
    """One moment in each part of the run, between two changes to files: in the middle of training, say."""
    rng = random.Random(0)
    part = (undisturbed.writes - BEGUN) // (MOMENTS + 1)  # none in the last: it would be over before the delay is
    for number in range(MOMENTS):
        out = tmp_path / f"killed-{number}"
        moment = BEGUN + int((number + rng.random()) * part)
        begin_and_kill(forge, moment, rng.random() * 0.02, out, "run", undisturbed.config, "--out", out)
        assert (out / "config.toml").exists() and not (out / "report.html").exists()
        finish(forge, undisturbed.config, out)
        same(out, undisturbed.out)
        shutil.rmtree(out)


@pytest.mark.slow
def test_killed_just_before_a_file_changes(forge: Forge, undisturbed: Undisturbed, tmp_path: Path) -> None:
    """Between creating, writing, linking and renaming."""
    for moment in [*range(1, BEGUN), *random.Random(3).sample(range(BEGUN, undisturbed.writes), 5)]:
        out = tmp_path / f"killed-{moment}"
        begin_and_kill(forge, moment, 0, out, "run", undisturbed.config, "--out", out)
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
    for number in range(3):
        out = tmp_path / f"killed-{number}"
        moment = int(undisturbed.writes * 0.2 * (1 + rng.random()))
        begin_and_kill(forge, moment, 0.01, out, "run", undisturbed.config, "--out", out)
        for _ in range(2):  # a tenth of the run's changes at most, twice
            moment = rng.randint(1, undisturbed.writes // 10)
            begin_and_kill(forge, moment, 0.01 * rng.random(), out, "resume", out)
        finish(forge, undisturbed.config, out)
        same(out, undisturbed.out)


@pytest.mark.slow
def test_killed_while_an_earlier_run_is_replaced(forge: Forge, undisturbed: Undisturbed, tmp_path: Path) -> None:
    """Whatever is left, the same command may be given again."""
    for moment in (6, 40, 100):
        out = tmp_path / f"replaced-{moment}"
        shutil.copytree(undisturbed.out, out)
        began = len(list(out.rglob("*")))
        begin_and_kill(forge, moment, 0, out, "run", undisturbed.config, "--out", out, "--overwrite")
        assert (out / "config.toml").exists() and len(list(out.rglob("*"))) < began, "it was being emptied"
        assert forge.run("run", undisturbed.config, "--out", out, "--overwrite") == 0, forge.said()
        same(out, undisturbed.out)


@pytest.mark.slow
def test_a_finished_run_resumes_to_itself(forge: Forge, undisturbed: Undisturbed, tmp_path: Path) -> None:
    before = {path: path.stat().st_ino for path in (undisturbed.out / "models").rglob("*")}
    assert forge.run("resume", undisturbed.out) == 0
    assert "training client" not in forge.said()
    assert {path: path.stat().st_ino for path in (undisturbed.out / "models").rglob("*")} == before
