"""Times of operators that were not timed, from timed ones of the same kind.

The roofline says how time grows with arithmetic, bytes and tiles; the table says how far real kernels are from it. That
distance changes slowly with shape, so it is averaged over the nearest timed shapes, weighted by their nearness.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from convmesh.oracle.pricing.roofline import Roofline
from convmesh.plans.steps import Shape, Work
from convmesh.system.operator_table import OperatorTable, Timing

NEAREST = 4
ORDERS = 4.0
"""Weight of a different memory order against sizes: mixed orders can take five times as long."""
FEATURES = 13
Vector = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Near:
    """Seconds from timed neighbours, and their relative error."""

    seconds: float
    seconds_host: float
    spread: float


class Interpolation:
    """Finds the neighbours of operators in one table."""

    def __init__(self, table: OperatorTable, roofline: Roofline) -> None:
        self._table, self._roofline = table, roofline
        self._known: dict[tuple[str, str, int], tuple[Vector, Vector, list[Timing]]] = {}

    def near(self, work: Work, active: int) -> Near | None:
        """The time from timings of the same operator in the same number format; None if there are none."""
        features, residuals, timings = self._kind(work, active)
        if not timings:
            return None
        distances = np.abs(features - np.array(features_of(work))).sum(axis=1)
        order = np.argsort(distances, kind="stable")[:NEAREST]
        weights = 1 / (0.05 + distances[order]) ** 2
        residual = float(np.average(residuals[order], weights=weights))
        scatter = float(np.sqrt(np.average((residuals[order] - residual) ** 2, weights=weights)))
        host = float(np.average([timings[i].seconds_host for i in order], weights=weights))
        reach = 0.1 + 0.05 * float(distances[order[0]])
        floor = min(timing.seconds for timing in timings)
        seconds = max(self._roofline.seconds(work) * math.exp(residual), floor if work.flops else 0.0)
        return Near(seconds, host, min(0.9, reach + scatter))

    def _kind(self, work: Work, active: int) -> tuple[Vector, Vector, list[Timing]]:
        key = (work.op, work.dtype, active)
        if key not in self._known:
            timings = self._table.of_kind(*key)
            works = [work_of(timing) for timing in timings]
            features = np.array([features_of(w) for w in works]).reshape(len(works), FEATURES)
            pairs = zip(timings, works, strict=True)
            residuals = np.array([math.log(t.seconds / self._roofline.seconds(w)) for t, w in pairs])
            self._known[key] = features, residuals, timings
        return self._known[key]


def features_of(work: Work) -> list[float]:
    """Coordinates of a call among those of its operator: log sizes of the work and of its first two operands."""
    first, second = (*work.inputs[:2], *((),) * 2)[:2]
    per_byte = math.log((work.flops + 1) / (work.bytes_moved + 1))  # tells dense from grouped convolutions
    orders = work.call.count("last="), work.call.count("strides=")
    sizes = [math.log(work.flops + 1), math.log(work.bytes_moved + 1), *_sizes(first), *_sizes(second)]
    return [*sizes, 2 * per_byte, *(ORDERS * count for count in orders)]


def _sizes(shape: Sequence[int]) -> list[float]:
    """Samples, channels, space, innermost extent."""
    lead = [*shape[:2], 1, 1][:2]
    return [math.log(max(1, size)) for size in (*lead, math.prod(shape[2:]), shape[-1] if shape else 1)]


def work_of(timing: Timing) -> Work:
    """The timed call as work, as far as prices need it."""
    outputs: tuple[Shape, ...] = (_output(timing),)
    return Work(timing.op, timing.inputs, outputs, timing.dtype, timing.flops, timing.bytes_moved, (), timing.call)


def _output(timing: Timing) -> Shape:
    """An output of the right size: a convolution's follows from its arithmetic."""
    if timing.op != "convolution" or len(timing.inputs) < 2:
        return timing.inputs[0] if timing.inputs else ()
    image, weight = timing.inputs[:2]
    taps = 2 * math.prod(weight[1:]) * weight[0] * image[0]
    return (image[0], weight[0], max(1, timing.flops // max(1, taps)), *(1,) * (len(image) - 3))
