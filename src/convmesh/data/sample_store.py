"""Samples in the ranks' memory, and who keeps which: read from disk once, up to a limit.

Oyama et al., "The case for strong scaling in deep learning", 2021, section III-B. The first ranks that train on a
sample keep their parts of it. Who keeps what follows from the order of the samples, so no rank has to ask.
"""

from __future__ import annotations

from collections import defaultdict

from convmesh.data.tensor_spec import Array
from convmesh.errors import DataError


class SampleStore:
    """Parts of samples in this rank's memory, up to `bytes_limit`; samples that do not fit come from disk."""

    def __init__(self, bytes_limit: int) -> None:
        if bytes_limit < 0:
            raise DataError(f"`bytes_limit` (={bytes_limit}) must not be negative.")
        self.bytes_limit = bytes_limit
        self.slabs: dict[tuple[str, int], Array] = {}
        self._keeper: dict[tuple[str, int], int] = {}
        self._used: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))

    @property
    def bytes_held(self) -> int:
        """Bytes that this rank holds."""
        return sum(slab.nbytes for slab in self.slabs.values())

    def keeper(self, name: str, index: int) -> int | None:
        """The part of the sample dim whose ranks keep a sample, if any."""
        return self._keeper.get((name, index))

    def admit(self, name: str, index: int, part: int, count: int) -> bool:
        """Let the ranks of `part` keep a sample, `count` bytes each, if there is room on all ranks."""
        used = self._used[name]
        others = sum(max(parts.values(), default=0) for kind, parts in self._used.items() if kind != name)
        if used[part] + count + others > self.bytes_limit:
            return False
        used[part] += count
        self._keeper[name, index] = part
        return True
