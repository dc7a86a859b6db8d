"""The turns at which a rank of a pipeline may hold most: which stage runs, and what other micro-batches hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from convmesh.plans.stage_order import Action, Kind


class Turn(NamedTuple):
    """A stage on one micro-batch, the kinds of action, and the bytes held of other micro-batches."""

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
    """Between its input gradient and its weight gradients."""
    sent: int
    """After backward, until the end of the step."""


def heaviest_turns(actions: Iterable[Action], stages: Mapping[int, Footprint]) -> list[Turn]:
    """In order, without turns that hold no more than a later turn of the same kind."""
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
    """Keep turns that hold more than every later one of their kind: gradients only accumulate."""
    most: dict[tuple[frozenset[Kind], int], int] = {}
    kept = []
    for turn in reversed(turns):
        key = turn.kinds, turn.stage
        if turn.bytes_others > most.get(key, -1):
            most[key] = turn.bytes_others
            kept.append(turn)
    return kept[::-1]


def _together(turns: list[Turn]) -> list[Turn]:
    """Merge forward and backward turns with the same bytes held."""
    merged: dict[tuple[int, int, frozenset[int]], Turn] = {}
    for turn in turns:
        key = turn.stage, turn.bytes_others, turn.graded
        merged[key] = turn._replace(kinds=turn.kinds | merged[key].kinds) if key in merged else turn
    return list(merged.values())
