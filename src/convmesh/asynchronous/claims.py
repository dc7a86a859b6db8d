"""Batches that ranks claim as they become ready: a faster rank takes more, and every batch is taken once."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

from convmesh.private_torch.stores import default_store

_claims = itertools.count()
"""All ranks of a job make the same number, in the same order: each has its own keys in the job's store."""


class Claims:
    """The numbers from `first` to `last`, dealt over all ranks of the job by a counter in its store."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._store: Any = default_store()
        self._key = f"convmesh/claims/{next(_claims)}"
        self.taken: deque[int] = deque()
        """Numbers that this rank took, in order; whoever has finished one removes it."""

    def __iter__(self) -> Iterator[int]:
        while (number := self._first + self._store.add(self._key, 1) - 1) < self._last:
            self.taken.append(number)
            yield number

    def stop(self, signal: int) -> None:
        """Keep all ranks from taking another batch, because this one was told to stop."""
        self._store.add(f"{self._key}/signal", signal)
        self._store.add(self._key, self._last)

    @property
    def stopped_by(self) -> int:
        """The signal that stopped a rank, or 0."""
        return int(self._store.add(f"{self._key}/signal", 0))
