"""How idle CPU threads wait: spin briefly, then sleep, so that they do not slow down other programs."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

# By default an OpenMP thread that has nothing to do keeps its core busy for milliseconds. Beside another program the
# thread that everybody waits for then gets no core. Asleep at once (OMP_WAIT_POLICY=PASSIVE) it wakes up too late. How
# long a turn lasts depends on the processor, and how much it matters on the network: on one CPU 20,000 turns kept a
# neighbour waiting, 2,000 did so with small networks only, and with 300 a program alone waited for its own threads.
# benchmarks/waiting.py measures it.
BRIEFLY = {"GOMP_SPINCOUNT": "600", "KMP_BLOCKTIME": "0"}  # GNU's OpenMP; Intel's and LLVM's
SAID_BY_USER = (*BRIEFLY, "OMP_WAIT_POLICY")


def wait_briefly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Ask for it, unless the user has said how to wait. Only counts before torch is imported."""
    if not any(name in environment for name in SAID_BY_USER):
        environment.update(BRIEFLY)
