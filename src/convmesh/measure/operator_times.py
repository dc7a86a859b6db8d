"""The operator table of the device at hand: every distinct operator of some programs, timed at its local shapes.

A GPU works beside its host, so both are timed at once: the device is put to sleep while the host asks for a row of
calls, which then run back to back between two events. Operands change from call to call among a few sets, so that
small ones are found in caches and large ones are not, as in a network. On a processor the caches are emptied before
each call, since other layers would have used them meanwhile: with operands and code at hand, operators take a tenth to
a third less than in a step. As many processes as ranks time the same operators at once: what they take
from each other depends on the operator (memory bandwidth for one, nothing for another), which one factor for all could
not say.
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
"""Of operands, at most."""
BYTES_SETS = {"cpu": 1 << 24, "cuda": 1 << 28}
"""All sets together need be no larger than this: no cache holds more for one operator."""
BYTES_CORE = 1 << 22
"""More than a core has in caches of its own."""
BYTES_CACHES = 1 << 26
"""What of a larger cache is emptied: all of it would take longer than it tells."""
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
"""Where Linux tells of a core's caches, those that it shares too."""
CALLS_PROCESSOR = 9
"""At most, of an operator on a processor: to empty caches takes longer than most operators."""
CYCLES_PER_SECOND = 2e9
"""Not less than a GPU's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """How long operators are timed."""

    seconds_round: float = 0.01
    rounds: int = 3
    most: int = 40
    """Calls in a round; queues of GPUs hold about a thousand kernels."""
    cold: bool = True
    """Whether a processor's caches are emptied between calls."""


def distinct_works(programs: Iterable[Program]) -> list[Work]:
    """Every operator that some program runs, once."""
    steps = (step for program in programs for _, _, step in program.steps())
    return list({step.call: step for step in steps if isinstance(step, Work) and step.call}.values())


def time_works(
    works: Sequence[Work], device: torch.device, repeats: Repeats | None = None, active: int = 1
) -> tuple[list[Timing], list[str]]:
    """Timings, and the calls that cannot be made alone: those that read a value back, or need one that makes sense."""
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
    """Times calls: seconds of the device, their spread, and seconds of a host beside it, for one call."""
    return _on_gpu if device.type == "cuda" else _on_processor


def _calls(work: Work, device: torch.device) -> list[Call]:
    replay = Replay(device)
    room = BYTES_SETS[device.type] // max(1, work.bytes_moved)
    count = max(1, min(SETS, room))
    return [replay.call(work.call) for _ in range(count)]


def _on_processor(calls: Sequence[Call], repeats: Repeats, active: int) -> tuple[float, float, float]:
    """Median and spread of single calls; the host is the device."""
    other = _everything_else(active) if repeats.cold else None
    begun = time.perf_counter()
    for call in (calls[-1], calls[0]):
        _seconds(call, other)
    each = (time.perf_counter() - begun) / 2
    most = min(repeats.most, CALLS_PROCESSOR) if repeats.cold else repeats.most
    count = max(3, min(most, int(repeats.rounds * repeats.seconds_round / max(each, 1e-7))))
    return *_middle([_seconds(calls[index % len(calls)], other) for index in range(count)]), 0.0


@cache
def _everything_else(active: int) -> torch.Tensor:
    """As much as a rank's part of the caches holds, while so many ranks fill them."""
    return torch.zeros(max(BYTES_CORE, min(BYTES_CACHES, bytes_of_caches()) // active) // 4)


def bytes_of_caches(folder: Path = CACHES) -> int:
    """Of the largest cache that the first core uses; 0 if the system does not say."""
    sizes = (path.read_text().strip() for path in folder.glob("index*/size"))
    return max((int(size.removesuffix("K")) << 10 for size in sizes if size.endswith("K")), default=0)


def _seconds(call: Call, other: torch.Tensor | None) -> float:
    """Of one call, after something else was computed."""
    if other is not None:
        other.add_(1)
    clock = processor_clock()
    begin = clock()
    call()
    return clock() - begin


def processor_clock() -> Callable[[], float]:
    """Seconds that a rank of one thread computed: what others take of its core meanwhile is not its work."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def _middle(found: Sequence[float]) -> tuple[float, float]:
    median = statistics.median(found)
    ordered = sorted(found)
    quarter = len(ordered) // 4
    return median, (ordered[-1 - quarter] - ordered[quarter]) / 2 / median


def _on_gpu(calls: Sequence[Call], repeats: Repeats, active: int) -> tuple[float, float, float]:
    """Seconds of the device, their spread, and seconds of the host, for one call; a GPU has one rank."""
    del active
    for call in calls:
        call()
    once = _round(calls, 3, 200e-6)
    count = max(3, min(repeats.most, int(repeats.seconds_round / max(once[0], 1e-7))))
    rounds = [_round(calls, count, once[1]) for _ in range(repeats.rounds)]
    median, spread = _middle([device for device, _ in rounds])
    return median, spread, statistics.median(host for _, host in rounds)


def _round(calls: Sequence[Call], count: int, seconds_host: float) -> tuple[float, float]:
    """Seconds of the device and of the host for one of `count` calls, that run back to back."""
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
