"""Interpolation: times of operators that a table lacks."""

import functools
import math
import statistics
from dataclasses import replace

import pytest

from convmesh.oracle import Assumptions
from convmesh.oracle.pricing.interpolation import Interpolation, work_of
from convmesh.oracle.pricing.roofline import Roofline
from convmesh.system import System
from convmesh.system.operator_table import OperatorTable, Timing
from tests.draws import IS_FULL

SYSTEM = System.load("dgx-h200")
TABLE = SYSTEM.operators or OperatorTable("none", ())
ROOFLINE = Roofline(SYSTEM.device, Assumptions(tf32=True))
EVERY = 2 if IS_FULL else 4
GRID = 2298
"""So many timings are of one systematic run. Those behind were added for a few networks under autocast: they have fewer
neighbours, volumes in bfloat16 above all."""


@functools.cache
def left_out(timing: Timing) -> tuple[float, float, float] | None:
    """Measured seconds of one timing, the seconds interpolated from its kind, and their allowed error."""
    others = tuple(t for t in TABLE.of_kind(timing.op, timing.dtype) if t.call != timing.call)
    near = Interpolation(replace(TABLE, timings=others), ROOFLINE).near(work_of(timing), 1)
    return None if near is None else (timing.seconds, near.seconds, near.spread)


def test_held_out_timings_are_recovered_from_their_neighbours() -> None:
    found = [left for timing in TABLE.timings[::EVERY] if (left := left_out(timing))]
    assert len(found) > 2000 / EVERY
    assert statistics.median(abs(math.log(near / seconds)) for seconds, near, _ in found) < 0.06
    assert statistics.mean(abs(near - s) <= spread * s for s, near, spread in found) > 0.9


@pytest.mark.parametrize(("part", "allowed"), [(slice(0, GRID, EVERY), 0.2), (slice(GRID, None, EVERY), 0.35)])
def test_errors_of_held_out_timings_weigh_little(part: slice, allowed: float) -> None:
    found = [left for timing in TABLE.timings[part] if (left := left_out(timing))]
    assert sum(abs(near - s) for s, near, _ in found) < allowed * sum(s for s, _, _ in found)


def timed(samples: int, order: str, seconds: float) -> Timing:
    shape = (samples, 64, 32, 32)
    size = f"bfloat16({samples}, 64, 32, 32"
    call = f"threshold_backward.default({size}, last=1), {size}{order}), 0)"
    return Timing(call, "bfloat16", (shape, shape), 0, 6 * math.prod(shape), seconds, 0.0)


def test_an_operand_in_another_order_is_not_a_near_neighbour() -> None:
    """A ReLU's backward on mixed memory formats takes five times as long as on one format."""
    alike = [timed(samples, ", last=1", 1e-6 * samples) for samples in (16, 64, 128)]
    table = OperatorTable("GPU", (*alike, timed(16, "", 5e-6 * 16)))
    near = Interpolation(table, ROOFLINE).near(work_of(timed(32, "", 0.0)), 1)
    assert near is not None
    assert near.seconds > 1.7e-6 * 32


def test_neighbours_say_more_than_the_roofline() -> None:
    timings = [t for t in TABLE.timings[::EVERY] if t.op in ("convolution", "native_batch_norm")]
    pairs = [(left, ROOFLINE.seconds(work_of(t))) for t in timings if (left := left_out(t))]
    by_table = sum(abs(near - seconds) for (seconds, near, _), _ in pairs)
    by_roofline = sum(abs(roof - seconds) for (seconds, _, _), roof in pairs)
    assert by_table < 0.5 * by_roofline


def test_an_operator_that_was_never_timed_has_no_neighbours() -> None:
    timing = Timing("frobnicate.default(float32(2))", "float32", ((2,),), 0, 16, 1e-6, 0.0)
    assert Interpolation(TABLE, ROOFLINE).near(work_of(timing), 1) is None
