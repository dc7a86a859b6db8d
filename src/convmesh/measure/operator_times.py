"""Times every distinct operator of some programs at its local shapes, for the operator table of this device.

A GPU runs concurrently with its host, so both are timed at once: the device sleeps while the host enqueues a batch of
calls, which then run back to back between two events. Calls rotate through a few sets of operands, so that small
operands hit the caches and large ones miss, as in a network. On a CPU the caches are flushed before each call, since
other layers would have used them meanwhile: with warm caches operators take a tenth to a third less than in a step.
One process per rank times the same operators at once: how much ranks slow each other down depends on the operator
(memory bandwidth limits some, nothing others), so no single factor would do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from convmesh.dist.heap import keep_freed_memory
from convmesh.measure.replay import Call, Replay
from convmesh.plans import Program, Work
from convmesh.private_torch.tensor_internals import occupy_gpu
from convmesh.system.operator_table import Timing

Clock = Callable[[Sequence[Call], "Repeats", int], tuple[float, float, float]]

SETS = 3
"""Most sets of operands."""
BYTES_SETS = {"cpu": 1 << 24, "cuda": 1 << 28}
"""Enough for all sets together: no cache holds more for one operator."""
BYTES_CORE = 1 << 22
"""More than a core's private caches hold."""
BYTES_CACHES = 1 << 26
"""How much of a larger cache is flushed: all of it would take longer than it is worth."""
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
"""Where Linux describes a core's caches, shared ones included."""
CALLS_PROCESSOR = 9
"""Most calls of an operator on a CPU: flushing the caches takes longer than most operators."""
CYCLES_PER_SECOND = 2e9
"""At least a GPU's clock rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """How often and how long operators are timed."""

    seconds_round: float = 0.01
    rounds: int = 3
    most: int = 40
    """Most calls in a round; a GPU's queue holds about a thousand kernels."""
    cold: bool = True
    """Whether to flush a CPU's caches between calls."""


def distinct_works(programs: Iterable[Program]) -> list[Work]:
    """Every operator of the programs, once."""
    steps = (step for program in programs for _, _, step in program.steps())
    return list({step.call: step for step in steps if isinstance(step, Work) and step.call}.values())


def time_works(
    works: Sequence[Work], device: torch.device, repeats: Repeats | None = None, active: int = 1
) -> tuple[list[Timing], list[str]]:
    """Timings, and the calls that fail in isolation because they read a value back or need a meaningful one."""
    timings, failed = [], []
    clock = clock_on(device)
    if device.type == "cpu":
        keep_freed_memory()  # as ranks in training do
    for work in works:
        try:
            calls = _calls(work, device)
            with torch.no_grad():
                seconds, spread, host = clock(calls, repeats or Repeats(), active)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError, AssertionError):
            failed.append(work.call)
            continue
        timings.append(
            Timing(work.call, work.dtype, work.inputs, work.flops, work.bytes_moved, seconds, spread, host, active)
        )
    return timings, failed


def clock_on(device: torch.device) -> Clock:
    """A function that times calls: device seconds, their spread, and host seconds, per call."""
    return _on_gpu if device.type == "cuda" else _on_processor


def _calls(work: Work, device: torch.device) -> list[Call]:
    replay = Replay(device)
    room = BYTES_SETS[device.type] // max(1, work.bytes_moved)
    count = max(1, min(SETS, room))
    return [replay.call(work.call) for _ in range(count)]


def _on_processor(calls: Sequence[Call], repeats: Repeats, active: int) -> tuple[float, float, float]:
    """Median and spread of single calls; on a CPU the host is the device."""
    filler = _cache_filler(active) if repeats.cold else None
    start = time.perf_counter()
    for call in (calls[-1], calls[0]):
        _seconds(call, filler)
    each = (time.perf_counter() - start) / 2
    most = min(repeats.most, CALLS_PROCESSOR) if repeats.cold else repeats.most
    count = max(3, min(most, int(repeats.rounds * repeats.seconds_round / max(each, 1e-7))))
    return *_middle([_seconds(calls[index % len(calls)], filler) for index in range(count)]), 0.0


@cache
def _cache_filler(active: int) -> torch.Tensor:
    """An array that fills a rank's share of the caches while `active` ranks use them."""
    return torch.zeros(max(BYTES_CORE, min(BYTES_CACHES, bytes_of_caches()) // active) // 4)


def bytes_of_caches(folder: Path = CACHES) -> int:
    """Size of the largest cache that the first core uses; 0 if the OS does not say."""
    sizes = (path.read_text().strip() for path in folder.glob("index*/size"))
    return max((int(size.removesuffix("K")) << 10 for size in sizes if size.endswith("K")), default=0)


def _seconds(call: Call, filler: torch.Tensor | None) -> float:
    """Seconds of one call, after flushing the caches."""
    if filler is not None:
        filler.add_(1)
    clock = processor_clock()
    begin = clock()
    call()
    return clock() - begin


def processor_clock() -> Callable[[], float]:
    """A clock of CPU time for one-thread ranks: time that others spend on its core does not count."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def _middle(times: Sequence[float]) -> tuple[float, float]:
    median = statistics.median(times)
    ordered = sorted(times)
    quarter = len(ordered) // 4
    return median, (ordered[-1 - quarter] - ordered[quarter]) / 2 / median


def _on_gpu(calls: Sequence[Call], repeats: Repeats, active: int) -> tuple[float, float, float]:
    """Device seconds, their spread, and host seconds, per call; a GPU has one rank."""
    del active
    for call in calls:
        call()
    once = _round(calls, 3, 200e-6)
    count = max(3, min(repeats.most, int(repeats.seconds_round / max(once[0], 1e-7))))
    rounds = [_round(calls, count, once[1]) for _ in range(repeats.rounds)]
    median, spread = _middle([device for device, _ in rounds])
    return median, spread, statistics.median(host for _, host in rounds)


def _round(calls: Sequence[Call], count: int, seconds_host: float) -> tuple[float, float]:
    """Device and host seconds per call, over `count` calls back to back."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    occupy_gpu(int(1.5 * count * seconds_host * CYCLES_PER_SECOND))
    begin.record()
    started = time.perf_counter()
    for index in range(count):
        calls[index % len(calls)]()
    host = time.perf_counter() - started
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / count, host / count
