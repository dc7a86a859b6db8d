"""Where strategies stop scaling, and why, from predictions for growing numbers of ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from convmesh.oracle.search.refusal import Refusal, RefusalKind
from convmesh.oracle.search.results import Ranked
from convmesh.system import Figure, System

Term = Literal["batch", "filters", "extent", "stages", "memory", "latency", "bandwidth", "idle", "computation"]

TERMS: Mapping[RefusalKind, Term] = {
    RefusalKind.SAMPLES: "batch", RefusalKind.ROWS: "extent", RefusalKind.FILTERS: "filters",
    RefusalKind.DENSE: "filters", RefusalKind.STAGES: "stages", RefusalKind.MEMORY: "memory",
}  # fmt: skip
"""The limiting term, by kind of refusal; an error while planning is nearly always about an extent."""

LEAST_GAIN = 0.1
"""Gain in samples a second from twice the ranks, below which a strategy has stopped scaling."""


@dataclass(frozen=True)
class ScalingPoint:
    """A strategy on some ranks with a batch: the best plan, or why there is none."""

    ranks: int
    batch: int
    ranked: Ranked | None
    refusal: Refusal | None = None

    @property
    def reason(self) -> str:
        return "" if self.refusal is None else str(self.refusal)

    @property
    def is_gap(self) -> bool:
        """Whether these ranks make no mesh for the strategy where more may: 2 ranks have no data+spatial mesh."""
        return self._is(RefusalKind.NO_MESH)

    @property
    def is_scarce(self) -> bool:
        """Whether memory is short."""
        return self._is(RefusalKind.MEMORY)

    def _is(self, kind: RefusalKind) -> bool:
        return self.refusal is not None and self.refusal.kind is kind

    @property
    def samples_per_second(self) -> float:
        return 0.0 if self.ranked is None else self.batch / self.ranked.prediction.seconds_step


@dataclass(frozen=True)
class Limit:
    """The largest number of ranks to which a strategy scales, the term that limits it, and a sentence."""

    ranks: int
    term: Term
    reason: str


@dataclass(frozen=True)
class Curve:
    """A strategy on growing numbers of ranks."""

    strategy: str
    points: tuple[ScalingPoint, ...]
    limit: Limit | None
    """None if it still scales at the last point."""


def limit_of(points: Sequence[ScalingPoint], binding: Callable[[Ranked], Term]) -> Limit | None:
    """Where a strategy stops: at the last ranks with a plan, or where more ranks gain next to nothing.

    A point that was not evaluated is no limit.
    """
    points = [point for point in points if not point.is_gap]
    reached = [point for point in points if point.ranked is not None]
    if not reached:
        scarce = (point for point in reversed(points) if point.is_scarce)
        return _ends(0, next(scarce, points[-1])) if points else None
    for before, after in itertools.pairwise(reached):
        gain = after.samples_per_second / before.samples_per_second - 1
        if after.ranked is not None and gain < LEAST_GAIN * math.log2(after.ranks / before.ranks):
            term = binding(after.ranked)
            return Limit(before.ranks, term, f"{term}: {after.ranks} ranks give {gain:+.0%} samples a second")
    beyond = [point for point in points if point.ranks > reached[-1].ranks]
    return _ends(reached[-1].ranks, beyond[0]) if beyond else None


def _ends(ranks: int, refused: ScalingPoint) -> Limit | None:
    refusal = refused.refusal
    if refusal is None or refusal.kind is RefusalKind.NOT_EVALUATED:
        return None
    return Limit(ranks, TERMS.get(refusal.kind, "extent"), str(refusal))


def binding_term(ranked: Ranked, price: Callable[[System], float]) -> Term:
    """Latency or bandwidth, whichever costs a plan more; idle time or computation if neither matters.

    `price` gives the plan's time on a changed system.
    """
    system, now = ranked.prediction.system, ranked.prediction.seconds_step
    gains: dict[Term, float] = {
        "latency": now - price(without_latency(system)),
        "bandwidth": now - price(with_bandwidth(system)),
    }
    best = max(gains, key=lambda term: gains[term])
    if gains[best] > LEAST_GAIN / 2 * now:
        return best
    return "idle" if ranked.prediction.parts.idle.value > LEAST_GAIN * now else "computation"


def without_latency(system: System) -> System:
    """The system with messages that start at once."""
    links = tuple(replace(level, seconds_latency=_times(level.seconds_latency, 1e-6)) for level in system.links)
    methods = tuple(
        replace(
            method,
            seconds_start=_times(method.seconds_start, 1e-6),
            seconds_step={medium: _times(figure, 1e-6) for medium, figure in method.seconds_step.items()},
        )
        for method in system.collectives.methods
    )
    collectives = replace(system.collectives, methods=methods)
    return replace(system, links=links, collectives=collectives, transfers=None)


def with_bandwidth(system: System) -> System:
    """The system with links a million times as wide."""
    links = tuple(
        replace(
            level,
            bytes_per_second=_times(level.bytes_per_second, 1e6),
            bytes_per_second_pair=level.bytes_per_second_pair and _times(level.bytes_per_second_pair, 1e6),
        )
        for level in system.links
    )
    return replace(system, links=links, transfers=None)


def _times(figure: Figure, factor: float) -> Figure:
    return replace(figure, value=figure.value * factor, spread=None)
