"""What anchors say about a series: how fast its code computes and sends, and what a step costs beside that.

The most probable values, given what is thought before any run is seen. A single anchor moves mostly what is known
least, the speed of computing; two of different batches tell time per sample from time per step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares


@dataclass(frozen=True, slots=True)
class Calibration:
    """Factors on the oracle's times, seconds of each step beside them, and how far off (in log) a prediction may be."""

    compute: float = 1.0
    transfer: float = 1.0
    seconds_overhead: float = 0.0
    spread: float = 0.7
    anchors: int = 0


@dataclass(frozen=True, slots=True)
class Prior:
    """What is thought before: logarithms are normal, with these means and deviations."""

    compute: float = 0.0
    compute_spread: float = 0.7
    """Codes of the last ten years reach from half of to twice what the device's figures say."""
    transfer_spread: float = 0.15
    """Links' figures hold; libraries differ."""
    seconds_overhead: float = 1e-3
    """Python, launches and input that no kernel hides: about one in a step."""
    overhead_spread: float = 1.0
    noise: float = 0.01
    """Of a measured step."""
    noise_compute: float = 0.05
    """Of the part of it that was measured as computing."""


@dataclass(frozen=True, slots=True)
class AnchorPoint:
    """An anchor: its parts at factors of one, and what was measured."""

    compute: float
    waiting: float
    measured: float
    measured_compute: float | None = None

    @property
    def rest(self) -> float:
        """What was measured beyond the parts."""
        return self.measured - (self.measured_compute or self.compute) - self.waiting

    def misses(self, logs: np.ndarray, prior: Prior) -> list[float]:
        """How far the parts are off what was measured, in deviations."""
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

    # Time that is missing may belong to computing or to the step as such: the search begins on both sides.
    late = np.array([*centre[:2], math.log(max([prior.seconds_overhead, *(point.rest for point in points)]))])
    found = min((least_squares(residuals, start) for start in (centre, late)), key=lambda end: float(end.cost))
    compute, transfer, overhead = np.exp(found.x)
    spread = SPREAD_ANCHORED if points else prior.compute_spread
    return Calibration(float(compute), float(transfer), float(overhead), spread, len(points))


def pooled(known: Sequence[tuple[float, Calibration]], prior: Prior) -> Calibration:
    """For a series without an anchor: the mean of others by their weights, and how far they lie apart."""
    if not known:
        return replace(fit((), prior), spread=prior.compute_spread)
    weights = np.array([weight for weight, _ in known])
    logs = np.array([math.log(calibration.compute) for _, calibration in known])
    mean = float(np.average(logs, weights=weights))
    apart = float(np.sqrt(np.average((logs - mean) ** 2, weights=weights)))
    return Calibration(math.exp(mean), 1.0, prior.seconds_overhead, max(0.3, apart))
