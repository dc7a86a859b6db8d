"""Places for ranks on a host: the slot of a rank that died is left out for a while."""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS_BACKOFF, SECONDS_MOST = 10.0, 600.0
"""How long a slot is left out the first time; twice as long each further time, up to a limit."""

_MOST_DOUBLINGS = 32
"""After these even a millisecond exceeds the limit, and a float can still hold the count."""


class Slots:
    """The slots of one host."""

    def __init__(
        self, count: int, seconds_backoff: float = SECONDS_BACKOFF, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds, self._clock = seconds_backoff, clock
        self._due, self._losses = [0.0] * count, [0] * count

    def lose(self, slot: int) -> None:
        """Leave a slot out for a while."""
        seconds = min(self._seconds * 2 ** min(self._losses[slot], _MOST_DOUBLINGS), SECONDS_MOST)
        self._losses[slot] += 1
        self._due[slot] = self._clock() + seconds

    def ready(self) -> tuple[int, ...]:
        """The slots that can have a rank now."""
        now = self._clock()
        return tuple(slot for slot, due in enumerate(self._due) if due <= now)

    def seconds_until(self, count: int) -> float:
        """Seconds until `count` slots can."""
        return max(0.0, sorted(self._due)[count - 1] - self._clock())
