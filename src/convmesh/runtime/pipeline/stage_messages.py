"""Reports messages between stages to watches of transfers: torch's schedules wait for them out of sight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from convmesh.dist.transfer_watch import TransferNote, noted
from convmesh.lowering.stage_program import CARRIER


class StageMessage(NamedTuple):
    """What a stage needs for one micro-batch, from the stage before or after it."""

    phase: str
    stage: int
    """The stage that receives it."""
    chunk: int

    @property
    def name(self) -> str:
        return f"{self.phase} of stage {self.stage}, micro-batch {self.chunk}"


class StageMessages:
    """What the stages of a rank wait for. A message is needed when the rank has nothing else to do before it."""

    def __init__(self) -> None:
        self._expected: dict[StageMessage, TransferNote] = {}

    def expected(self, posted: Sequence[Any], message: StageMessage) -> None:
        """A receive was made, to be posted now."""
        note = self._noted(message) if posted else None
        if note is not None:
            note.needed()
            self._expected[message] = note

    def sent(self, posted: Sequence[Any], message: StageMessage) -> None:
        """A send was made, to be posted now. Nobody waits for it before the schedule ends."""
        note = self._noted(message) if posted else None
        if note is not None:
            note.needed()
            note.arrived()

    @contextmanager
    def used(self, message: StageMessage | None = None) -> Iterator[None]:
        """Wraps what a stage computes from the message that it needed."""
        note = self._expected.pop(message, None) if message is not None else None
        if note is not None:
            note.arrived()
        yield
        for other in self._expected.values():
            other.needed()

    def _noted(self, message: StageMessage) -> TransferNote | None:
        return noted((), CARRIER, ("pipe",), message.name)
