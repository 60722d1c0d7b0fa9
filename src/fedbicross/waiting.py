"""How CPU threads wait for each other: asleep, so that a neighbour on the same cores is not slowed by our waiting."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

# By default an OpenMP thread that has nothing to do keeps its core busy for milliseconds. Beside another program the
# thread that everybody waits for then gets no core, and both programs become many times slower.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}  # GNU's and any other OpenMP; Intel's and LLVM's
SAID_BY_USER = (*PASSIVE, "GOMP_SPINCOUNT")


def wait_passively(environment: MutableMapping[str, str] = os.environ) -> None:
    """Ask for it, unless the user has said how to wait. Only counts before torch is imported."""
    if not any(name in environment for name in SAID_BY_USER):
        environment.update(PASSIVE)
