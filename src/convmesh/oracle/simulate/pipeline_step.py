"""A step of a pipeline: seconds of its stages, their schedule of micro-batches, then gradients and the optimiser."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from convmesh.oracle.pricing.estimate import Estimate
from convmesh.oracle.simulate.pipeline_clocks import CoreSharing, Ran, StageSeconds, run_actions
from convmesh.oracle.simulate.priced_steps import Pricing
from convmesh.oracle.simulate.rank_clocks import Clock, Flow, Join, ScriptPart
from convmesh.oracle.simulate.rank_script import RankLines
from convmesh.oracle.simulate.stand_ins import Crowd
from convmesh.oracle.simulate.step_times import Scheduled, lost_of, spent
from convmesh.oracle.simulate.timeline import Interval
from convmesh.plans.program import NodeProgram, Program
from convmesh.plans.stage_order import Kind, actions_of
from convmesh.plans.steps import Step, Transfer

KINDS: tuple[Kind, ...] = ("forward", "backward", "input", "weight")


@dataclass(frozen=True)
class StageRun:
    """One micro-batch in one stage: clocks of the slowest rank by kind of action, and messages."""

    clocks: Mapping[Kind, Clock]
    parts: Mapping[Kind, Sequence[ScriptPart]]
    rank: int
    onward: Estimate
    back: Estimate

    @property
    def seconds(self) -> StageSeconds:
        times = {kind: self.clocks[kind].now for kind in KINDS}
        return StageSeconds(**times, onward=self.onward.value, back=self.back.value)


def pipelined(programs: Mapping[int, Program], pricing: Pricing, sharing: CoreSharing | None) -> Scheduled:
    """Run the schedule on the evaluated ranks, at least one for every place along the pipe axis."""
    return _Pipelined(programs, pricing, sharing).scheduled()


class _Pipelined:
    def __init__(self, programs: Mapping[int, Program], pricing: Pricing, sharing: CoreSharing | None) -> None:
        self._programs, self._pricing, self._sharing = programs, pricing, sharing
        self._lines = {rank: RankLines(program, pricing) for rank, program in programs.items()}
        self._first = next(iter(programs.values()))
        self._crowd, self._lost = Crowd(self._first.mesh, programs), lost_of(pricing.transfer)
        self._pipe = self._first.mesh.axes.get("pipe", 1)
        self._turns = 1.0 if sharing is None else 1.0 / sharing.rate(self._pipe)
        self._at = {rank: p.mesh.coordinates(rank).get("pipe", 0) for rank, p in programs.items()}

    def scheduled(self) -> Scheduled:
        stages = [self._stage(stage) for stage in range(self._first.stages)]
        first = self._first
        orders = {
            place: actions_of(first.schedule, self._pipe, first.stages, first.repeats, place)
            for place in range(self._pipe)
        }
        ran = run_actions(orders, [stage.seconds for stage in stages], self._sharing)
        flow, tails = self._after(ran)
        clocks = flow.clocks
        worked = {place: sum(one.end - one.begin - one.exposed for one in run) for place, run in ran.items()}
        slowest = max(clocks, key=lambda rank: (worked[self._at[rank]], clocks[rank].now))
        clock, parts = self._spent(clocks[slowest], stages, ran[self._at[slowest]])
        parts += [part for part in tails[slowest] if isinstance(part, ScriptPart) and part.key != "update"]
        update = self._lines[slowest].optimiser.scaled(self._turns)
        worked_or_sent = sum(part.script.compute.value for part in parts) + clock.exposed + update.value
        clock.idle = max(0.0, max(other.now for other in clocks.values()) - worked_or_sent)
        shown = partial(_intervals, stages, ran, self._at, clocks)
        return spent(clock, parts, update, slowest, shown)

    def _stage(self, stage: int) -> StageRun:
        """All ranks of a stage side by side."""
        ranks = [rank for rank, place in self._at.items() if place == stage % self._pipe]
        if not ranks:  # others stand for it
            return self._stage(min(self._at.values()))
        nodes = {rank: [n for n in self._programs[rank].nodes if n.stage == stage] for rank in ranks}
        inner = {rank: [n for n in nodes[rank] if not _crossing(n)] for rank in ranks}
        runs = {kind: self._kind(kind, stage, inner) for kind in KINDS}
        slowest = max(ranks, key=lambda rank: runs["backward"][0][rank].now)
        onward, back = self._messages(nodes[slowest], slowest)
        clocks = {kind: max(by_rank.values(), key=lambda clock: clock.now) for kind, (by_rank, _) in runs.items()}
        return StageRun(clocks, {kind: parts[slowest] for kind, (_, parts) in runs.items()}, slowest, onward, back)

    def _kind(
        self, kind: Kind, stage: int, nodes: Mapping[int, Sequence[NodeProgram]]
    ) -> tuple[Mapping[int, Clock], dict[int, list[ScriptPart]]]:
        walked = {rank: list(self._walk(kind, stage, rank, of)) for rank, of in nodes.items()}
        flow = self._flow()
        flow.run(walked)
        clocks = {rank: flow.clocks[rank] for rank in nodes}
        return clocks, {rank: [p for p in line if isinstance(p, ScriptPart)] for rank, line in walked.items()}

    def _walk(self, kind: Kind, stage: int, rank: int, nodes: Sequence[NodeProgram]) -> Iterator[ScriptPart | Join]:
        lines = self._lines[rank]
        if kind == "forward":
            return lines.forward(nodes, arriving=False)
        if kind == "backward":
            return lines.backward(nodes)
        if stage == 0:  # torch computes all of the first stage's gradients with its weights
            return lines.backward(nodes) if kind == "weight" else iter(())
        return lines.backward(nodes, inputs=kind == "input", weights=kind == "weight")

    def _flow(self) -> Flow:
        return Flow(self._crowd, self._lost)

    def _messages(self, nodes: Sequence[NodeProgram], rank: int) -> tuple[Estimate, Estimate]:
        """The messages to the next stage and to the one before."""
        ends = [node for node in nodes if _crossing(node)]
        exchange = self._pricing.transfer.exchange
        onward = exchange(_sent(step for node in ends for step in node.forward), rank)
        return onward, exchange(_sent(step for node in ends for step in node.backward), rank)

    def _after(self, ran: Mapping[int, Sequence[Ran]]) -> tuple[Flow, dict[int, list[ScriptPart | Join]]]:
        """Gradients are reduced after the schedule, which keeps them until `backward()`."""
        flow = self._flow()
        for rank, place in self._at.items():
            flow.clocks[rank].now = ran[place][-1].end
        tails = {rank: [self._in_turn(part) for part in _tail(lines)] for rank, lines in self._lines.items()}
        flow.run(tails)
        return flow, tails

    def _in_turn(self, part: ScriptPart | Join) -> ScriptPart | Join:
        """A part that all ranks of a host compute at once, on its cores."""
        if isinstance(part, Join) or self._turns == 1.0:
            return part
        return replace(part, script=part.script.stretched(self._turns))

    def _spent(self, tail: Clock, stages: Sequence[StageRun], ran: Sequence[Ran]) -> tuple[Clock, list[ScriptPart]]:
        """A rank's computation and communication over the schedule and its tail; the rest is idle."""
        total = replace(tail)
        parts: list[ScriptPart] = []
        for one in ran:
            run, kind = stages[one.action.stage], one.action.kind
            total.exposed += run.clocks[kind].exposed + one.exposed
            total.hidden += run.clocks[kind].hidden
            parts += run.parts[kind]
        return total, parts


def _tail(lines: RankLines) -> Iterator[ScriptPart | Join]:
    yield lines.begin()
    yield from lines.sums()
    yield from lines.update(at_once=True)


def _crossing(node: NodeProgram) -> bool:
    return any(isinstance(s, Transfer) and s.carrier == "stage" for s in (*node.forward, *node.backward))


def _sent(steps: Iterable[Step]) -> list[Transfer]:
    return [step for step in steps if isinstance(step, Transfer)]


def _intervals(
    stages: Sequence[StageRun], ran: Mapping[int, Sequence[Ran]], at: Mapping[int, int], clocks: Mapping[int, Clock]
) -> list[list[Interval]]:
    """Each stage's intervals, shifted to when its actions ran."""
    moved = [_moved(one, stages[one.action.stage], rank) for rank, place in at.items() for one in ran[place]]
    return [*moved, *(clock.intervals for clock in clocks.values())]


def _moved(one: Ran, stage: StageRun, rank: int) -> list[Interval]:
    clock = stage.clocks[one.action.kind]
    scale = (one.end - one.begin) / clock.now if clock.now else 1.0
    return [
        replace(i, rank=rank, begin=one.begin + i.begin * scale, end=one.begin + i.end * scale) for i in clock.intervals
    ]
