"""Running a pipeline's actions: each starts when its rank is free and its message has arrived."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


class Ran(NamedTuple):
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
        self._ends: dict[tuple[Kind, int, int], float] = {}
        self._home = {action.stage: rank for rank, actions in orders.items() for action in actions}

    def is_through(self, rank: int) -> bool:
        return len(self.ran[rank]) == len(self._orders[rank])

    def next(self, rank: int) -> Action:
        return self._orders[rank][len(self.ran[rank])]

    def free(self, rank: int) -> float:
        return self.ran[rank][-1].end if self.ran[rank] else 0.0

    def advance(self, rank: int) -> bool:
        """Run all actions that are ready; returns whether there was one."""
        before = len(self.ran[rank])
        while not self.is_through(rank):
            action = self.next(rank)
            arrives = self.arrival(action)
            if arrives is None:
                break
            free = self.free(rank)
            begin = max(free, arrives[0])
            self._note(rank, action, (begin, begin + self.stages[action.stage].of(action.kind)), free, arrives[1])
        return len(self.ran[rank]) > before

    def arrival(self, action: Action) -> tuple[float, float] | None:
        """When an action's message arrives, and its seconds; None if it is not sent yet."""
        kind, stage, microbatch = action
        if kind == "forward" and stage > 0:
            source, message = stage - 1, self.stages[stage - 1].onward
            end = self._ends.get(("forward", source, microbatch))
        elif kind in ("backward", "input") and stage < len(self.stages) - 1:
            source, message = stage + 1, self.stages[stage + 1].back
            end = self._ends.get(("backward", source, microbatch))
            end = self._ends.get(("input", source, microbatch)) if end is None else end
        else:
            return 0.0, 0.0
        if self._home[source] == self._home[stage]:
            message = 0.0
        return None if end is None else (end + message, message)

    def note(self, rank: int, begin: float, end: float) -> None:
        """Record that a rank ran its next action."""
        action = self.next(rank)
        arrives = self.arrival(action)
        self._note(rank, action, (begin, end), self.free(rank), arrives[1] if arrives else 0.0)

    def _note(self, rank: int, action: Action, ran: tuple[float, float], free: float, message: float) -> None:
        begin, end = ran
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
