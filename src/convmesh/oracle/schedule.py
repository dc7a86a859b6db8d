"""When everything of a step runs: clocks of all ranks, for computation and for communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from convmesh.oracle.compute import ComputeModel
from convmesh.oracle.flow import Clock, Part
from convmesh.oracle.lines import RankLines
from convmesh.oracle.pipeline.run import Sharing
from convmesh.oracle.pipeline.stepping import pipelined
from convmesh.oracle.scheduled import Scheduled, new_flow, spent
from convmesh.oracle.script import Pricing
from convmesh.oracle.timeline import Interval
from convmesh.oracle.transfer import TransferModel
from convmesh.plan.program import Program

__all__ = ["Scheduled", "schedule"]


def schedule(
    programs: Mapping[int, Program], compute: ComputeModel, transfer: TransferModel, sharing: Sharing | None = None
) -> Scheduled:
    """Run the programs of some ranks, which stand for all others that do as they do.

    `sharing` says how the ranks of a pipeline take turns on the cores of their host; of others, `compute` knows.
    """
    pricing = Pricing(compute, transfer)
    if next(iter(programs.values())).stages > 1:
        return pipelined(programs, pricing, sharing)
    lines = {rank: RankLines(program, pricing) for rank, program in programs.items()}
    walked = {rank: list(line.whole()) for rank, line in lines.items()}
    clocks, lead = new_flow(programs, transfer).run(walked), 0.0
    if compute.works_beside_host:  # which is ahead of the device when the next step begins
        lead = max(0.0, min(clock.now - clock.host for clock in clocks.values()))
        clocks = new_flow(programs, transfer, lead).run(walked)
    slowest = max(clocks, key=lambda rank: (clocks[rank].now, clocks[rank].compute))
    parts = [part for part in walked[slowest] if isinstance(part, Part) and part.key != "update"]
    return spent(clocks[slowest], parts, lines[slowest].optimiser, slowest, partial(_intervals, clocks, lead))


def _intervals(clocks: Mapping[int, Clock], lead: float) -> list[list[Interval]]:
    """From when the device begins with the step."""
    if not lead:
        return [clock.intervals for clock in clocks.values()]
    return [[replace(i, begin=i.begin - lead, end=i.end - lead) for i in c.intervals] for c in clocks.values()]
