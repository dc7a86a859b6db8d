"""Simulating a step: when each rank computes and communicates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from convmesh.oracle.pricing.compute_model import ComputeModel
from convmesh.oracle.pricing.transfer_model import TransferModel
from convmesh.oracle.simulate.pipeline_clocks import CoreSharing
from convmesh.oracle.simulate.pipeline_step import pipelined
from convmesh.oracle.simulate.priced_steps import Pricing
from convmesh.oracle.simulate.rank_clocks import Clock, ScriptPart
from convmesh.oracle.simulate.rank_script import RankLines
from convmesh.oracle.simulate.step_times import Scheduled, new_flow, spent
from convmesh.oracle.simulate.timeline import Interval
from convmesh.plans.program import Program

__all__ = ["Scheduled", "schedule"]


def schedule(
    programs: Mapping[int, Program], compute: ComputeModel, transfer: TransferModel, sharing: CoreSharing | None = None
) -> Scheduled:
    """Run the programs of a few ranks that stand for all.

    `sharing` says how the ranks of a pipeline share the cores of their host; without stages, `compute` knows.
    """
    pricing = Pricing(compute, transfer)
    if next(iter(programs.values())).stages > 1:
        return pipelined(programs, pricing, sharing)
    lines = {rank: RankLines(program, pricing) for rank, program in programs.items()}
    walked = {rank: list(line.whole()) for rank, line in lines.items()}
    clocks, lead = new_flow(programs, transfer).run(walked), 0.0
    if compute.works_beside_host:  # the host is ahead of the device when the next step begins
        lead = max(0.0, min(clock.now - clock.host for clock in clocks.values()))
        clocks = new_flow(programs, transfer, lead).run(walked)
    slowest = max(clocks, key=lambda rank: (clocks[rank].now, clocks[rank].compute))
    parts = [part for part in walked[slowest] if isinstance(part, ScriptPart) and part.key != "update"]
    return spent(clocks[slowest], parts, lines[slowest].optimiser, slowest, partial(_intervals, clocks, lead))


def _intervals(clocks: Mapping[int, Clock], lead: float) -> list[list[Interval]]:
    """Intervals, counted from when the device begins the step."""
    if not lead:
        return [clock.intervals for clock in clocks.values()]
    return [[replace(i, begin=i.begin - lead, end=i.end - lead) for i in c.intervals] for c in clocks.values()]
