"""What ranks that time operators at once say together."""

import pytest

from convmesh.measure.growing import of_slowest
from convmesh.system.operators import Timing


def timed(call: str, seconds: float) -> Timing:
    return Timing(f"{call}.default()", "float32", (), 0, 0, seconds, 0.0, active=3)


def test_operators_take_as_long_as_on_the_slowest_core() -> None:
    """One core is half as fast; on another a single operator was disturbed, which counts for nothing."""
    alone = {"relu": 1.0, "add": 2.0, "mul": 4.0}
    ranks = [
        [timed(name, seconds) for name, seconds in alone.items()],
        [timed(name, 2 * seconds) for name, seconds in alone.items()],
        [timed(name, 9 * seconds if name == "add" else seconds) for name, seconds in alone.items()],
    ]
    found = {timing.op: timing.seconds for timing in of_slowest(ranks)}
    assert (found["relu"], found["mul"]) == (2.0, 8.0)


def test_a_rank_that_timed_nothing_slows_nobody() -> None:
    assert of_slowest([[timed("relu", 1.0)], []])[0].seconds == pytest.approx(1.0)
    assert of_slowest([]) == []
