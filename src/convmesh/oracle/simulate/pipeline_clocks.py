"""Running a pipeline's actions: each starts when its rank is free and its message has arrived."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from convmesh.plans.stage_order import Action, Kind


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of one micro-batch in one stage, and of its messages."""

    forward: float
    backward: float
    input: float = 0.0
    weight: float = 0.0
    onward: float = 0.0
    """A message to the next stage."""
    back: float = 0.0
    """A message to the stage before."""

    def of(self, kind: Kind) -> float:
        return float(getattr(self, kind))


@dataclass(frozen=True, slots=True)
class Ran:
    """An action's begin and end, and its rank's wait: `exposed` for a message on its way, `idle` before that."""

    action: Action
    begin: float
    end: float
    exposed: float
    idle: float


Orders = Mapping[int, Sequence[Action]]


@dataclass(frozen=True)
class CoreSharing:
    """Ranks that share the cores of their host: `ranks` at every place along the pipe axis."""

    ranks: int = 1
    cores: float = math.inf

    def rate(self, running: int) -> float:
        """Speed of each rank while `running` places along the pipe axis compute at once."""
        return min(1.0, self.cores / max(1, running * self.ranks))

    def is_felt(self, places: int) -> bool:
        return self.rate(places) < 1.0


def run_actions(
    orders: Orders, stages: Sequence[StageSeconds], sharing: CoreSharing | None = None
) -> dict[int, list[Ran]]:
    """By rank along the pipe axis: the actions it ran, in order."""
    pipe = _Pipe(orders, stages)
    if sharing is not None and sharing.is_felt(len(orders)):
        return _in_turns(pipe, sharing)
    left = set(orders)
    while left:
        moved = {rank for rank in left if pipe.advance(rank)}
        assert moved, "deadlock: no rank of the schedule can go on"
        left = {rank for rank in left if not pipe.is_through(rank)}
    return pipe.ran


class _Pipe:
    def __init__(self, orders: Orders, stages: Sequence[StageSeconds]) -> None:
        self._orders, self.stages = orders, stages
        self.ran: dict[int, list[Ran]] = {rank: [] for rank in orders}
        self._ends: dict[Action, float] = {}
        self._home = {action.stage: rank for rank, actions in orders.items() for action in actions}

    def is_through(self, rank: int) -> bool:
        return len(self.ran[rank]) == len(self._orders[rank])

    def next(self, rank: int) -> Action:
        return self._orders[rank][len(self.ran[rank])]

    def free(self, rank: int) -> float:
        return self.ran[rank][-1].end if self.ran[rank] else 0.0

    def advance(self, rank: int) -> bool:
        """Run all actions that are ready; whether there was one."""
        before = len(self.ran[rank])
        while not self.is_through(rank) and (arrives := self.arrival(self.next(rank))) is not None:
            begin = max(self.free(rank), arrives[0])
            self.note(rank, begin, begin + self.stages[self.next(rank).stage].of(self.next(rank).kind))
        return len(self.ran[rank]) > before

    def arrival(self, action: Action) -> tuple[float, float] | None:
        """When an action's message arrives, and its seconds; None if it is not sent yet."""
        source, message = self._source(action)
        if not source:
            return 0.0, 0.0
        ends = [self._ends[one] for one in source if one in self._ends]
        return (ends[0] + message, message) if ends else None

    def _source(self, action: Action) -> tuple[list[Action], float]:
        """The actions of which one sends what this one needs, and the message's seconds."""
        if action.kind == "forward" and action.stage > 0:
            return self._from(["forward"], action, -1, self.stages[action.stage - 1].onward)
        if action.kind in ("backward", "input") and action.stage < len(self.stages) - 1:
            return self._from(["backward", "input"], action, 1, self.stages[action.stage + 1].back)
        return [], 0.0

    def _from(self, kinds: list[Kind], action: Action, step: int, message: float) -> tuple[list[Action], float]:
        stage = action.stage + step
        apart = self._home[stage] != self._home[action.stage]
        return [Action(kind, stage, action.microbatch) for kind in kinds], message if apart else 0.0

    def note(self, rank: int, begin: float, end: float) -> None:
        action, free = self.next(rank), self.free(rank)
        arrives = self.arrival(action)
        message = arrives[1] if arrives else 0.0
        exposed = min(begin - free, message)
        self.ran[rank].append(Ran(action, begin, end, exposed, begin - free - exposed))
        self._ends[action] = end


def _in_turns(pipe: _Pipe, sharing: CoreSharing) -> dict[int, list[Ran]]:
    """Run in order of time, because a rank's speed depends on how many others run."""
    now, begun, left = 0.0, dict.fromkeys(pipe.ran, -1.0), dict.fromkeys(pipe.ran, 0.0)
    while open_ := [rank for rank in pipe.ran if not pipe.is_through(rank)]:
        later = []
        for rank in open_:
            arrives = pipe.arrival(pipe.next(rank)) if begun[rank] < 0 else None
            if arrives is not None and arrives[0] <= now:
                begun[rank], left[rank] = now, pipe.stages[pipe.next(rank).stage].of(pipe.next(rank).kind)
            elif arrives is not None:
                later.append(arrives[0])
        running = [rank for rank in open_ if begun[rank] >= 0]
        rate = sharing.rate(len(running))
        step = min([*(left[rank] / rate for rank in running), *(at - now for at in later)])
        now += step
        for rank in running:
            left[rank] -= step * rate
            if left[rank] <= 1e-15 + 1e-12 * now:
                pipe.note(rank, begun[rank], now)
                begun[rank] = -1.0
    return pipe.ran
