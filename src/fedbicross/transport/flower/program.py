"""Run one of Flower's programs, as it is, in a process that ends when it is of no use any more.

A SuperLink would outlive a `flower up` that was killed, and the next one would share its database. A SuperNode whose
heartbeat or main loop has failed would stay, do nothing, and look well to whoever keeps it running.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

WITH_PARENT, WITH_THREADS = "--ends-with-parent", "--ends-with-threads"
_GRACE = 20.0  # seconds to end by itself


def _watch(parent: int) -> None:
    """Wait until the parent is gone; then end, politely first."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    os._exit(1)  # whatever it still holds on to


def _end(died: threading.ExceptHookArgs) -> None:
    """A thread has died: say of what, and go."""
    threading.__excepthook__(died)
    _give_up()


def _give_up() -> None:
    print("the node has lost its connection for good and ends; start it again", file=sys.stderr, flush=True)
    os._exit(1)  # other threads would keep the process


def main() -> None:
    """``python -m fedbicross.transport.flower.program HOW PROGRAM WORDS``."""
    how, sys.argv = sys.argv[1], sys.argv[2:]
    if how == WITH_PARENT:
        threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()
    else:
        threading.excepthook = _end
    runpy.run_path(sys.argv[0], run_name="__main__")
    if how == WITH_THREADS:
        _give_up()


if __name__ == "__main__":
    main()
