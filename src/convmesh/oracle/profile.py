"""A measured step: seconds of each rank's layers and transfers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from convmesh.oracle.simulate.timeline import Timeline

Cell = tuple[str, str]
"""A layer and a phase."""


@dataclass(frozen=True, slots=True)
class TimedTransfer:
    """All transfers of one kind on one rank, for one layer and phase, in a step."""

    rank: int
    layer: str
    phase: str
    carrier: str
    axes: tuple[str, ...]
    bytes_sent: int
    seconds: float

    @property
    def cell(self) -> tuple[str, str, str, tuple[str, ...]]:
        """Its key on one rank."""
        return self.layer, self.phase, self.carrier, self.axes


@dataclass(frozen=True)
class Profile:
    """Seconds by rank, layer and phase, and by transfer; unmeasured parts are absent."""

    layers: Mapping[int, Mapping[Cell, float]]
    transfers: tuple[TimedTransfer, ...] = ()
    seconds_step: float | None = None
    ranks_per_node: int | None = field(default=None)
    """Names the nodes at a slow link."""

    @classmethod
    def of(cls, timeline: Timeline, ranks: Iterable[int] | None = None) -> Profile:
        """The profile of a timeline's ranks."""
        chosen = timeline.ranks if ranks is None else tuple(ranks)
        layers = {rank: timeline.seconds_by_layer(rank) for rank in chosen}
        transfers = tuple(transfer for rank in chosen for transfer in transfers_of(timeline, rank))
        return cls(layers, transfers, max((i.end for i in timeline.intervals), default=0.0))


def transfers_of(timeline: Timeline, rank: int) -> list[TimedTransfer]:
    """A rank's transfers, added up by layer, phase, carrier and axes."""
    seconds: dict[tuple[str, str, str, tuple[str, ...]], float] = defaultdict(float)
    sizes: dict[tuple[str, str, str, tuple[str, ...]], int] = defaultdict(int)
    for interval in timeline.of(rank, "communication"):
        key = (interval.layer, interval.phase, interval.kind, interval.axes)
        seconds[key] += interval.seconds
        sizes[key] += interval.bytes_sent
    return [TimedTransfer(rank, *key, bytes_sent=sizes[key], seconds=taken) for key, taken in seconds.items()]
