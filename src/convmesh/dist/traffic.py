"""Everything sent is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Traffic:
    """Bytes that this rank sent and messages that it posted, by carrier."""

    bytes_sent: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    def record(self, carrier: str, bytes_sent: int) -> None:
        self.bytes_sent[carrier] += bytes_sent
        self.calls[carrier] += 1

    @property
    def bytes_total(self) -> int:
        return self.bytes_sent.total()

    @contextmanager
    def watch(self) -> Iterator[Traffic]:
        """What is sent inside the block, apart from what was sent before."""
        before_bytes, before_calls = self.bytes_sent.copy(), self.calls.copy()
        seen = Traffic()
        yield seen
        seen.bytes_sent.update(self.bytes_sent - before_bytes)
        seen.calls.update(self.calls - before_calls)


def all_reduce_bytes(elements: int, itemsize: int, ranks: int) -> int:
    """What one rank sends in a bandwidth-optimal (ring) all-reduce: two passes over all blocks but its own."""
    return 2 * (ranks - 1) * elements * itemsize // ranks
