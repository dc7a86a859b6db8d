"""Memory of a rank on a processor: kept when it is freed, as GPUs' allocators keep theirs."""

from __future__ import annotations

import ctypes
import os
from functools import cache

ARENA_MAX, MMAP_MAX, TRIM_THRESHOLD, TOP_PAD = -8, -4, -1, -2
"""What glibc's `mallopt` calls its options."""

VARIABLE = "CONVMESH_KEEP_MEMORY"
"""Set to 0, it leaves the allocator as it is."""


@cache
def keep_freed_memory() -> bool:
    """Have glibc keep what it frees; whether it does.

    It would give activations back to the system after every step, and the system would clear every page again when it
    is touched: a tenth to a third of a step (benchmarks/unet.md). One heap serves all threads, because those of other
    threads are small and the backward pass runs in one.
    """
    if os.environ.get(VARIABLE) == "0":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    options = {ARENA_MAX: 1, MMAP_MAX: 0, TRIM_THRESHOLD: 2**31 - 1, TOP_PAD: 64 << 20}
    taken = [mallopt(option, value) for option, value in options.items()]
    return all(taken)
