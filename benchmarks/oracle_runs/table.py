"""Predicted beside measured: every point, and what they say together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """One case: seconds that were predicted, and those of the measured steps."""

    network: str
    strategy: str
    ranks: int
    seconds_predicted: float
    seconds_measured: tuple[float, ...]
    pace: float = 1.0
    """Of the machine beside the steps."""
    computing: float | None = None
    """What is predicted of the busiest rank's own computations, over what its thread ran; None where ranks take turns
    on cores, which a thread's own time does not have."""

    @property
    def measured(self) -> float:
        return statistics.median(self.seconds_measured)

    @property
    def accuracy(self) -> float:
        return 1 - abs(self.seconds_predicted - self.measured) / self.measured


CASES = (
    "(a network on a number of ranks; a strategy within the spread of the best counts as the best, and strategies with "
    "the same program, such as filter and channel, count as one)"
)

Ways = Mapping[str, Sequence[Point]]
"""By the pace that was taken: the same cases, predicted."""


def section(ways: Ways, head: str) -> str:
    """Markdown: totals, by strategy and ranks, and every point as it was predicted first."""
    summary = [f"- {way}: {_summary(points)}" for way, points in ways.items()]
    first = next(iter(ways.values()))
    return "\n".join([head, "", *summary, "", *_by(ways, "strategy"), "", *_by(ways, "ranks"), "", *_every(first)])


def _summary(points: Sequence[Point]) -> str:
    found, of = _first_right(points)
    computing = [point.computing for point in points if point.computing is not None] or [math.nan]
    return (
        f"mean accuracy **{_mean(points):.1%}**; the best strategy was ranked first in {found} of {of} cases "
        f"{CASES}; predicted compute time is {statistics.mean(computing):.2f} of the time on the ranks' own threads, "
        f"{min(computing):.2f} to {max(computing):.2f}"
        f"{'' if len(computing) == len(points) else ', where each rank has a core'}."
    )


def _mean(points: Iterable[Point]) -> float:
    return statistics.mean(point.accuracy for point in points)


def _by(ways: Ways, what: str) -> list[str]:
    key: Callable[[Point], object] = lambda point: getattr(point, what)  # noqa: E731
    titles = [f"{way} (least)" for way in ways]
    rows = [f"| {what} | points | {' | '.join(titles)} |", "|" + " --- |" * (2 + len(titles))]
    for value in dict.fromkeys(key(point) for points in ways.values() for point in points):
        same = [[point for point in points if key(point) == value] for points in ways.values()]
        cells = [f"{_mean(points):.1%} ({min(p.accuracy for p in points):.1%})" for points in same]
        rows.append(f"| {value} | {len(same[0])} | {' | '.join(cells)} |")
    return rows


def _every(points: Sequence[Point]) -> list[str]:
    columns = ("network", "ranks", "strategy", "pace", "predicted ms", "measured ms (quartiles)", "accuracy")
    rows = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    for p in points:
        low, middle, high = (1e3 * q for q in statistics.quantiles(p.seconds_measured, n=4))
        rows.append(
            f"| {p.network} | {p.ranks} | {p.strategy} | {p.pace:.2f} | {1e3 * p.seconds_predicted:.0f} "
            f"| {middle:.0f} ({low:.0f} to {high:.0f}) | {p.accuracy:.1%} |"
        )
    return rows


def _first_right(points: Sequence[Point]) -> tuple[int, int]:
    """In how many cases the strategy that is predicted to be fastest is, within the spread of steps."""
    groups: dict[tuple[str, int], list[Point]] = {}
    for point in points:
        groups.setdefault((point.network, point.ranks), []).append(point)
    rival = [group for group in groups.values() if len(group) > 1]
    return sum(_is_right(group) for group in rival), len(rival)


def _is_right(group: Sequence[Point]) -> bool:
    """Strategies that are the same program are predicted alike, and measured one after the other: the faster counts."""
    least = min(point.seconds_predicted for point in group)
    chosen = min(point.measured for point in group if point.seconds_predicted == least)
    best = min(group, key=lambda point: point.measured)
    return chosen <= statistics.quantiles(best.seconds_measured, n=4)[2]
