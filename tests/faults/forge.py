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
import json, os, resource, signal, sys
import torch, torch._dynamo, sklearn.metrics, jinja2, PIL.Image
import fedbicross.models.factory, fedbicross.engine.train, fedbicross.engine.predict
import fedbicross.runs.runner, fedbicross.report.write
from fedbicross.cli import main
torch.set_num_threads(1)
WRITES = {"open", "os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "shutil.rmtree"}

def count_writes(under, die_at, counted):
    done = 0
    def hook(event, args):
        nonlocal done
        if event not in WRITES or not str(args[0]).startswith(under):
            return
        if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        done += 1
        if done == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        counted[0] = done
    sys.addaudithook(hook)

print("ready", flush=True)
for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if child == 0:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1), os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv = ["fedbicross", *order["args"]]
        status, counted = 1, [0]
        if order["file_limit"]:  # dies in the middle of writing a file that is larger, half of it on disk
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_limit"],) * 2)
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        if order["under"]:
            count_writes(order["under"], order["die_at"], counted)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the test runner was started with
        try:
            main()
        except SystemExit as stop:
            status = stop.code or 0
        except BaseException:
            import traceback
            traceback.print_exc()
        print("writes:", counted[0])
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

    def start(self, *args: str | Path, under: Path | None = None, die_at: int = 0, file_limit: int = 0) -> int:
        """Begin a command and return its process number.

        With ``under`` the changes to files below that folder are counted (see ``writes``), and the process kills
        itself just before the one numbered ``die_at``. With ``file_limit`` it dies while writing a larger file.
        """
        order = {"args": [str(arg) for arg in args], "log": str(self.log), "under": str(under or "")}
        self._tell(json.dumps({**order, "die_at": die_at, "file_limit": file_limit}))
        return int(self._line())

    def writes(self) -> int:
        """How many changes to files the last command made, where that was counted and it lived to tell."""
        return int(self.said().splitlines()[-1].removeprefix("writes: "))

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
