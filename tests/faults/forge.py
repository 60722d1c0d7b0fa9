"""Command-line processes by the dozen: one interpreter loads everything once and then forks, one child per command.

Starting an interpreter with torch takes seconds, and a test that kills twenty runs needs sixty of them. The forging
process has one thread and has run nothing itself, so that a fork is as good as a fresh start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from cli.console import environment

FORGE = """
import json, os, signal, sys
import torch, torch._dynamo, sklearn.metrics, matplotlib.figure, jinja2, PIL.Image
import fedbicross.runs.runner, fedbicross.report.write, fedbicross.engine.train, fedbicross.engine.predict
from fedbicross.cli import main
torch.set_num_threads(1)
print("ready", flush=True)
for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if child == 0:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1), os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv = ["fedbicross", *order["args"]]
        status = 1
        signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the test runner was started with
        try:
            main()
        except SystemExit as stop:
            status = stop.code or 0
        except BaseException:
            import traceback
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
    print(child, flush=True)
    sys.stdin.readline()  # until asked, a dead child keeps its number, so that no other process can be hit by a kill
    _, ended = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(ended), flush=True)
"""


class Forge:
    """Start, watch and kill commands, one at a time."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-c", FORGE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        assert self._line() == "ready"

    def start(self, *args: str | Path) -> int:
        """Begin a command and return its process number."""
        self._tell(json.dumps({"args": [str(arg) for arg in args], "log": str(self.log)}))
        return int(self._line())

    def wait(self) -> int:
        """The exit code of the command that was started last; negative for a signal."""
        self._tell("wait")
        return int(self._line())

    def run(self, *args: str | Path) -> int:
        """A command from beginning to end."""
        self.start(*args)
        return self.wait()

    def kill(self, child: int, signal: int) -> int:
        """Send a signal and wait for the end."""
        os.kill(child, signal)
        return self.wait()

    def close(self) -> None:
        """Let the forge end."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(timeout=60)
        if self.process.stdout:
            self.process.stdout.close()

    def said(self) -> str:
        """What the last command printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def _tell(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _line(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, "the forge has died"
        return line.strip()


def leftovers(out: Path, kinds: Sequence[str] = (".tmp-*", "*.tmp", "*.part")) -> list[str]:
    """Temporary files that nobody cleared up."""
    return [str(path.relative_to(out)) for kind in kinds for path in out.rglob(kind)]
