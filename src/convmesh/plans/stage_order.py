"""The order in which each rank of a pipeline runs its stages on micro-batches, as in torch's schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward", "input", "weight"]
"""`backward` computes all gradients; `input` and `weight` compute them separately."""


class Action(NamedTuple):
    """One stage on one micro-batch."""

    kind: Kind
    stage: int
    microbatch: int


@cache
def actions_of(schedule: str, pipe: int, stages: int, microbatches: int, rank: int) -> tuple[Action, ...]:
    """The actions of a rank along the pipe axis, in order.

    With fewer micro-batches than stages, 1F1B runs as GPipe.
    """
    if schedule in ("interleaved", "zero-bubble"):
        return tuple(_turns(Loop(pipe, stages // pipe, microbatches, rank, schedule == "zero-bubble")))
    ahead = min(microbatches, stages - rank)
    if schedule == "gpipe" or microbatches < stages:
        ahead = microbatches
    return tuple(_one_stage(rank, microbatches, ahead))


def _one_stage(stage: int, microbatches: int, ahead: int) -> Iterator[Action]:
    """`ahead` forwards first, then one backward and one forward in turn."""
    yield from (Action("forward", stage, index) for index in range(ahead))
    for index in range(microbatches):
        yield Action("backward", stage, index)
        if index + ahead < microbatches:
            yield Action("forward", stage, index + ahead)


@dataclass(frozen=True, slots=True)
class Loop:
    """A rank's turns through several stages, which take micro-batches in rounds."""

    pipe: int
    own: int
    microbatches: int
    rank: int
    splits: bool
    """Whether weight gradients are computed later, where the rank would wait."""

    @property
    def round(self) -> int:
        return self.microbatches // max(1, self.microbatches // self.pipe)

    @property
    def ahead(self) -> int:
        """Forwards before the first backward."""
        hops = (1 if self.splits else 2) * (self.pipe - 1 - self.rank)
        return min((self.own - 1) * self.round + hops, self.total)

    @property
    def total(self) -> int:
        return self.own * self.microbatches

    def forward_stage(self, turn: int) -> int:
        return turn // self.round % self.own * self.pipe + self.rank

    def backward_stage(self, turn: int) -> int:
        return (self.own - 1 - turn // self.round % self.own) * self.pipe + self.rank


def _turns(loop: Loop) -> Iterator[Action]:
    done: Counter[tuple[Kind, int]] = Counter()

    def next_of(kind: Kind, stage: int) -> Action:
        done[kind, stage] += 1
        return Action(kind, stage, done[kind, stage] - 1)

    yield from (next_of("forward", loop.forward_stage(turn)) for turn in range(loop.ahead))
    weights_done = 0
    for turn in range(loop.total):
        if turn + loop.ahead < loop.total:
            yield next_of("forward", loop.forward_stage(turn + loop.ahead))
        yield next_of("input" if loop.splits else "backward", loop.backward_stage(turn))
        if loop.splits and turn >= loop.rank:
            yield next_of("weight", loop.backward_stage(weights_done))
            weights_done += 1
    if loop.splits:
        yield from (next_of("weight", loop.backward_stage(turn)) for turn in range(weights_done, loop.total))
