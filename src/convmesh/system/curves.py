"""Measured times of one kind of transfer by size, interpolated to other sizes and groups."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

SAME_SIZE = 0.01
"""Sizes that differ by less than this fraction count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCurve:
    """Seconds from when all ranks have posted a transfer until all have its result, by bytes sent per rank.

    In an exchange (`neighbour`, `stage`) a rank sends to `ranks - 1` others at once, `bytes_sent` in total.
    """

    carrier: str
    ranks: int
    """Ranks in one group; for an exchange, a rank and those that it sends to."""
    active: int
    """Ranks on one host that transfer at once, in active / ranks groups."""
    bytes_sent: tuple[int, ...]
    """Bytes sent by one rank, ascending."""
    seconds: tuple[float, ...]
    spread: float = 0.1
    """Relative spread of repeated measurements."""

    @property
    def groups(self) -> int:
        """Groups that transfer at once on one host."""
        return max(1, self.active // self.ranks)

    @property
    def seconds_floor(self) -> float:
        """Time of the smallest transfers."""
        return self.seconds[0]

    def has(self, bytes_sent: float) -> bool:
        """Whether exactly this size was measured."""
        return any(abs(bytes_sent - known) <= SAME_SIZE * known for known in self.bytes_sent)

    def at(self, bytes_sent: float) -> float:
        """Linear interpolation between measured sizes and extrapolation above them; constant below the smallest.

        Log-log interpolation would be up to 50 % too slow where bandwidth takes over.
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
        """Slope of the last two sizes, unless they differ by less than bandwidth would explain."""
        if len(self.bytes_sent) < 2:
            return self.seconds[-1] / max(1, self.bytes_sent[-1])
        extra = self.seconds[-1] - self.seconds[-2]
        return max(extra, 0.25 * self.seconds[-1]) / (self.bytes_sent[-1] - self.bytes_sent[-2])

    def rescaled(self, bytes_sent: float, ranks: int, turns: float) -> float:
        """Time for a group of another size, scaled by its steps, if ranks wait `turns` times as long for a core."""
        floor = self.seconds_floor
        steps = steps_of(self.carrier, ranks) / steps_of(self.carrier, self.ranks)
        return turns * (floor * steps + max(0.0, self.at(bytes_sent) - floor))


def steps_of(carrier: str, ranks: int) -> float:
    """Sequential messages in a group: those of a ring, or of a tree for broadcasts; an exchange posts all at once."""
    if ranks < 2:
        return 1.0
    if carrier == "broadcast":
        return math.ceil(math.log2(ranks))
    if carrier in ("neighbour", "stage"):
        return 1.0 + 0.25 * (ranks - 2)  # each further message is posted and completed by the same thread
    return float((2 if carrier in ("all_reduce", "reduce") else 1) * (ranks - 1))
