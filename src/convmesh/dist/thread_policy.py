"""How the system schedules the threads of a rank on a processor: those that compute are not interrupted by messages.

A thread of Gloo that is woken takes the place of one that computes, as any thread does under Linux's usual policy. If
that one is just handing over a message it holds a lock, for which Gloo's thread asks again and again (`try_to_lock` in
`Pair::handleEvents`, gloo/transport/tcp/pair.cc) until its turn ends, some milliseconds later. Threads of SCHED_BATCH
wait for a free core or for a turn of their own. Where cores are to spare nothing changes.
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

    Threads that somebody gave a policy of their own keep it.
    """
    if os.environ.get(VARIABLE) == "0" or not hasattr(os, "SCHED_BATCH") or not _THREADS.exists():
        return False
    move_threads(os.SCHED_OTHER, os.SCHED_BATCH)
    return os.sched_getscheduler(0) == os.SCHED_BATCH


def move_threads(before: int, after: int) -> None:
    """Give this process's threads of one policy another one, as far as the system allows it."""
    for thread in _THREADS.iterdir():
        with contextlib.suppress(OSError):  # it has ended, or the system forbids it
            if os.sched_getscheduler(int(thread.name)) == before:
                os.sched_setscheduler(int(thread.name), after, os.sched_param(0))
