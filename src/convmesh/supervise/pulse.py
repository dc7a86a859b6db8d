"""A few words of memory that a rank shares with its supervisor: where the rank is, and whether it should make room.

Memory costs a step nothing and outlives the rank, so the supervisor knows what a killed rank did last.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache
from typing import TypeVar

T = TypeVar("T")

PULSE = "CONVMESH_PULSE"
"""In a rank's environment: the file descriptor of the memory."""

SECONDS_SETTING_UP = 900.0
"""For a phase before the first step is done: searching for a plan, the first pass, loading a checkpoint."""

SECONDS_CONNECTING = 120.0
"""For ranks that have all met to open connections: Gloo itself waits for five times a job's time-out."""

SECONDS_SAVING = 2000.0
"""For a checkpoint, whose writers have their own time-out."""

SECONDS_ENDING = 120.0
"""For a process to end after its work is done: libraries close their connections."""

_WORDS = struct.Struct("<qqqqd")
_ASKED = _WORDS.size
BYTES = _WORDS.size + 8


class Phase(IntEnum):
    """What a rank does, in the order of a run."""

    STARTING = 0
    JOINING = 1
    CONNECTING = 2
    """All ranks have started and met."""
    SETTING_UP = 3
    """From here on the run folder is this run's own."""
    TRAINING = 4
    """From here on there is something to save when a run is told to stop."""
    EVALUATING = 5
    SAVING = 6
    ENDING = 7

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True)
class Sign:
    """What a rank said last."""

    beats: int = 0
    step: int = 0
    """Steps done."""
    began: int = -1
    """The step from which it trains; -1 before training."""
    phase: Phase = Phase.STARTING
    seconds: float = SECONDS_SETTING_UP
    """How long it may be silent now, if that is more than the run's time-out."""


class Pulse:
    """The rank's side: writes where the rank is. Without a supervisor it does nothing."""

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        self._memory = memory
        self._sign = Sign()

    @property
    def is_watched(self) -> bool:
        return self._memory is not None

    @property
    def is_asked_for_room(self) -> bool:
        """Whether to stop at the next checkpoint, because more ranks are available."""
        return self._memory is not None and self._memory[_ASKED] == 1

    def beat(self, phase: Phase | None = None, step: int | None = None, seconds: float = 0.0) -> None:
        """Say that this rank is alive; what is not given stays as last said."""
        if self._memory is None:
            return
        last = self._sign
        self._sign = replace(
            last,
            beats=last.beats + 1,
            step=last.step if step is None else step,
            phase=last.phase if phase is None else phase,
            seconds=seconds,
        )
        self._write()

    def begin(self, step: int) -> None:
        """Say that training begins after `step` steps."""
        self._sign = replace(self._sign, began=step)
        self.beat(Phase.TRAINING, step, SECONDS_SETTING_UP)

    @contextmanager
    def doing(self, phase: Phase, seconds: float = 0.0) -> Iterator[None]:
        """A phase within another one."""
        before = self._sign
        self.beat(phase, seconds=seconds)
        yield
        self.beat(before.phase, seconds=before.seconds)

    def over(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches, with a beat for each."""
        for batch in batches:
            self.beat()
            yield batch

    def _write(self) -> None:
        assert self._memory is not None
        sign = self._sign
        self._memory[: _WORDS.size] = _WORDS.pack(sign.beats, sign.step, sign.began, sign.phase, sign.seconds)


class PulseReader:
    """The supervisor's side."""

    def __init__(self) -> None:
        self.file = os.memfd_create("convmesh-pulse")
        os.truncate(self.file, BYTES)
        self._memory = mmap.mmap(self.file, BYTES)

    def read(self) -> Sign:
        """What the rank said last."""
        beats, step, began, phase, seconds = _WORDS.unpack(self._memory[: _WORDS.size])
        return Sign(beats, step, began, Phase(phase), seconds) if beats else Sign()

    def ask_for_room(self) -> None:
        """Ask the rank to stop at the next checkpoint."""
        self._memory[_ASKED] = 1

    def close(self) -> None:
        self._memory.close()
        os.close(self.file)


@cache
def pulse() -> Pulse:
    """This process's pulse."""
    file = os.environ.get(PULSE)
    return Pulse(None if file is None else mmap.mmap(int(file), BYTES))
