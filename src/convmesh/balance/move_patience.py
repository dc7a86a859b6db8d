"""How long to measure before a decision: longer where shares moved back and forth, which is noise and not speed."""

from __future__ import annotations

from convmesh.balance.fair_shares import Dealing, Units

MOST = 8
"""The most that the factor can be, so that a rank that stays slow is noticed eventually."""

STILL = 4
"""Decisions without a move after which the factor is halved."""


class MovePatience:
    """The same on all ranks: it depends only on their common decisions."""

    def __init__(self) -> None:
        self.factor = 1
        """Multiplies the steps between decisions, and those that are measured."""
        self._last: dict[tuple[str, int], int] = {}
        self._still = 0

    def moved(self, now: Dealing, then: Dealing) -> None:
        """Shares move. If a place gives back what it got, or gets back what it gave, be more cautious."""
        changes = _changes(now.units, then.units)
        if any(change * self._last.get(place, 0) < 0 for place, change in changes.items()):
            self.factor = min(MOST, 2 * self.factor)
        self._last, self._still = changes, 0

    def stayed(self) -> None:
        """Nothing moves."""
        self._still += 1
        if self._still >= STILL:
            self.factor, self._still = max(1, self.factor // 2), 0


def _changes(now: Units, then: Units) -> dict[tuple[str, int], int]:
    """Units that each place of each axis gets or, below 0, gives."""
    pairs = (
        (axis, place, now[axis][place], units) for axis, dealt in then.items() for place, units in enumerate(dealt)
    )
    return {(axis, place): after - before for axis, place, before, after in pairs if after != before}
