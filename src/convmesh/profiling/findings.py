"""What is wrong in a profiled run: the rank that others wait for, and what deviates from the prediction."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from convmesh.oracle.anomalies import LEAST, Anomaly, Expected, find_anomalies, part_named
from convmesh.profiling.rank_times import RankTimes, TimedRun

_LEAST_SHARE = 0.1
"""The fraction of a step that others must lose to a rank before it is called slow."""


def findings(run: TimedRun, expected: Expected | None) -> list[Anomaly]:
    """The costliest first."""
    slow = [*_slow_ranks(run)]
    named = {anomaly.rank for anomaly in slow}
    others = [] if expected is None or not run.by_layer else find_anomalies(run.profile(), expected)
    kept = [each for each in others if each.what != "rank" or each.rank not in named]
    return sorted([*slow, *kept], key=lambda anomaly: -anomaly.seconds)


def _slow_ranks(run: TimedRun) -> Iterator[Anomaly]:
    """Judged by what others lose: a rank that is last in transfers keeps its whole group waiting."""
    times = {rank: run.times(rank) for rank in run.ranks}
    for rank, own in times.items():
        seconds = statistics.median(_lost_to(step.times(rank), len(times)) for step in run.steps)
        if seconds < _LEAST_SHARE * own.step:
            continue
        usual = [_own(each) for other, each in times.items() if other != rank]
        ratio = _own(own) / (sum(usual) / len(usual))
        if "pipe" in run.mesh.axes and ratio < LEAST:  # a pipeline's first stage always runs ahead of the others
            continue
        text = (
            f"rank {rank} is slow: it keeps the others waiting {seconds * 1e3:.3g} ms a step "
            f"({seconds / own.step:.0%}) and takes {ratio:.2g}x as long as they do{_most_of(run, rank)}."
        )
        yield Anomaly("rank", ratio, seconds, text, rank=rank)


def _own(times: RankTimes) -> float:
    """Of a step, what is not for other ranks: work, and waiting for data."""
    return times.compute + times.other + times.data


def _lost_to(times: RankTimes, ranks: int) -> float:
    """How long another rank waits for this one, less its own wait: ranks that take turns being late cancel out."""
    return times.blamed / max(1, ranks - 1) - times.idle


def _most_of(run: TimedRun, rank: int) -> str:
    """The layer in which a slow rank loses the most, or waiting for data if that costs it more."""
    usual = [_parts(run, other) for other in run.ranks if other != rank]
    more = {
        part: seconds - sum(each.get(part, 0.0) for each in usual) / len(usual)
        for part, seconds in _parts(run, rank).items()
    }
    part, seconds = max(more.items(), key=lambda item: item[1])
    return f", most in {part} (+{seconds * 1e3:.3g} ms)" if seconds > 0 else ""


def _parts(run: TimedRun, rank: int) -> dict[str, float]:
    """What a rank's time went to, in words."""
    layers = {part_named(*cell): seconds for cell, seconds in run.layers(rank).items()}
    return {**layers, "waiting for data": run.times(rank).data}
