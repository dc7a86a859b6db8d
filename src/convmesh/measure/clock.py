"""Times calls on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TimedCall:
    """Seconds per call: the median of several calls, and the range of most of them."""

    seconds: float
    low: float
    high: float


def timed(call: Callable[[], object], device: torch.device, seconds_budget: float = 0.2, most: int = 100) -> TimedCall:
    """Repeat a call for about `seconds_budget`, after one warm-up."""
    _once(call, device)
    times: list[float] = []
    until = time.perf_counter() + seconds_budget
    while len(times) < 3 or (time.perf_counter() < until and len(times) < most):
        times.append(_once(call, device))
    times.sort()
    tenth = len(times) // 10
    return TimedCall(statistics.median(times), times[tenth], times[-1 - tenth])


def _once(call: Callable[[], object], device: torch.device) -> float:
    wait_for(device)
    begin = time.perf_counter()
    call()
    wait_for(device)
    return time.perf_counter() - begin


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, as a rank on a CPU does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
