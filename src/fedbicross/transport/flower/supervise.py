"""`flower up` stays and looks after its two processes: a gate that dies is started again, and all end together."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable

from fedbicross.errors import RunError
from fedbicross.transport.flower.deploy import Start

_LOOK = 0.2  # seconds between two looks
_STEADY = 60.0  # seconds after which a gate counts as well started
_TRIES = 5  # starts in a row that did not last
_GRACE = 30.0  # seconds to end when asked to


def stay(link: Start, gate: Start, say: Callable[[str], None]) -> None:
    """Until Ctrl-C or SIGTERM. Callers who knock between two gates wait at the port, which this process keeps open."""
    asked: list[int] = []
    before = {number: signal.signal(number, lambda *got: asked.append(got[0])) for number in _SIGNALS}
    main, door = link.begin(), gate.begin()
    started, failures = time.monotonic(), 0
    try:
        while not asked and main.poll() is None:
            if door.poll() is not None:
                failures = 1 if time.monotonic() - started >= _STEADY else failures + 1
                if failures > _TRIES:
                    raise RunError("gate", f"the gate ended {failures} times in a row, the last time {_how(door)}")
                say(f"the gate ended {_how(door)}; it is started again")
                time.sleep(_LOOK * 2 ** (failures - 1))
                door, started = gate.begin(), time.monotonic()
            time.sleep(_LOOK)
        if not asked:
            raise RunError("superlink", f"the SuperLink ended {_how(main)}; `flower up` again goes on")
    finally:
        for process in (main, door):
            _end(process)
        for number, handler in before.items():
            signal.signal(number, handler)


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def _how(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    return f"by signal {-code}" if code < 0 else f"with {code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
