"""Measured times of one kind of transfer by size, and what they tell about other sizes and groups."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

SAME_SIZE = 0.01
"""Sizes that differ by less are taken to be the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCurve:
    """Seconds from when all ranks have posted a transfer to when all have its result, by the bytes that a rank sends.

    A rank of an exchange (`neighbour`, `stage`) sends to `ranks - 1` others at once; `bytes_sent` goes to all of them.
    """

    carrier: str
    ranks: int
    """In one group; of an exchange, a rank and those that it sends to."""
    active: int
    """On one host, in groups of that size that do the same at once: active / ranks of them."""
    bytes_sent: tuple[int, ...]
    """By one rank; ascending."""
    seconds: tuple[float, ...]
    spread: float = 0.1
    """What repeated measurements were off by, as a fraction."""

    @property
    def groups(self) -> int:
        """That transfer at once on one host."""
        return max(1, self.active // self.ranks)

    @property
    def seconds_floor(self) -> float:
        """What the smallest transfers take."""
        return self.seconds[0]

    def has(self, bytes_sent: float) -> bool:
        """Whether this very size was measured."""
        return any(abs(bytes_sent - known) <= SAME_SIZE * known for known in self.bytes_sent)

    def at(self, bytes_sent: float) -> float:
        """Between measured sizes in line, as latency and bandwidth give; below the smallest as that, above in line too.

        Straight on a doubly logarithmic scale would be too slow where bandwidth takes over: by a half on wide grids.
        """
        if bytes_sent <= self.bytes_sent[0]:
            return self.seconds[0]
        if bytes_sent >= self.bytes_sent[-1]:
            return self.seconds[-1] + (bytes_sent - self.bytes_sent[-1]) * self.seconds_per_byte
        right = bisect_left(self.bytes_sent, bytes_sent)
        low, high = self.bytes_sent[right - 1], self.bytes_sent[right]
        share = (bytes_sent - low) / (high - low)
        return self.seconds[right - 1] + share * (self.seconds[right] - self.seconds[right - 1])

    @property
    def seconds_per_byte(self) -> float:
        """Of the largest transfers; what the last two sizes differ by, if they differ as bandwidth lets expect."""
        if len(self.bytes_sent) < 2:
            return self.seconds[-1] / max(1, self.bytes_sent[-1])
        more = self.seconds[-1] - self.seconds[-2]
        return max(more, 0.25 * self.seconds[-1]) / (self.bytes_sent[-1] - self.bytes_sent[-2])

    def rescaled(self, bytes_sent: float, ranks: int, turns: float) -> float:
        """For a group of another size, by its steps, and for ranks that wait `turns` times as long for a core."""
        floor = self.seconds_floor
        steps = steps_of(self.carrier, ranks) / steps_of(self.carrier, self.ranks)
        return turns * (floor * steps + max(0.0, self.at(bytes_sent) - floor))


def steps_of(carrier: str, ranks: int) -> float:
    """Messages one after the other in a group: a ring's, or a tree's for broadcasts; an exchange posts all at once."""
    if ranks < 2:
        return 1.0
    if carrier == "broadcast":
        return math.ceil(math.log2(ranks))
    if carrier in ("neighbour", "stage"):
        return 1.0 + 0.25 * (ranks - 2)  # each further message is posted and completed by the same thread
    return float((2 if carrier in ("all_reduce", "reduce") else 1) * (ranks - 1))
