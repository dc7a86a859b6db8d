"""How a generation of ranks ended, judged by how its processes ended."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from convmesh.supervise.following import ROOM

BAD_INPUT, NO_PLAN = 2, 3
"""Exit statuses for a user's mistake, and for a network without a feasible plan."""

UNWRITABLE = 74
"""The exit status of a rank that cannot write to the run folder: perhaps it can later."""

LOST_RANK = 75
"""The exit status of a rank that is not at fault: it waited for another one that is gone."""

MADE_ROOM = 128 + ROOM
_TOLD_TO_STOP = {128 + signal.SIGINT, 128 + signal.SIGTERM}
_BLAMELESS = {0, BAD_INPUT, NO_PLAN, LOST_RANK, MADE_ROOM, *_TOLD_TO_STOP}


class Ending(Enum):
    """How a generation ended; decides what to do next."""

    DONE = auto()
    STOPPED = auto()
    """By a signal, after saving."""
    MADE_ROOM = auto()
    """At a checkpoint, for more ranks."""
    REFUSED = auto()
    """A user's mistake, or no feasible plan."""
    LOST = auto()
    """Ranks died."""
    HUNG = auto()
    ELSEWHERE = auto()
    """Ranks of another host failed."""


FAILURES = (Ending.LOST, Ending.HUNG)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a generation on one host."""

    ending: Ending
    status: int = 0
    """The exit status that stands for it."""
    ranks: tuple[int, ...] = ()
    """The ranks at fault."""
    reason: str = ""


def judged(codes: Mapping[int, int]) -> Outcome:
    """Judge ranks by how they ended by themselves; `codes` leaves out those that the supervisor killed.

    A rank that another one told why it failed ends with the status of a mistake, so the worst code decides.
    """
    killed = [rank for rank, code in codes.items() if code < 0]
    if killed:
        return Outcome(Ending.LOST, 128 - codes[killed[0]], tuple(killed), _told(codes, killed))
    kinds = {*codes.values()} - {0}
    if not kinds:
        return Outcome(Ending.DONE if codes else Ending.ELSEWHERE)
    crashed = [rank for rank, code in codes.items() if code not in _BLAMELESS]
    if crashed:
        return Outcome(Ending.LOST, codes[crashed[0]], tuple(crashed), _told(codes, crashed))
    if LOST_RANK in kinds:
        return Outcome(Ending.LOST, LOST_RANK, (), _told(codes, [r for r, code in codes.items() if code == LOST_RANK]))
    for ending, statuses in ((Ending.REFUSED, {BAD_INPUT, NO_PLAN}), (Ending.STOPPED, _TOLD_TO_STOP)):
        if common := kinds & statuses:
            return Outcome(ending, max(common))
    return Outcome(Ending.MADE_ROOM)


def _told(codes: Mapping[int, int], ranks: list[int]) -> str:
    return ", ".join(f"rank {rank} {how_ended(codes[rank])}" for rank in ranks)


def how_ended(code: int) -> str:
    """A code in words."""
    if code == UNWRITABLE:
        return "cannot write to the run folder"
    if code == LOST_RANK:
        return "lost a rank that it waited for"
    if code >= 0:
        return f"ended with status {code}"
    name = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
    return f"was killed by {name}{', perhaps because memory ran out' if code == -signal.SIGKILL else ''}"
