"""Collecting garbage rarely while plans are compared."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (5_000_000, 100, 100)
"""New objects before Python looks for cycles among them, and how often it then looks among older ones."""


@contextmanager
def rare_collection() -> Iterator[None]:
    """A search makes millions of small values, few of them in cycles: look for those rarely, and not at the end."""
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        _count_as_old()
        gc.set_threshold(*before)


def _count_as_old() -> None:
    """Make Python count all values as old: it would otherwise look through the new ones at once, for half a second."""
    if not gc.get_freeze_count():  # else thawing would thaw what others froze
        gc.freeze()
        gc.unfreeze()
