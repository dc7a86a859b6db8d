"""Predicted beside measured: every point, and what they say together."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Point:
    """One case: seconds that were predicted, and those of the measured steps."""

    network: str
    strategy: str
    ranks: int
    seconds_predicted: float
    """At the machine's pace during the steps."""
    seconds_measured: tuple[float, ...]
    seconds_calibrated: float
    """Predicted at the pace of the calibration."""
    pace: float = 1.0

    @property
    def as_calibrated(self) -> Point:
        return replace(self, seconds_predicted=self.seconds_calibrated, pace=1.0)

    @property
    def measured(self) -> float:
        return statistics.median(self.seconds_measured)

    @property
    def accuracy(self) -> float:
        return 1 - abs(self.seconds_predicted - self.measured) / self.measured


def section(points: Sequence[Point], head: str) -> str:
    """Markdown: totals, by strategy, and every point."""
    summary = [f"- as calibrated: {_summary([point.as_calibrated for point in points])}"]
    if any(point.pace != 1.0 for point in points):
        paces = [point.pace for point in points]
        summary += [f"- at the pace of the steps ({min(paces):.2f} to {max(paces):.2f}): {_summary(points)}"]
        summary += ["", "The tables below are as calibrated."]
    points = [replace(point.as_calibrated, pace=point.pace) for point in points]
    return "\n".join([head, "", *summary, "", *_by(points, "strategy"), "", *_by(points, "ranks"), "", *_every(points)])


def _summary(points: Sequence[Point]) -> str:
    found, of = _first_right(points)
    return (
        f"mean accuracy **{_mean(points):.1%}**; the best strategy was ranked first in {found} of {of} cases "
        "(a network on a number of ranks; a strategy within the spread of the best counts as the best)."
    )


def _mean(points: Iterable[Point]) -> float:
    return statistics.mean(point.accuracy for point in points)


def _by(points: Sequence[Point], what: str) -> list[str]:
    key: Callable[[Point], object] = lambda point: getattr(point, what)  # noqa: E731
    rows = [f"| {what} | points | mean accuracy | least |", "| --- | --- | --- | --- |"]
    for value in dict.fromkeys(map(key, points)):
        same = [point for point in points if key(point) == value]
        rows.append(f"| {value} | {len(same)} | {_mean(same):.1%} | {min(p.accuracy for p in same):.1%} |")
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
    chosen = min(group, key=lambda point: point.seconds_predicted)
    best = min(group, key=lambda point: point.measured)
    upper = statistics.quantiles(best.seconds_measured, n=4)[2]
    return chosen.measured <= upper
