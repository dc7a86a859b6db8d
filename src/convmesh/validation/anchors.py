"""Calibrating a series on its anchors: how fast its code computes and sends, and the overhead of a step.

The calibration is the most probable one under a prior. A single anchor mostly moves the least certain value, the speed
of computing; two anchors with different batches separate time per sample from time per step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares


@dataclass(frozen=True, slots=True)
class Calibration:
    """Factors on the oracle's times, overhead of a step, and the error of a prediction in log."""

    compute: float = 1.0
    transfer: float = 1.0
    seconds_overhead: float = 0.0
    spread: float = 0.7
    anchors: int = 0


@dataclass(frozen=True, slots=True)
class Prior:
    """The prior: logarithms are normal, with these means and deviations."""

    compute: float = 0.0
    compute_spread: float = 0.7
    """Codes of the last ten years take from half to twice the time that the device's figures say."""
    transfer_spread: float = 0.15
    """The figures of links are reliable; libraries differ."""
    seconds_overhead: float = 1e-3
    """Python, launches and input that nothing overlaps: about a millisecond a step."""
    overhead_spread: float = 1.0
    noise: float = 0.01
    """Relative noise of a measured step."""
    noise_compute: float = 0.05
    """Relative noise of its measured computing time."""


@dataclass(frozen=True, slots=True)
class AnchorPoint:
    """An anchor: its parts uncalibrated, and its measured times."""

    compute: float
    waiting: float
    measured: float
    measured_compute: float | None = None

    @property
    def rest(self) -> float:
        """Measured seconds beyond the parts."""
        return self.measured - (self.measured_compute or self.compute) - self.waiting

    def misses(self, logs: np.ndarray, prior: Prior) -> list[float]:
        """Differences between parts and measurement, in standard deviations."""
        off = [math.log(self.step(logs) / self.measured) / prior.noise]
        if self.measured_compute is not None:
            off.append((logs[0] + math.log(self.compute / self.measured_compute)) / prior.noise_compute)
        return off

    def step(self, logs: np.ndarray) -> float:
        compute, transfer, overhead = np.exp(logs)
        return float(compute * self.compute + transfer * self.waiting + overhead)


SPREAD_ANCHORED = 0.1


def fit(points: Sequence[AnchorPoint], prior: Prior) -> Calibration:
    """The most probable calibration."""
    centre = np.array([prior.compute, 0.0, math.log(prior.seconds_overhead)])
    widths = np.array([prior.compute_spread, prior.transfer_spread, prior.overhead_spread])

    def residuals(logs: np.ndarray) -> np.ndarray:
        misses = [miss for point in points for miss in point.misses(logs, prior)]
        return np.array([*misses, *((logs - centre) / widths)])

    # Unexplained time may belong to computing or to the step's overhead: the fit starts from both.
    late = np.array([*centre[:2], math.log(max([prior.seconds_overhead, *(point.rest for point in points)]))])
    best = min((least_squares(residuals, start) for start in (centre, late)), key=lambda end: float(end.cost))
    compute, transfer, overhead = np.exp(best.x)
    spread = SPREAD_ANCHORED if points else prior.compute_spread
    return Calibration(float(compute), float(transfer), float(overhead), spread, len(points))


def pooled(known: Sequence[tuple[float, Calibration]], prior: Prior) -> Calibration:
    """For a series without an anchor: the weighted mean of others, and their spread."""
    if not known:
        return replace(fit((), prior), spread=prior.compute_spread)
    weights = np.array([weight for weight, _ in known])
    logs = np.array([math.log(calibration.compute) for _, calibration in known])
    mean = float(np.average(logs, weights=weights))
    apart = float(np.sqrt(np.average((logs - mean) ** 2, weights=weights)))
    return Calibration(math.exp(mean), 1.0, prior.seconds_overhead, max(0.3, apart))
