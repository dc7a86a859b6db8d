"""How long a call takes on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TimedCall:
    """Seconds of one call: the median of several, and between which most of them lay."""

    seconds: float
    low: float
    high: float


def timed(call: Callable[[], object], device: torch.device, seconds_budget: float = 0.2, most: int = 100) -> TimedCall:
    """Repeat a call for about so long, after one that warms up."""
    _once(call, device)
    found: list[float] = []
    until = time.perf_counter() + seconds_budget
    while len(found) < 3 or (time.perf_counter() < until and len(found) < most):
        found.append(_once(call, device))
    found.sort()
    tenth = len(found) // 10
    return TimedCall(statistics.median(found), found[tenth], found[-1 - tenth])


def _once(call: Callable[[], object], device: torch.device) -> float:
    wait_for(device)
    begin = time.perf_counter()
    call()
    wait_for(device)
    return time.perf_counter() - begin


def wait_for(device: torch.device) -> None:
    """Until all that was asked of a GPU is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def one_thread() -> Iterator[None]:
    """A rank on a processor computes with one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
