"""`flower up` keeps its two processes: the gate comes back, everything ends together, and the end says how it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedbicross.errors import RunError
from fedbicross.transport.flower import supervise
from fedbicross.transport.flower.deploy import Start
from small import refuses

# Writes its number into a new file of the folder, and stays.
STAYS = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / f"{sys.argv[2]}-{len(list(folder.glob(sys.argv[2] + '-*')))}").write_text(str(os.getpid()))
time.sleep(float(sys.argv[3]))
sys.exit(int(sys.argv[4]))
"""


def process(folder: Path, name: str, seconds: float = 400.0, code: int = 0) -> Start:
    return Start([sys.executable, "-c", STAYS, str(folder), name, str(seconds), str(code)], dict(os.environ))


def wait(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 200
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


def number(folder: Path, name: str, index: int) -> int:
    file = folder / f"{name}-{index}"
    wait(lambda: file.exists() and file.read_text() != "")
    return int(file.read_text())


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def beside(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_gate_that_is_killed_comes_back_and_all_end_together(tmp_path: Path) -> None:
    said: list[str] = []

    def kill_twice_and_end() -> None:
        for index in range(2):
            os.kill(number(tmp_path, "gate", index), signal.SIGKILL)
        number(tmp_path, "gate", 2)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)  # a library of another test may have set its own
    acting = beside(kill_twice_and_end)
    supervise.stay(process(tmp_path, "link"), {"the gate": process(tmp_path, "gate")}, said.append)
    acting.join()
    assert said == ["the gate ended by signal 9; it is started again"] * 2
    assert not alive(number(tmp_path, "gate", 2))
    assert not alive(number(tmp_path, "link", 0))
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.slow
def test_a_superlink_that_ends_by_itself_is_an_error_and_the_gate_goes_too(tmp_path: Path) -> None:
    with refuses(RunError, "superlink", "ended with 7"):
        supervise.stay(process(tmp_path, "link", 2.0, 7), {"the gate": process(tmp_path, "gate")}, lambda line: None)
    for index, _ in enumerate(tmp_path.glob("gate-*")):
        assert not alive(number(tmp_path, "gate", index))


def test_a_process_that_never_stays_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "_PATIENCE", 1.0)
    monkeypatch.setattr(supervise, "_LONGEST", 0.05)
    with refuses(RunError, "not_steady", "the gate does not stay; the last time it ended with 3"):
        gate = {"the gate": process(tmp_path, "gate", 0.0, 3)}
        supervise.stay(process(tmp_path, "link"), gate, lambda line: None)
    assert len(list(tmp_path.glob("gate-*"))) > 1
    assert not alive(number(tmp_path, "link", 0))


def test_a_program_ends_with_its_parent(tmp_path: Path) -> None:
    """`flower up` killed at once must not leave a SuperLink behind."""
    program = tmp_path / "program"
    program.write_text(STAYS)
    words = [sys.executable, "-m", "fedbicross.transport.flower.program", "--ends-with-parent", str(program)]
    words += [str(tmp_path), "link", "400", "0"]
    script = f"import subprocess, time; subprocess.Popen({words!r}); time.sleep(400)"
    with subprocess.Popen([sys.executable, "-c", script]) as parent:
        child = number(tmp_path, "link", 0)
        parent.kill()
    wait(lambda: not alive(child) or _is_zombie(child))


@pytest.mark.parametrize("last", ["time.sleep(400)", "pass"])
def test_a_node_that_is_of_no_use_any_more_ends(tmp_path: Path, last: str) -> None:
    """Flower's own stays: its heartbeat is a thread, and others keep the process when its main loop has failed."""
    program = tmp_path / "program"
    dies = "threading.Thread(target=lambda: 1 / 0).start()" if "sleep" in last else "pass"
    keeps = "threading.Thread(target=time.sleep, args=(400,)).start()"
    program.write_text(f"import threading, time\n{keeps}\n{dies}\n{last}\n")
    words = [sys.executable, "-m", "fedbicross.transport.flower.program", "--ends-with-threads", str(program)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert "start it again" in done.stderr
    assert ("ZeroDivisionError" in done.stderr) == ("sleep" in last)


def _is_zombie(pid: int) -> bool:
    """Ended, and not yet taken note of by whoever inherited it."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return found.strip().startswith("Z")
