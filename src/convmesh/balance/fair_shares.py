"""Shares by measured speed: from how long ranks were busy to the shares that let all of them finish together.

The incremental data partitioning (IDPA) of BPT-CNN (Chen et al., IEEE TPDS 2019) deals samples to nodes in proportion
to their measured speed, and measures again. Here an axis that cuts space has shares in the same way.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from convmesh.errors import ConfigError
from convmesh.layout import Mesh, Partition
from convmesh.layout.layout import fair_cut

UNITS_RANK = 16
"""Units of work that a rank has on average, at least: 1/16 is fine enough, and few units keep cuts aligned."""

MEASURED = 3
"""Steps that are measured before a decision: few, since a step with a slow rank costs as much as several without."""

SWEEPS = 3
"""How often axes are balanced in turn, each given the others: with one slow rank on a mesh, none is exact alone."""

Units = Mapping[str, tuple[int, ...]]
"""By axis: the units of work at each of its places."""


@dataclass(frozen=True)
class MovePolicy:
    """When shares move, and how far."""

    least_gain: float = 0.05
    """The predicted gain, as a fraction of a step, below which nothing moves: it may be noise."""
    whole_gain: float = 0.2
    """At this gain or more, shares move at once; a smaller one must be measured twice."""
    most: float = 2.0
    """The largest share of a rank along an axis, in multiples of an equal one: memory grows with it."""

    def __post_init__(self) -> None:
        if not 0 < self.least_gain < 1:
            raise ConfigError(f"`least_gain` (={self.least_gain}) must be between 0 and 1, e.g. 0.05.")
        if self.most <= 1:
            raise ConfigError(f"`most` (={self.most}) must be above 1, e.g. 2: no rank's share could grow.")


@dataclass(frozen=True)
class Dealing:
    """How the units of each axis are dealt to its places on a mesh."""

    mesh: Mesh
    units: Units

    @classmethod
    def of(cls, mesh: Mesh, extents: Mapping[str, int]) -> Dealing:
        """The dealing given by the mesh's shares; `extents` are those of the dims that the axes cut."""
        counts = {axis: unit_count(extent, mesh.axes[axis]) for axis, extent in extents.items()}
        cuts = {axis: fair_cut(mesh, count, (axis,)).partition for axis, count in counts.items()}
        return cls(mesh, {axis: _at_least_one(cut) for axis, cut in cuts.items()})

    @cached_property
    def work(self) -> tuple[int, ...]:
        """Every rank's units of work: the product over the axes."""
        places = map(self.mesh.coordinates, range(self.mesh.size))
        return tuple(_product(self.units, place) for place in places)

    def replacing(self, units: Units) -> Dealing:
        return Dealing(self.mesh, {**self.units, **units})

    def seconds(self, paces: Sequence[float]) -> float:
        """How long a step takes if each rank spends its pace on every unit of work."""
        return max(pace * work for pace, work in zip(paces, self.work, strict=True))


def _at_least_one(cut: Partition) -> tuple[int, ...]:
    return tuple(max(1, cut.span(part).extent) for part in range(cut.parts))


def unit_count(extent: int, ranks: int) -> int:
    """How many units a dim is divided into: the fewest that divide it and give each rank enough."""
    enough = UNITS_RANK * ranks
    return next((count for count in range(enough, extent) if extent % count == 0), extent)


def next_dealing(
    now: Dealing, seconds: Sequence[float], earlier: Sequence[float] | None = None, policy: MovePolicy | None = None
) -> Dealing | None:
    """The next dealing, if ranks were busy for `seconds` in a step; None if a move is not worth it.

    A small gain must show twice: `earlier` are the seconds measured before these, with the same shares. A pure
    function: ranks that know the same numbers decide the same.
    """
    chosen = policy or MovePolicy()
    best, gain = _best(now, seconds, chosen)
    if gain >= chosen.whole_gain:
        return best
    if gain < chosen.least_gain or earlier is None or _best(now, earlier, chosen)[1] < chosen.least_gain:
        return None
    best, gain = _best(now, [(a + b) / 2 for a, b in zip(seconds, earlier, strict=True)], chosen)
    return best if gain >= chosen.least_gain else None


def _best(now: Dealing, seconds: Sequence[float], policy: MovePolicy) -> tuple[Dealing, float]:
    """The dealing that makes a step shortest, and by what fraction."""
    paces = [busy / work for busy, work in zip(seconds, now.work, strict=True)]
    best = now
    for _ in range(SWEEPS):
        for axis in now.units:
            best = best.replacing({axis: _balanced(best, axis, paces, policy.most)})
    return best, _gain(now, best, paces)


def _gain(now: Dealing, then: Dealing, paces: Sequence[float]) -> float:
    seconds = now.seconds(paces)
    return 1 - then.seconds(paces) / seconds if seconds > 0 else 0.0


def _balanced(dealing: Dealing, axis: str, paces: Sequence[float], most: float) -> tuple[int, ...]:
    """The units of an axis that minimise the time of its slowest place, given the other axes."""
    units = dealing.units[axis]
    cap = max(int(most * sum(units) / len(units)), *units)
    return _dealt(sum(units), _place_paces(dealing, axis, paces), cap)


def _dealt(total: int, paces: Sequence[float], cap: int) -> tuple[int, ...]:
    """Deal units one by one, each to the place that finishes it first; a place gets at least one, at most `cap`."""
    units = [1] * len(paces)
    queue = [((units[place] + 1) * pace, place) for place, pace in enumerate(paces)]
    heapq.heapify(queue)
    for _ in range(total - sum(units)):
        while units[queue[0][1]] >= cap:
            heapq.heappop(queue)
        _, place = queue[0]
        units[place] += 1
        heapq.heapreplace(queue, ((units[place] + 1) * paces[place], place))
    return tuple(units)


def _place_paces(dealing: Dealing, axis: str, paces: Sequence[float]) -> list[float]:
    """The seconds that a unit of an axis takes at each of its places: those of the slowest rank there."""
    slowest = [0.0] * len(dealing.units[axis])
    others = {name: units for name, units in dealing.units.items() if name != axis}
    for rank, pace in enumerate(paces):
        place = dealing.mesh.coordinates(rank)
        slowest[place[axis]] = max(slowest[place[axis]], pace * _product(others, place))
    return slowest


def _product(units: Units, place: Mapping[str, int]) -> int:
    product = 1
    for axis, of_place in units.items():
        product *= of_place[place[axis]]
    return product
