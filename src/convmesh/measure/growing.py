"""Extends an operator table: operators that it has are not timed again, and new timings are saved at once."""

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
"""Operators timed between two writes of the table."""
POOLS = 4
"""Pools of ranks, used one after another: the OS places ranks by chance, and two cores may share one physical core."""

Keep = Callable[[OperatorTable], None]
TimeWorks = Callable[..., list[tuple[list[Timing], list[str]]]]
"""Runs `time_works` on every rank."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """One pool's turn: its number of ranks, how to time on all of them, its deadline, and a label for messages."""

    active: int
    timed: TimeWorks
    until: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Growing:
    """Extends an operator table by timing what it lacks."""

    device: torch.device
    repeats: Repeats
    keep: Keep
    progress: Progress = silent

    def extended(self, table: OperatorTable, works: Sequence[Work], active: int, seconds: float) -> OperatorTable:
        """The table with the works that it lacks, timed on `active` ranks at once, for at most `seconds`.

        The heaviest come first; what there is no time for is left to the next calibration, or to interpolation. On a
        CPU several pools of ranks share the work, each with operators of all sizes, so placement effects average out.
        """
        missing = [work for work in works if table.find(work.call, active) is None]
        missing.sort(key=lambda work: (work.flops, work.bytes_moved), reverse=True)
        pools = min(len(missing), POOLS if self.device.type == "cpu" else 1)
        end = time.monotonic() + seconds
        for number in range(pools):
            now = time.monotonic()
            label = f"{_on(active)}, turn {number + 1} of {pools}" if pools > 1 else _on(active)
            with self._ranks(active) as timed:
                turn = _Turn(active, timed, now + (end - now) / (pools - number), label)
                table = self._grown(table, missing[number::pools], turn)
        return table

    def _grown(self, table: OperatorTable, missing: Sequence[Work], turn: _Turn) -> OperatorTable:
        for begin in range(0, len(missing), AT_ONCE):
            if time.monotonic() > turn.until:
                self.progress(
                    f"out of time: {len(missing) - begin} operators left for the next calibration{turn.label}"
                )
                break
            self.progress(
                f"operators {begin + 1} to {min(begin + AT_ONCE, len(missing))} of {len(missing)}{turn.label}"
            )
            by_rank = turn.timed(list(missing[begin : begin + AT_ONCE]), self.device, self.repeats, turn.active)
            table = table.merged(replace(table, timings=tuple(of_slowest([timings for timings, _ in by_rank]))))
            self.keep(table)
        return table

    @contextmanager
    def _ranks(self, active: int) -> Iterator[TimeWorks]:
        """Time works on forked ranks at once; on a GPU in this process, which cannot fork."""
        if self.device.type == "cuda":
            yield lambda *args: [time_works(*args)]
            return
        with RankPool(active, seconds_timeout=300) as pool:
            yield lambda *args: pool.run(time_works, *args)


def _on(active: int) -> str:
    return f", {active} ranks at once" if active > 1 else ""


def of_slowest(by_rank: Sequence[Sequence[Timing]]) -> list[Timing]:
    """Timings of the slowest of the ranks that timed at once: in a step the others wait for it.

    Cores differ, above all those shared with other virtual machines. How much slower a rank is follows from all its
    operators together, so a disturbance of a single one does not count.
    """
    by_call: dict[str, list[Timing]] = {}
    for timings in by_rank:
        for timing in timings:
            by_call.setdefault(timing.call, []).append(timing)
    middle = {
        call: statistics.median(timing.seconds for timing in timings_of_call)
        for call, timings_of_call in by_call.items()
    }
    ratios = ([timing.seconds / middle[timing.call] for timing in timings] for timings in by_rank)
    slowest = max((statistics.median(ratio) for ratio in ratios if ratio), default=1.0)
    return [replace(timings_of_call[0], seconds=slowest * middle[call]) for call, timings_of_call in by_call.items()]
