"""Counting everything that is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Sent:
    """One message or collective as this rank posted it: to `peer`, or over `axes`."""

    carrier: str
    bytes_sent: int
    axes: tuple[str, ...] = ()
    peer: int | None = None


@dataclass(frozen=True, slots=True)
class Awaited:
    """The moment when this rank needs the results of transfers, by the numbers that `record` returned.

    `arriving` are the messages to this rank: (sender, bytes).
    """

    posted: tuple[int, ...]
    arriving: tuple[tuple[int, int], ...] = ()


@dataclass
class Traffic:
    """Bytes sent and messages posted by this rank, by carrier."""

    bytes_sent: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    listener: Callable[[Sent | Awaited], None] | None = None
    """Called with each transfer and each wait."""
    posted: int = 0
    """The number of transfers so far."""
    steps: list[Any] | None = None
    """In a dry run: what has been recorded so far."""

    def record(self, carrier: str, bytes_sent: int, axes: tuple[str, ...] = (), peer: int | None = None) -> int:
        """Count a transfer; returns its number."""
        self.posted += 1
        self.bytes_sent[carrier] += bytes_sent
        self.calls[carrier] += 1
        if self.listener is not None:
            self.listener(Sent(carrier, bytes_sent, axes, peer))
        return self.posted - 1

    def joined(self, carrier: str, axes: tuple[str, ...]) -> None:
        """Report a transfer in which this rank only receives: there is nothing to count."""
        if self.listener is not None:
            self.listener(Sent(carrier, 0, axes))

    def awaited(self, posted: Sequence[int], arriving: Sequence[tuple[int, int]] = ()) -> None:
        """Report that results are needed from here on."""
        if self.listener is not None and (posted or arriving):
            self.listener(Awaited(tuple(posted), tuple(arriving)))

    def repeated(self, call: Callable[[], Result], times: int) -> tuple[Result, bool]:
        """Make a call that stands for `times` such calls, and record it that many times.

        Returns its result, and whether it did any work; True if nothing is being recorded.
        """
        if self.steps is None:
            return call(), True
        first = len(self.steps)
        result = call()
        recorded = self.steps[first:]
        self.steps += recorded * (times - 1)
        return result, bool(recorded)

    @property
    def bytes_total(self) -> int:
        return self.bytes_sent.total()

    @contextmanager
    def watch(self) -> Iterator[Traffic]:
        """The traffic of the block alone, complete when it ends."""
        before_bytes, before_calls = self.bytes_sent.copy(), self.calls.copy()
        inside = Traffic()
        yield inside
        inside.bytes_sent.update(self.bytes_sent - before_bytes)
        inside.calls.update(self.calls - before_calls)


def all_reduce_bytes(elements: int, itemsize: int, ranks: int) -> int:
    """Bytes that one rank sends in a bandwidth-optimal (ring) all-reduce: two passes over all blocks but its own."""
    return 2 * (ranks - 1) * elements * itemsize // ranks
