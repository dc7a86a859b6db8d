"""Cutting a row of pieces into runs so that the longest is as short as possible, with the least traffic at the cuts."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from convmesh.errors import PlanError


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one node on a rank for one micro-batch, backward included."""

    seconds: float = 0.0
    bytes_weights: int = 0
    bytes_kept: int = 0
    """Kept from forward to backward."""


@dataclass(frozen=True, slots=True)
class BalanceLimits:
    """Micro-batches whose activations each stage keeps at most, and the bytes that it may hold; None for no limit."""

    in_flight: tuple[int, ...]
    bytes_stage: int | None = None


class _Row:
    """Sums over runs of pieces, from prefix sums."""

    def __init__(self, pieces: Sequence[Cost], limits: BalanceLimits) -> None:
        self.count = len(pieces)
        self.seconds = [0.0, *itertools.accumulate(piece.seconds for piece in pieces)]
        self._weights = [0, *itertools.accumulate(piece.bytes_weights for piece in pieces)]
        self._kept = [0, *itertools.accumulate(piece.bytes_kept for piece in pieces)]
        self._limits = limits

    def first_that_fits(self, stage: int) -> list[int]:
        """By end of a stage: the earliest begin at which it stays within its bytes."""
        limit = self._limits.bytes_stage
        if limit is None:
            return [0] * (self.count + 1)
        flights = self._limits.in_flight[stage]
        held = [w + flights * k for w, k in zip(self._weights, self._kept, strict=True)]
        return [bisect_left(held, at - limit) for at in held]

    def time(self, begin: int, end: int) -> float:
        return self.seconds[end] - self.seconds[begin]


def balance(
    pieces: Sequence[Cost], stages: int, limits: BalanceLimits, crossing: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The pieces at which stages after the first begin, so that the slowest stage is as fast as possible.

    `crossing` gives for each piece the traffic if a stage begins there; of equally fast cuts, the one with the least
    traffic is taken.
    """
    row = _Row(pieces, limits)
    longest = _least_longest(row, stages)
    if math.isinf(longest):
        raise PlanError(
            f"no cut into {stages} stages keeps every stage within {limits.bytes_stage:,} bytes; use more stages, "
            "smaller micro-batches, or checkpoint some blocks."
        )
    return _lightest(row, stages, longest, crossing or [0] * row.count)


def _least_longest(row: _Row, stages: int) -> float:
    """The time of the slowest stage in the best cut.

    `best[j]`, that time for the first j pieces in the stages so far, does not fall with j; the last stage's time does
    not rise with its first piece. Bisection finds where the two meet.
    """
    best = [0.0] + [math.inf] * row.count
    for stage in range(stages):
        last, best = best, [math.inf] * (row.count + 1)
        fits = row.first_that_fits(stage)
        for end in range(stage + 1, row.count - (stages - stage - 1) + 1):
            first = max(stage, fits[end])
            if first < end:
                best[end] = _best_end(row, last, first, end)
    return best[row.count]


def _best_end(row: _Row, last: Sequence[float], first: int, end: int) -> float:
    """The slowest stage's least time if the last stage ends at `end` and begins at `first` or later."""
    low, high = first, end - 1
    while low < high:
        middle = (low + high) // 2
        if last[middle] >= row.time(middle, end):
            high = middle
        else:
            low = middle + 1
    return min(max(last[begin], row.time(begin, end)) for begin in (max(low - 1, first), low))


def _lightest(row: _Row, stages: int, longest: float, crossing: Sequence[int]) -> tuple[int, ...]:
    """Of the cuts with no stage longer than `longest`, the one with the least traffic.

    The begins that a stage's end allows form a window that only moves forward, so a monotonic queue holds its minimum.
    """
    least = [0.0] + [math.inf] * row.count
    begins: list[list[int]] = []
    for stage in range(stages):
        last, least = least, [math.inf] * (row.count + 1)
        fits, begin_of = row.first_that_fits(stage), [0] * (row.count + 1)
        window: deque[tuple[float, int]] = deque()
        for end in range(stage + 1, row.count + 1):
            cost = last[end - 1] + (crossing[end - 1] if stage else 0)
            while window and window[-1][0] > cost:
                window.pop()
            window.append((cost, end - 1))
            while window and (window[0][1] < fits[end] or row.time(window[0][1], end) > longest):
                window.popleft()
            if window:
                least[end], begin_of[end] = window[0]
        begins.append(begin_of)
    return _trace(begins, row.count)


def _trace(begins: Sequence[Sequence[int]], count: int) -> tuple[int, ...]:
    """The chosen begins, traced from the last stage back to the first."""
    chosen: list[int] = []
    end = count
    for begin_of in reversed(begins):
        end = begin_of[end]
        chosen.append(end)
    return tuple(reversed(chosen[:-1]))
