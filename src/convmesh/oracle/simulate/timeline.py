"""What runs when: intervals of every evaluated rank, on its device and its links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

Stream = Literal["compute", "communication"]


@dataclass(frozen=True, slots=True)
class Interval:
    """One computation or transfer of a rank, in seconds from the start of the step."""

    rank: int
    stream: Stream
    layer: str
    phase: str
    kind: str
    """`compute`, or the carrier of a transfer."""
    begin: float
    end: float
    bytes_sent: int = 0
    axes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Timeline:
    """One step of the evaluated ranks."""

    intervals: tuple[Interval, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(interval.rank for interval in self.intervals))

    def of(self, rank: int, stream: Stream | None = None) -> Iterator[Interval]:
        """A rank's intervals, on one stream or on all."""
        return (i for i in self.intervals if i.rank == rank and stream in (None, i.stream))

    def seconds_by_layer(self, rank: int) -> dict[tuple[str, str], float]:
        """A rank's computing seconds by layer and phase, the longest first."""
        spent: dict[tuple[str, str], float] = defaultdict(float)
        for interval in self.of(rank, "compute"):
            spent[interval.layer, interval.phase] += interval.seconds
        return dict(sorted(spent.items(), key=lambda item: -item[1]))

    def to_chrome(self) -> dict[str, Any]:
        """A trace for Chrome's and Perfetto's viewers, ready for JSON."""
        return {"traceEvents": [*self._names(), *map(_event, self.intervals)], "displayTimeUnit": "ms"}

    def _names(self) -> Iterator[dict[str, Any]]:
        for rank in self.ranks:
            yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
            for number, stream in enumerate(("compute", "communication")):
                yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": stream}}


def _event(interval: Interval) -> dict[str, Any]:
    extra = {"bytes": interval.bytes_sent, "axes": "*".join(interval.axes)} if interval.axes else {}
    return {
        "ph": "X",
        "name": interval.layer or interval.kind,
        "cat": interval.phase,
        "pid": interval.rank,
        "tid": 0 if interval.stream == "compute" else 1,
        "ts": interval.begin * 1e6,
        "dur": interval.seconds * 1e6,
        "args": {"phase": interval.phase, "kind": interval.kind, **extra},
    }


def joined(parts: Iterable[Iterable[Interval]]) -> Timeline:
    """One timeline from several lists, by rank and time."""
    intervals = [interval for part in parts for interval in part]
    return Timeline(tuple(sorted(intervals, key=lambda i: (i.rank, i.begin, i.end))))
