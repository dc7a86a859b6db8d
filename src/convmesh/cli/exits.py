"""What the exit status says, the same for every verb."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """0 done, 1 our bug, 2 bad input, 3 no feasible plan, 5 not exact, 130 interrupted."""

    DONE = 0
    BUG = 1
    BAD_INPUT = 2
    NO_PLAN = 3
    NOT_EXACT = 5
    INTERRUPTED = 130


EXPLAINED = (
    "exit status: 0 done; 1 a bug of ConvMesh; 2 bad input; 3 no feasible plan; 5 verified and found not exact; "
    "130 interrupted"
)


class BadInputError(Exception):
    """What the user typed cannot be used; the message is all that is shown."""
