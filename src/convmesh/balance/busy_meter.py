"""How long this rank was busy in a step: its own work, without the time in which it waited for others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from convmesh.dist.stamps import StampClock
from convmesh.dist.transfer_watch import add_watch, remove_watch


class _Wait:
    """One transfer: when it was needed and when it was there."""

    def __init__(self, clock: StampClock) -> None:
        self._clock = clock
        self.begin: Any = None
        self.end: Any = None

    def needed(self) -> None:
        self.begin = self._clock.stamp()

    def arrived(self) -> None:
        self.end = self._clock.stamp()


class BusyMeter:
    """Times one step at a time, by the clock of what computes: wall time, so that a rank that is held up shows."""

    beyond_steps = True

    def __init__(self, clock: StampClock) -> None:
        self._clock = clock
        self._waits: list[_Wait] = []
        self._begin: Any = None

    def posted(self, works: Sequence[Any], carrier: str, axes: tuple[str, ...]) -> _Wait:
        """As a watch of transfers."""
        del works, carrier, axes
        wait = _Wait(self._clock)
        self._waits.append(wait)
        return wait

    def begin(self) -> None:
        """A step begins."""
        self._waits = []
        self._clock.begin()
        self._begin = self._clock.stamp()
        add_watch(self)

    def end(self) -> float:
        """The seconds of work since `begin`."""
        remove_watch(self)
        end = self._clock.stamp()
        self._clock.settle()
        seconds = self._clock.seconds
        waited = sum(seconds(wait.end) - seconds(wait.begin) for wait in self._waits if wait.end is not None)
        return max(0.0, seconds(end) - seconds(self._begin) - waited)

    def drop(self) -> None:
        """Forget a step that failed."""
        remove_watch(self)
