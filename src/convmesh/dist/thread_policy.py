"""How the system schedules the threads of a rank on a CPU: messages do not interrupt threads that compute.

A Gloo thread that wakes up displaces one that computes, as any thread does under Linux's usual policy. If that one is
just handing over a message it holds a lock, and Gloo's thread retries it (`try_to_lock` in `Pair::handleEvents`,
gloo/transport/tcp/pair.cc) until its time slice ends, some milliseconds later. Threads under SCHED_BATCH wait for a
free core or for their own slice. With cores to spare, nothing changes.
"""

from __future__ import annotations

import contextlib
import os
from functools import cache
from pathlib import Path

VARIABLE = "CONVMESH_BATCH_THREADS"
"""Environment variable; 0 leaves threads as they are."""

_THREADS = Path("/proc/self/task")


@cache
def let_computing_go_on() -> bool:
    """Schedule this process's threads, and those that they start, as batch work; returns whether that was done.

    Threads that were given another policy keep it.
    """
    if os.environ.get(VARIABLE) == "0" or not hasattr(os, "SCHED_BATCH") or not _THREADS.exists():
        return False
    move_threads(os.SCHED_OTHER, os.SCHED_BATCH)
    return os.sched_getscheduler(0) == os.SCHED_BATCH


def move_threads(before: int, after: int) -> None:
    """Move this process's threads from one policy to another, as far as the system allows it."""
    for thread in _THREADS.iterdir():
        with contextlib.suppress(OSError):  # it has ended, or the system forbids it
            if os.sched_getscheduler(int(thread.name)) == before:
                os.sched_setscheduler(int(thread.name), after, os.sched_param(0))
