"""`report --check` names every file that is not what the run wrote, whatever was done to it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.console import CONFIG, call, config_file, ok
from fedbicross.errors import FedBiCrossError, RunError
from fedbicross.runs import integrity, runner
from fedbicross.runs.store import DiskStore

DERIVED = ("report.html", "tables/")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checked")
    text = CONFIG.replace('["local_only", "fedavg"]', '["local_only", "fedavg:uniform"]')
    config = config_file(folder, text + '[method."fedavg:uniform"]\nrounds = 2\n')
    ok("run", config, "--out", folder / "run")
    return folder / "run"


def checked(out: Path) -> list[str]:
    return integrity.check_run(out).differences


def test_an_untouched_run_is_what_it_was(finished: Path, tmp_path: Path) -> None:
    outcome = call("report", finished, "--check")
    assert outcome.code == 0 and "files are what the run wrote" in outcome.out
    copy = shutil.copytree(finished, tmp_path / "copy")
    found = call("report", copy, "--check", "--json").json()
    assert found["differences"] == [] and found["files"] > 30
    assert call("resume", copy).code == 0 and checked(copy) == []


def victims(out: Path) -> list[str]:
    names = [path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()]
    return sorted(name for name in names if not name.startswith((*DERIVED, ".lock", "objects/")))


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[: len(data) // 2],
    "flipped": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
    "emptied": lambda data: b"",
    "replaced": lambda data: b"null\n",
}


def test_every_file_that_is_damaged_is_named(finished: Path, tmp_path: Path) -> None:
    out = shutil.copytree(finished, tmp_path / "copy")
    for number, name in enumerate(victims(out)):
        whole, how = (out / name).read_bytes(), list(DAMAGE)[number % 4]
        (out / name).write_bytes(DAMAGE[how](whole))
        differences = checked(out)
        # A log may end anywhere; and a line of the list may be of a file that was replaced or dropped since.
        harmless = (name, how) in {("events.jsonl", "cut"), ("events.jsonl", "emptied"), ("SHA256SUMS", "flipped")}
        assert harmless or any(name in line or name == "SHA256SUMS" for line in differences), (name, how)
        (out / name).write_bytes(whole)
    assert checked(out) == []


def test_a_damaged_file_is_refused_or_made_again(finished: Path, tmp_path: Path) -> None:
    """One file of each kind: `resume` says which, or ends with the same bytes."""
    kinds = {name.partition("/")[0]: name for name in victims(finished)}
    for number, name in enumerate(kinds.values()):
        out = shutil.copytree(finished, tmp_path / str(number))
        (out / name).write_bytes(list(DAMAGE.values())[number % 4]((out / name).read_bytes()))
        try:
            runner.resume(out)
        except FedBiCrossError as error:
            assert name in str(error) or name == "SHA256SUMS", (name, error)
            continue
        assert (out / "results.json").read_bytes() == (finished / "results.json").read_bytes(), name


def test_files_that_came_or_went_are_named(finished: Path, tmp_path: Path) -> None:
    out = shutil.copytree(finished, tmp_path / "copy")
    (out / "rows/seed-0/fedavg.json").write_text("{}")
    (out / "rows/seed-0/local_only.json").unlink()
    (out / "models/seed-0/local_only/client-1.safetensors").unlink()
    os.mkfifo(out / "models/pipe")
    outcome = call("report", out, "--check")
    assert outcome.code == 4 and "error[changed]" in outcome.err
    for name in (
        "rows/seed-0/fedavg.json: the run did not write it",
        "rows/seed-0/local_only.json: missing",
        "models/pipe",
    ):
        assert name in outcome.out
    (out / "results.json").unlink()
    assert {"results.json: missing", "models/seed-0/local_only/client-1.safetensors: missing"} <= set(checked(out))


def test_rows_and_results_that_disagree(finished: Path, tmp_path: Path) -> None:
    out = shutil.copytree(finished, tmp_path / "copy")
    text = (out / "results.json").read_text().replace('"harmed_clients": 0', '"harmed_clients": 3', 1)
    DiskStore(out).write("results.json", text.encode())  # with the list of digests changed along
    assert checked(out) == ["results.json: a row was changed", *checked(out)[1:]] and "is not rows/" in checked(out)[1]


def test_what_cannot_be_checked(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no run"):
        integrity.check_run(tmp_path)
    out = shutil.copytree(finished, tmp_path / "copy")
    (out / "SHA256SUMS").unlink()
    outcome = call("report", out, "--check")
    assert outcome.code == 4 and "error[no_digests]" in outcome.err
