"""When a rank of a pipeline holds most: which stage runs on a micro-batch then, and what is held of the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from convmesh.plans.stage_order import Action, Kind


@dataclass(frozen=True, slots=True)
class Turn:
    """A stage on one micro-batch, of what kinds, while so much is held of others."""

    stage: int
    kinds: frozenset[Kind]
    bytes_others: int
    graded: frozenset[int]
    """Stages whose weights have gradients by then."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a stage holds of one micro-batch."""

    kept: int
    """After forward."""
    waiting: int
    """After its input's gradient was found, until those of its weights are."""
    sent: int
    """After backward, until the end of the step."""


def heaviest_turns(actions: Iterable[Action], stages: Mapping[int, Footprint]) -> list[Turn]:
    """In order; without those at which no more is held than at a later one that does the same."""
    heaviest: dict[tuple[Kind, int, frozenset[int]], Turn] = {}
    for turn in _turns(actions, stages):
        (kind,) = turn.kinds
        before = heaviest.setdefault((kind, turn.stage, turn.graded), turn)
        if turn.bytes_others > before.bytes_others:
            heaviest[kind, turn.stage, turn.graded] = turn
    return _together(_rising(list(heaviest.values())))


def _turns(actions: Iterable[Action], stages: Mapping[int, Footprint]) -> Iterator[Turn]:
    held, graded = 0, frozenset[int]()
    for kind, stage in ((action.kind, action.stage) for action in actions):
        own = stages[stage]
        before = {"forward": 0, "backward": own.kept, "input": own.kept, "weight": own.waiting}
        after = {"forward": own.kept, "backward": own.sent, "input": own.waiting, "weight": own.sent}
        held -= before[kind]
        yield Turn(stage, frozenset({kind}), held, graded)
        held += after[kind]
        if kind in ("backward", "weight"):
            graded |= {stage}


def _rising(turns: list[Turn]) -> list[Turn]:
    """Gradients are only ever added, so a later turn counts at least as much as an earlier one with as much beside."""
    most: dict[tuple[frozenset[Kind], int], int] = {}
    found = []
    for turn in reversed(turns):
        key = turn.kinds, turn.stage
        if turn.bytes_others > most.get(key, -1):
            most[key] = turn.bytes_others
            found.append(turn)
    return found[::-1]


def _together(turns: list[Turn]) -> list[Turn]:
    """Forward and backward in one, where the same is held beside them."""
    found: dict[tuple[int, int, frozenset[int]], Turn] = {}
    for turn in turns:
        key = turn.stage, turn.bytes_others, turn.graded
        found[key] = replace(turn, kinds=turn.kinds | found[key].kinds) if key in found else turn
    return list(found.values())
