"""Command-line processes by the dozen: one interpreter loads everything once and then forks, one child per command.

Starting an interpreter with torch takes seconds, and a test that kills twenty runs needs sixty of them. The forging
process has one thread and has run nothing itself, so that a fork is as good as a fresh start.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from cli.console import environment

KILLED = (-signal.SIGKILL, -signal.SIGALRM)  # at once, or after a delay

FORGE = """
import json, os, resource, signal, sys
import torch, torch._dynamo, sklearn.metrics, jinja2, PIL.Image
import fedbicross.models.factory, fedbicross.engine.train, fedbicross.engine.predict
import fedbicross.runs.runner, fedbicross.report.write
from fedbicross.cli import main
torch.set_num_threads(1)
WRITES = {"open", "os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "shutil.rmtree"}

def count_writes(under, at, delay, send, counted):
    done = 0
    def hook(event, args):
        nonlocal done
        if event not in WRITES:
            return
        emptied = event in ("os.remove", "os.rmdir") and args[1] != -1  # by shutil.rmtree: a name in an open folder
        if not emptied and not str(args[0]).startswith(under):
            return
        if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        done += 1
        if done == at and delay:
            signal.signal(signal.SIGALRM, signal.default_int_handler if send == signal.SIGINT else signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, delay)
        elif done == at:
            os.kill(os.getpid(), send)
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
            count_writes(order["under"], order["at"], order["delay"], order["send"], counted)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the test runner was started with
        try:
            main()
        except SystemExit as stop:
            status = stop.code or 0
        except BaseException:
            import traceback
            traceback.print_exc()
        signal.setitimer(signal.ITIMER_REAL, 0)
        print("writes:", counted[0])
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
    print(child, flush=True)
    sys.stdin.readline()  # until asked, a dead child keeps its number, so that no other process can be hit by a kill
    _, ended = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(ended), flush=True)
"""


class Forge:
    """Start commands and wait for their end, one at a time."""

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

    def start(
        self,
        *args: str | Path,
        under: Path | None = None,
        at: int = 0,
        delay: float = 0.0,
        send: int = signal.SIGKILL,
        file_limit: int = 0,
    ) -> int:
        """Begin a command and return its process number.

        With ``under`` the changes to files below that folder are counted (see ``writes``), and the process ends
        itself just before the one numbered ``at``, or ``delay`` seconds later in the middle of whatever it does
        then. Moments are counted and not timed: a machine that is busy hits the same ones.
        With ``file_limit`` it dies while writing a larger file.
        """
        order = {"args": [str(arg) for arg in args], "log": str(self.log), "under": str(under or "")}
        self._tell(json.dumps({**order, "at": at, "delay": delay, "send": int(send), "file_limit": file_limit}))
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

    def close(self) -> None:
        """Let the forge end."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()
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
