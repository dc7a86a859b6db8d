"""One direction of a link in numbers: when does a packet that is sent now arrive, if it does?"""

from __future__ import annotations

import random
from dataclasses import dataclass

MOST_SECONDS_QUEUED = 1.0
"""What would wait longer for a slow link is dropped, as by a switch whose buffer is full."""


@dataclass(frozen=True)
class Link:
    """What a link does to packets, in each direction."""

    megabits_per_second: float = 0.0
    """0: as fast as the machine is."""
    seconds_latency: float = 0.0
    loss: float = 0.0
    """The share of packets that do not arrive."""

    @property
    def is_plain(self) -> bool:
        """Whether the kernel does it alone: bandwidth needs no process of ours."""
        return not self.seconds_latency and not self.loss


class Line:
    """Packets one after the other."""

    def __init__(self, link: Link, seed: int) -> None:
        self.link, self._random = link, random.Random(seed)
        self._free_at = 0.0

    def arrival(self, now: float, bytes_packet: int) -> float | None:
        """When a packet arrives that is sent `now`; None if it is lost."""
        link = self.link
        begins = max(now, self._free_at)
        if self._random.random() < link.loss or begins - now > MOST_SECONDS_QUEUED:
            return None
        seconds = 8e-6 * bytes_packet / link.megabits_per_second if link.megabits_per_second else 0.0
        self._free_at = begins + seconds
        return self._free_at + link.seconds_latency
