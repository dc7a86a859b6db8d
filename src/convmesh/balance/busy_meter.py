"""How long this rank was busy in a step: its own work, without the time it waited for others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from convmesh.dist.stamps import StampClock
from convmesh.dist.transfer_watch import add_watch, remove_watch


class _Wait:
    """One transfer: when it was needed, and when it arrived."""

    def __init__(self, clock: StampClock) -> None:
        self._clock = clock
        self.begin: Any = None
        self.end: Any = None

    def needed(self) -> None:
        self.begin = self._clock.stamp()

    def arrived(self) -> None:
        self.end = self._clock.stamp()


@dataclass
class _MeteredStep:
    """Stamps of one step."""

    begin: Any
    end: Any = None
    waits: list[_Wait] = field(default_factory=list)

    def busy(self, clock: StampClock) -> float:
        seconds = clock.seconds
        waited = sum(seconds(wait.end) - seconds(wait.begin) for wait in self.waits if wait.end is not None)
        return max(0.0, seconds(self.end) - seconds(self.begin) - waited)


class BusyMeter:
    """Times steps by the clock of the device that computes: wall time, so that a rank that is held up shows.

    Nothing waits for the device until `taken` asks for the times of all steps since the last call.
    """

    beyond_steps = True

    def __init__(self, clock: StampClock) -> None:
        self._clock = clock
        self._steps: list[_MeteredStep] = []
        self._now: _MeteredStep | None = None

    def posted(self, works: Sequence[Any], carrier: str, axes: tuple[str, ...], message: str = "") -> _Wait:
        """Called as a watch of transfers."""
        del works, carrier, axes, message
        wait = _Wait(self._clock)
        if self._now is not None:
            self._now.waits.append(wait)
        return wait

    def begin(self) -> None:
        """Begin a step."""
        if not self._steps:
            self._clock.begin()
        self._now = _MeteredStep(self._clock.stamp())
        add_watch(self)

    def end(self) -> None:
        """End the step."""
        remove_watch(self)
        if self._now is not None:
            self._now.end = self._clock.stamp()
            self._steps.append(self._now)
        self._now = None

    def drop(self) -> None:
        """Forget the steps so far: the last one failed, or they were cut differently."""
        remove_watch(self)
        self._steps, self._now = [], None

    def taken(self) -> list[float]:
        """The seconds of work in each step since the last call."""
        self._clock.settle()
        steps, self._steps = self._steps, []
        return [step.busy(self._clock) for step in steps]
