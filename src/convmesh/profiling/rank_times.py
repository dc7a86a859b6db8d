"""How each rank spends a step: computing, waiting for transfers, for other ranks or for data, and in between."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from convmesh.layout.mesh import Mesh
from convmesh.oracle.profile import Cell, Profile, TimedTransfer
from convmesh.profiling.matched_transfers import Match, matched
from convmesh.profiling.rank_profile import LayerTime, RankProfile, TimedStep

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class RankTimes:
    """Seconds of one rank in a step. All but `hidden` and `blamed` add up to `step`."""

    step: float
    compute: float
    exposed: float
    """Transfers that it waited for."""
    idle: float
    """Waiting for other ranks to take part in a transfer."""
    data: float
    """Waiting for input."""
    other: float
    """Between layers: the runtime's Python, zeroing gradients."""
    hidden: float
    """Transfers behind computation."""
    blamed: float
    """Seconds that other ranks were idle because this one was last."""


@dataclass(frozen=True)
class MeasuredStep:
    """One step of all ranks, on one clock."""

    steps: Mapping[int, TimedStep]
    matches: Mapping[int, Sequence[Match]]

    def times(self, rank: int) -> RankTimes:
        step, own = self.steps[rank], self.matches[rank]
        total, data = step.end - step.begin, step.seconds_data
        compute = sum(self.layers(rank).values())
        exposed, idle = sum(match.exposed for match in own), sum(match.idle for match in own)
        everyone = (match for matches in self.matches.values() for match in matches)
        return RankTimes(
            step=total,
            compute=compute,
            exposed=exposed,
            idle=idle,
            data=data,
            other=total - compute - exposed - idle - data,
            hidden=sum(match.hidden for match in own),
            blamed=sum(match.idle for match in everyone if match.last == rank != match.rank),
        )

    def layers(self, rank: int) -> dict[Cell, float]:
        """Computing seconds by layer and phase: spans without the waits inside."""
        spent: dict[Cell, float] = defaultdict(float)
        for span in self.steps[rank].spans:
            waits = sum(match.stall for match in self.matches[rank] if _inside(match, span))
            spent[span.layer, span.phase] += max(0.0, span.end - span.begin - waits)
        return dict(spent)

    def transfers(self, rank: int) -> dict[tuple[str, str, str, tuple[str, ...]], tuple[int, float]]:
        """Bytes and seconds of the transfers whose end is known."""
        spent: dict[tuple[str, str, str, tuple[str, ...]], tuple[int, float]] = {}
        for match in self.matches[rank]:
            each = match.crossing
            if match.is_timed:
                key = (each.layer, each.phase, each.carrier, each.axes)
                sent, seconds = spent.get(key, (0, 0.0))
                spent[key] = sent + each.bytes_sent, seconds + match.end - match.begin
        return spent


@dataclass(frozen=True)
class TimedRun:
    """All profiled steps of a run."""

    mesh: Mesh
    accumulate: int
    by_layer: bool
    steps: tuple[MeasuredStep, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.steps[0].steps)

    def times(self, rank: int) -> RankTimes:
        """The mean over the steps, so that the parts still add up."""
        each = [step.times(rank) for step in self.steps]
        return RankTimes(**{f.name: statistics.fmean(getattr(t, f.name) for t in each) for f in fields(RankTimes)})

    def layers(self, rank: int) -> dict[Cell, float]:
        """The median over the steps, the longest first."""
        seconds = _medians([step.layers(rank) for step in self.steps])
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))

    def profile(self, ranks_per_node: int | None = None) -> Profile:
        """The profile as the oracle expects it: of one pass where gradients are accumulated over several."""
        share = 1 / self.accumulate
        layers = {r: {cell: s * share for cell, s in self.layers(r).items()} for r in self.ranks}
        transfers = tuple(transfer for rank in self.ranks for transfer in self._transfers(rank, share))
        busy = max(times.step - times.data for times in map(self.times, self.ranks))
        return Profile(layers, transfers, busy * share, ranks_per_node)

    def _transfers(self, rank: int, share: float) -> Iterable[TimedTransfer]:
        listed = [step.transfers(rank) for step in self.steps]
        seconds = _medians([{key: taken for key, (_, taken) in each.items()} for each in listed])
        sizes = _medians([{key: float(sent) for key, (sent, _) in each.items()} for each in listed])
        for key, taken in seconds.items():
            yield TimedTransfer(rank, *key, bytes_sent=round(sizes[key] * share), seconds=taken * share)


def timed_run(profiles: Sequence[RankProfile]) -> TimedRun:
    """Combine the ranks' files. Ranks of one host share its clock; other hosts' clocks are set at a barrier."""
    first = profiles[0]
    mesh = Mesh(**first.mesh)
    by_rank = {profile.rank: _shifted(profile, first) for profile in profiles}
    steps = []
    for number in range(len(first.steps)):
        of_ranks = {rank: listed[number] for rank, listed in by_rank.items()}
        steps.append(MeasuredStep(of_ranks, matched({rank: s.crossings for rank, s in of_ranks.items()}, mesh)))
    return TimedRun(mesh, first.accumulate, first.by_layer, tuple(steps))


def _shifted(profile: RankProfile, first: RankProfile) -> list[TimedStep]:
    by = 0.0 if profile.host == first.host else first.origin - profile.origin
    return [_later(step, by) for step in profile.steps] if by else list(profile.steps)


def _later(step: TimedStep, by: float) -> TimedStep:
    spans = tuple(replace(span, begin=span.begin + by, end=span.end + by) for span in step.spans)
    crossings = tuple(
        replace(
            each, posted=each.posted + by, needed=each.needed + by, arrived=each.arrived + by,
            done=None if each.done is None else each.done + by,
        )
        for each in step.crossings
    )  # fmt: skip
    return replace(step, begin=step.begin + by, end=step.end + by, spans=spans, crossings=crossings)


def _inside(match: Match, span: LayerTime) -> bool:
    return span.begin <= match.crossing.needed and match.crossing.arrived <= span.end


def _medians(tables: Sequence[Mapping[K, float]]) -> dict[K, float]:
    keys = dict.fromkeys(key for table in tables for key in table)
    return {key: statistics.median(table.get(key, 0.0) for table in tables) for key in keys}
