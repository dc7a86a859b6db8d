"""Waiting for the slowest: equal ranks vary, and the more there are, the later the last one ends."""

from __future__ import annotations

from statistics import NormalDist


def expected_maximum(ranks: int) -> float:
    """The expected largest of `ranks` independent standard normal numbers (Blom's approximation, 1958; within 2 %)."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def seconds_straggling(seconds: float, ranks: int, jitter: float) -> float:
    """How much longer a step takes if all ranks wait for the last, and the work of each varies by a share `jitter`."""
    return seconds * jitter * expected_maximum(ranks)
