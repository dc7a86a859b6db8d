"""How fast a shared machine is at the time of some steps, against when its operators were timed.

Made of operators alone: the heaviest of a case are timed once more beside its steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

import convmesh as cm
from convmesh.measure.growing import of_slowest
from convmesh.measure.operator_times import Repeats, time_works
from convmesh.plans import Work
from convmesh.system.operator_table import OperatorTable, Overheads, Timing, UpdateTiming
from convmesh.testing import RankPool

HEAVIEST = 12
SHORT = Repeats(seconds_round=0.005, most=20)

Timed = tuple[list[Timing], list[str]]


@dataclass(frozen=True)
class Sample:
    """Operators of a case, how often each runs in a step, and its seconds in the table."""

    works: tuple[Work, ...]
    counts: Mapping[str, int]
    seconds: Mapping[str, float]
    active: int
    """Ranks that run them at once, as they did for the table."""

    @classmethod
    def of(cls, programs: Iterable[cm.Program], table: OperatorTable, active: int) -> Sample:
        """The heaviest of those that were timed at this level of activity."""
        listed = list(programs)
        works = {step.call: step for program in listed for _, _, step in program.steps() if isinstance(step, Work)}
        counts = sum((_counts(program) for program in listed), Counter[str]())
        timings = {call: timing for call in works if (timing := table.find(call, active)) is not None}
        heaviest = sorted(timings, key=lambda call: counts[call] * timings[call].seconds, reverse=True)[:HEAVIEST]
        seconds = {call: timings[call].seconds for call in heaviest}
        return cls(tuple(works[call] for call in heaviest), dict(counts), seconds, active)

    def pace(self, again: Iterable[Timing]) -> float:
        """How many times as long as in the table they take now; 1 if none could be timed."""
        pairs = [(self.counts[t.call] * t.seconds, self.counts[t.call] * self.seconds[t.call]) for t in again]
        return sum(now for now, _ in pairs) / sum(then for _, then in pairs) if pairs else 1.0

    def pace_on(self, pool: RankPool) -> float:
        """The pace of a pool's ranks."""
        found: list[Timed] = pool.run(time_on_active, self.works, self.active)
        return self.pace(of_slowest([timings for timings, _ in found]))


def time_on_active(works: tuple[Work, ...], active: int) -> Timed:
    """On every rank of a pool: more than were active for the table would take turns, and are left out."""
    dist.barrier()
    return time_works(works, torch.device("cpu"), SHORT, active) if dist.get_rank() < active else ([], [])


def _counts(program: cm.Program) -> Counter[str]:
    """Calls in a step; what reduces gradients runs once, the rest for every micro-batch."""
    counts: Counter[str] = Counter()
    for phase, _, step in program.steps():
        if isinstance(step, Work) and step.call:
            counts[step.call] += program.repeats if phase in ("forward", "backward") else 1
    return counts


def paced(system: cm.System, pace: float) -> cm.System:
    """The system while all that its processors compute takes that many times as long; transfers are as they were."""
    table = system.operators
    if table is None:
        return system
    timings = tuple(replace(timing, seconds=pace * timing.seconds) for timing in table.timings)
    updates = {key: _update(timing, pace) for key, timing in table.updates.items()}
    made = replace(table, timings=timings, updates=updates, overheads=_overheads(table.overheads, pace))
    return replace(system, operators=made)


def _update(timing: UpdateTiming, pace: float) -> UpdateTiming:
    return replace(timing, seconds_tensor=pace * timing.seconds_tensor, seconds_element=pace * timing.seconds_element)


def _overheads(found: Overheads, pace: float) -> Overheads:
    return replace(
        found,
        seconds_forward=pace * found.seconds_forward,
        seconds_backward=pace * found.seconds_backward,
        seconds_step=pace * found.seconds_step,
        seconds_sending=pace * found.seconds_sending,
        kinds={kind: (pace * forward, pace * backward) for kind, (forward, backward) in found.kinds.items()},
    )
