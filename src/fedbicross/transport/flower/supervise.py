"""`flower up` stays and looks after its processes: who dies beside the SuperLink comes back, and all end together."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Mapping

from fedbicross.errors import RunError
from fedbicross.transport.flower.deploy import Start

_LOOK = 0.2  # seconds between two looks
_STEADY = 60.0  # seconds after which a process counts as well started
_PATIENCE = 900.0  # seconds without one that was
_LONGEST = 10.0  # seconds before another start
_GRACE = 30.0  # seconds to end when asked to
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Kept:
    """A process that is started again whenever it ends."""

    def __init__(self, name: str, start: Start, say: Callable[[str], None]) -> None:
        self.name, self.start, self.say = name, start, say
        self.process = start.begin()
        self.started = self.was_steady = time.monotonic()
        self.failures = 0
        self.again: float | None = None  # when to start it

    def look(self) -> None:
        """Start it again, if it is time; an error if it never stays."""
        now = time.monotonic()
        if self.again is not None:
            if now >= self.again:
                self.process, self.started, self.again = self.start.begin(), now, None
            return
        if self.process.poll() is None:
            return
        if now - self.started >= _STEADY:
            self.failures, self.was_steady = 0, now
        if now - self.was_steady > _PATIENCE:
            raise RunError("not_steady", f"{self.name} does not stay; the last time it ended {_how(self.process)}")
        self.say(f"{self.name} ended {_how(self.process)}; it is started again")
        self.again = now + min(_LONGEST, _LOOK * 2**self.failures)
        self.failures += 1


def stay(link: Start, beside: Mapping[str, Start], say: Callable[[str], None]) -> None:
    """Until Ctrl-C or SIGTERM. Callers who knock between two gates wait at the port, which this process keeps open."""
    asked: list[int] = []
    before = {number: signal.signal(number, lambda *got: asked.append(got[0])) for number in _SIGNALS}
    main, kept = link.begin(), [Kept(name, start, say) for name, start in beside.items()]
    try:
        while not asked and main.poll() is None:
            for one in kept:
                one.look()
            time.sleep(_LOOK)
        if not asked:
            raise RunError("superlink", f"the SuperLink ended {_how(main)}; `flower up` again goes on")
    finally:
        for process in (*(one.process for one in kept), main):
            _end(process)
        for number, handler in before.items():
            signal.signal(number, handler)


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
