"""What becomes of memory that was freed: kept for the next step instead of being handed back to the system."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

# Every step of a network frees some megabytes and asks for them again at once. By default glibc hands back what lies
# at the end of its heap and maps larger blocks one by one; the system then clears every page anew, which took half of
# the time of a ResNet-8 that was asked about 500 images. The first number is the most that glibc takes from its heap,
# the other one how much of it may lie idle.
BLOCK, IDLE = 1 << 25, 1 << 28  # bytes
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
SAID_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Ask glibc to keep it, unless the user has said otherwise; whether it does. Other systems go on as they do."""
    if any(name in environment for name in SAID_BY_USER):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # macOS, Windows
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, BLOCK) and mallopt(M_TRIM_THRESHOLD, IDLE))
