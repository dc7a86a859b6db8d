"""Bandwidth that trees lose at medium sizes: NCCL's own table (src/graph/tuning.cc, treeCorrectionFactor)."""

from __future__ import annotations

import math

_SMALLEST = 64
"""Bytes of the table's first column; each column doubles them."""

_FACTORS = {
    "ll": (
        1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5,
        0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0,
    ),
    "ll128": (
        1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6,
        0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1.0, 1.0, 1.0,
    ),
    "simple": (
        0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5,
        0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9,
    ),
}  # fmt: skip


def tree_factor(protocol: str, size: float) -> float:
    """Fraction of a tree's bandwidth at a size; linear between columns, so that time grows with size."""
    factors = _FACTORS[protocol]
    place = min(max(0.0, math.log2(max(size, _SMALLEST) / _SMALLEST)), len(factors) - 1.0)
    left = int(place)
    right = min(left + 1, len(factors) - 1)
    return factors[left] + (place - left) * (factors[right] - factors[left])
