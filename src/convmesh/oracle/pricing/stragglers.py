"""Waiting for the slowest: ranks that do the same never take the same time; the more there are, the later the last."""

from __future__ import annotations

from statistics import NormalDist


def expected_maximum(ranks: int) -> float:
    """The expected largest of so many independent standard normal numbers (Blom's approximation, 1958; within 2 %)."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def seconds_straggling(seconds: float, ranks: int, jitter: float) -> float:
    """What a step that all ranks end together takes longer, where each one's work varies by `jitter` of itself."""
    return seconds * jitter * expected_maximum(ranks)
