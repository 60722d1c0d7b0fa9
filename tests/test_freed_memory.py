"""Freed memory is kept for the next step, unless the user says otherwise."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from fedbicross import freed_memory
from fedbicross.freed_memory import SAID_BY_USER, keep_freed_memory

# Two blocks of 24 MiB, freed and asked for again: how many pages had to be cleared for the second pair.
AGAIN = """
import ctypes, resource, sys
from fedbicross.freed_memory import keep_freed_memory
if sys.argv[1] == "kept" and not keep_freed_memory():
    raise SystemExit("not glibc")
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def use():
    blocks = [libc.malloc(24 << 20) for _ in range(2)]
    for block in blocks:
        ctypes.memset(block, 1, 24 << 20)
    for block in reversed(blocks):
        libc.free(block)
use()
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def pages_cleared(how: str) -> int:
    out = subprocess.run([sys.executable, "-c", AGAIN, how], capture_output=True, text=True)
    if "not glibc" in out.stderr:
        pytest.skip("another C library than glibc")
    return int(out.stdout)


def test_freed_memory_is_used_again() -> None:
    pytest.importorskip("resource")
    assert pages_cleared("kept") < 0.1 * pages_cleared("handed back")


@pytest.mark.parametrize("name", SAID_BY_USER)
def test_the_user_is_not_overruled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda _: pytest.fail("asked"))
    assert not keep_freed_memory({name: "1"})


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: Any) -> Any:
        raise OSError

    for library in (missing, lambda _: object()):  # Windows; macOS, where there is no such function
        monkeypatch.setattr(freed_memory.ctypes, "CDLL", library)
        assert not keep_freed_memory({})
