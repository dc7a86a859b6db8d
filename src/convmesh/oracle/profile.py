"""A measured step: what each rank's layers and transfers took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from convmesh.oracle.simulate.timeline import Timeline

Cell = tuple[str, str]
"""A layer and a phase."""


@dataclass(frozen=True, slots=True)
class TimedTransfer:
    """All transfers of one kind that a rank takes part in for one layer and phase, in a step."""

    rank: int
    layer: str
    phase: str
    carrier: str
    axes: tuple[str, ...]
    bytes_sent: int
    seconds: float

    @property
    def cell(self) -> tuple[str, str, str, tuple[str, ...]]:
        """What tells it apart on one rank."""
        return self.layer, self.phase, self.carrier, self.axes


@dataclass(frozen=True)
class Profile:
    """Seconds by rank, layer and phase, and by transfer; what was not measured is left out."""

    layers: Mapping[int, Mapping[Cell, float]]
    transfers: tuple[TimedTransfer, ...] = ()
    seconds_step: float | None = None
    ranks_per_node: int | None = field(default=None)
    """To say between which nodes a slow link is."""

    @classmethod
    def of(cls, timeline: Timeline, ranks: Iterable[int] | None = None) -> Profile:
        """What a timeline says of its ranks."""
        chosen = timeline.ranks if ranks is None else tuple(ranks)
        layers = {rank: timeline.seconds_by_layer(rank) for rank in chosen}
        transfers = tuple(found for rank in chosen for found in transfers_of(timeline, rank))
        return cls(layers, transfers, max((i.end for i in timeline.intervals), default=0.0))


def transfers_of(timeline: Timeline, rank: int) -> list[TimedTransfer]:
    """A rank's transfers, those of one layer, phase, carrier and set of axes together."""
    seconds: dict[tuple[str, str, str, tuple[str, ...]], float] = defaultdict(float)
    sizes: dict[tuple[str, str, str, tuple[str, ...]], int] = defaultdict(int)
    for interval in timeline.of(rank, "communication"):
        key = (interval.layer, interval.phase, interval.kind, interval.axes)
        seconds[key] += interval.seconds
        sizes[key] += interval.bytes_sent
    return [TimedTransfer(rank, *key, bytes_sent=sizes[key], seconds=taken) for key, taken in seconds.items()]
