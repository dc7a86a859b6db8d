"""Accuracy of predictions by run, by strategy and overall."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from convmesh.oracle.pricing.estimate import Estimate
from convmesh.validation.anchors import Calibration
from convmesh.validation.measured_run import MeasuredRun

PUBLISHED = {
    "data": 96.10, "filter": 85.56, "channel": 73.67, "data+filter": 91.43, "data+spatial": 83.46, "pipeline": 90.22,
    "all": 86.74,
}  # fmt: skip
"""ParaDL's published accuracy by strategy, in percent (Kahira et al., HPDC'21)."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A test run and its prediction."""

    run: MeasuredRun
    predicted: Estimate
    calibration: Calibration

    @property
    def accuracy(self) -> float:
        """As in ParaDL: one minus the relative error."""
        return 1 - abs(self.predicted.value - self.run.seconds_step) / self.run.seconds_step

    def to_plain(self) -> dict[str, Any]:
        return {
            "id": self.run.id,
            "strategy": self.run.kind,
            "predicted_ms": self.predicted.value * 1000,
            "measured_ms": self.run.seconds_step * 1000,
            "accuracy": self.accuracy,
            "low_ms": self.predicted.low * 1000,
            "high_ms": self.predicted.high * 1000,
            "anchors": self.calibration.anchors,
            "contaminated": self.run.contaminated,
        }


@dataclass(frozen=True)
class Validation:
    """All test runs of a file with their predictions; anchors are not scored."""

    rows: tuple[Scored, ...]

    @property
    def accuracy(self) -> float | None:
        """The mean over uncontaminated runs; None if there are none."""
        return _mean(row for row in self.rows if not row.run.contaminated)

    @property
    def accuracy_all(self) -> float | None:
        return _mean(self.rows)

    def by_strategy(self, *, contaminated: bool = False) -> dict[str, float]:
        """The mean for every strategy, with contaminated runs or without."""
        kept = [row for row in self.rows if contaminated or not row.run.contaminated]
        names = dict.fromkeys([*PUBLISHED, *(row.run.kind for row in kept)])
        means = {name: _mean(row for row in kept if row.run.kind == name) for name in names}
        return {name: mean for name, mean in means.items() if mean is not None}

    def to_plain(self) -> dict[str, Any]:
        return {
            "accuracy": self.accuracy,
            "accuracy_all": self.accuracy_all,
            "by_strategy": self.by_strategy(),
            "by_strategy_all": self.by_strategy(contaminated=True),
            "published": PUBLISHED,
            "rows": [row.to_plain() for row in self.rows],
        }


def _mean(rows: Iterable[Scored]) -> float | None:
    accuracies = [row.accuracy for row in rows]
    return fmean(accuracies) if accuracies else None
