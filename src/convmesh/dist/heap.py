"""The heap of a rank on a CPU: freed memory stays with the process between steps, as with GPU allocators."""

from __future__ import annotations

import ctypes
import os
from functools import cache

ARENA_MAX, MMAP_MAX, TRIM_THRESHOLD, TOP_PAD = -8, -4, -1, -2
"""Options of glibc's `mallopt`."""

VARIABLE = "CONVMESH_KEEP_MEMORY"
"""Environment variable; 0 leaves the allocator as it is."""


@cache
def keep_freed_memory() -> bool:
    """Have glibc keep the memory it frees; returns whether it does.

    By default it returns activations to the system after every step, and the system clears every page again when it is
    touched: a tenth to a third of a step (benchmarks/unet.md). One heap serves all threads, because backward runs in a
    separate thread, whose heap glibc would keep small.
    """
    if os.environ.get(VARIABLE) == "0":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    options = {ARENA_MAX: 1, MMAP_MAX: 0, TRIM_THRESHOLD: 2**31 - 1, TOP_PAD: 64 << 20}
    taken = [mallopt(option, value) for option, value in options.items()]
    return all(taken)


def hand_back_freed_memory() -> None:
    """Return the pages of freed memory to the system, including those between blocks in use.

    Small, long-lived blocks settle where large ones were, so a process that makes and drops networks would grow with
    each. Training needs this once per network, not once per step.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
