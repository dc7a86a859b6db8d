"""An operator table that grows: what it has is not timed again, and what is timed is kept at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from convmesh.measure.device_figures import Progress, silent
from convmesh.measure.operator_times import Repeats, time_works
from convmesh.plans import Work
from convmesh.system.operator_table import OperatorTable, Timing
from convmesh.testing import RankPool

AT_ONCE = 40
"""Operators between two writes of the table."""
POOLS = 4
"""Of ranks, one after the other: where a system puts them is a matter of luck, and two cores may be one in truth."""

Keep = Callable[[OperatorTable], None]
TimeWorks = Callable[..., list[tuple[list[Timing], list[str]]]]
"""`time_works`, on every rank."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """One pool's: how many ranks it has, what times on all of them, until when, and what to call it."""

    active: int
    timed: TimeWorks
    until: float
    told: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Growing:
    """How a table is extended, and for how long at most."""

    device: torch.device
    repeats: Repeats
    keep: Keep
    progress: Progress = silent

    def extended(self, table: OperatorTable, works: Sequence[Work], active: int, seconds: float) -> OperatorTable:
        """The table with the works that it lacks, timed on `active` ranks at once, for so long at most.

        The heaviest come first: what there is no time for is left to the next calibration, or to interpolation. On
        processors several pools of ranks share the work, operators of all sizes each, so that a network's are timed
        where chance puts its ranks in the mean.
        """
        missing = [work for work in works if table.find(work.call, active) is None]
        missing.sort(key=lambda work: (work.flops, work.bytes_moved), reverse=True)
        pools = min(len(missing), POOLS if self.device.type == "cpu" else 1)
        end = time.monotonic() + seconds
        for number in range(pools):
            now = time.monotonic()
            told = f"{_on(active)}, turn {number + 1} of {pools}" if pools > 1 else _on(active)
            with self._ranks(active) as timed:
                turn = _Turn(active, timed, now + (end - now) / (pools - number), told)
                table = self._grown(table, missing[number::pools], turn)
        return table

    def _grown(self, table: OperatorTable, missing: Sequence[Work], turn: _Turn) -> OperatorTable:
        for begin in range(0, len(missing), AT_ONCE):
            if time.monotonic() > turn.until:
                self.progress(f"out of time: {len(missing) - begin} operators left for the next calibration{turn.told}")
                break
            self.progress(f"operators {begin + 1} to {min(begin + AT_ONCE, len(missing))} of {len(missing)}{turn.told}")
            found = turn.timed(list(missing[begin : begin + AT_ONCE]), self.device, self.repeats, turn.active)
            table = table.merged(replace(table, timings=tuple(of_slowest([timings for timings, _ in found]))))
            self.keep(table)
        return table

    @contextmanager
    def _ranks(self, active: int) -> Iterator[TimeWorks]:
        """Times works on forked ranks at once; beside a GPU in this process, which cannot fork."""
        if self.device.type == "cuda":
            yield lambda *args: [time_works(*args)]
            return
        with RankPool(active, seconds_timeout=300) as pool:
            yield lambda *args: pool.run(time_works, *args)


def _on(active: int) -> str:
    return f", {active} ranks at once" if active > 1 else ""


def of_slowest(by_rank: Sequence[Sequence[Timing]]) -> list[Timing]:
    """Of what ranks timed at once: as long as the slowest of them takes, for which the others wait in a step.

    Cores are not equal, least of all those that other machines' work shares. How much longer one takes is found from
    all operators together, so that what disturbed a single one counts for nothing.
    """
    found: dict[str, list[Timing]] = {}
    for timings in by_rank:
        for timing in timings:
            found.setdefault(timing.call, []).append(timing)
    middle = {call: statistics.median(timing.seconds for timing in same) for call, same in found.items()}
    ratios = ([timing.seconds / middle[timing.call] for timing in timings] for timings in by_rank)
    slowest = max((statistics.median(ratio) for ratio in ratios if ratio), default=1.0)
    return [replace(same[0], seconds=slowest * middle[call]) for call, same in found.items()]
