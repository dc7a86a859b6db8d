"""What a loss and its check hold: a plan does not know the loss, so these are rules.

The check tests whether every output is finite (`kernels/finite_check.py`), after forward, while the outputs are still
held.
"""

from __future__ import annotations

from convmesh.plans.steps import bytes_each

LOSS = "loss"
"""The name of the loss's node, in programs that have one."""

MASKS_CHECK = 3
"""Masks of one byte an element that `isfinite` holds at its peak, in addition to absolute values."""

COPIES_BACKWARD = 2
"""Copies of the outputs during the loss's backward: gradients of log-probabilities, and of the outputs."""

NARROW = ("float16", "bfloat16")
"""Types of outputs of which a loss under autocast keeps copies twice as wide."""


def bytes_check(bytes_output: int, dtype: str) -> int:
    """Scratch bytes during the finite check of an output."""
    return bytes_output + MASKS_CHECK * bytes_output // bytes_each(dtype)


def bytes_backward(bytes_kept: int) -> int:
    """Bytes held at the peak of the backward of a loss that keeps `bytes_kept` for it."""
    return (1 + COPIES_BACKWARD) * bytes_kept
