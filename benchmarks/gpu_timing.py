"""The time that a call's kernels take on the GPU, without what Python takes to launch them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

BYTES_CLEARED = 256 << 20
"""More than the caches of a GPU hold."""
CYCLES_TO_QUEUE = 900_000
"""About 0.45 ms: what Python may take for one call, the clearing of caches, and two events."""
LEAST_CALLS, MOST_CALLS = 5, 40
"""More launches than a queue holds would make Python wait."""


def milliseconds_of(call: Callable[[], Any], milliseconds: float) -> float:
    """The median of as many calls as take so long. Caches are cleared before each.

    The GPU is kept busy until all calls are queued: a call whose kernels take less than Python needs to launch them
    would otherwise show Python's time.
    """
    call()
    torch.cuda.synchronize()
    once = min(_queued(call, 3))
    return statistics.median(_queued(call, max(LEAST_CALLS, min(MOST_CALLS, int(milliseconds / max(once, 1e-3))))))


def _queued(call: Callable[[], Any], count: int) -> list[float]:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    torch.cuda._sleep(CYCLES_TO_QUEUE * count)
    for begin, end in events:
        _memory_to_clear().zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


@cache
def _memory_to_clear() -> torch.Tensor:
    return torch.empty(BYTES_CLEARED, dtype=torch.int8, device="cuda")
