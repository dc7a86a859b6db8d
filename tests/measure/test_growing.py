"""Extending an operator table: combining the timings of several ranks, and sharing the work among pools."""

import pytest
import torch

from convmesh.measure.growing import Growing, of_slowest
from convmesh.measure.operator_times import Repeats
from convmesh.plans import Work
from convmesh.system.operator_table import OperatorTable, Timing

CPU = torch.device("cpu")
SIZES = (64, 128, 256, 512, 1024, 2048)


def timed(call: str, seconds: float) -> Timing:
    return Timing(f"{call}.default()", "float32", (), 0, 0, seconds, 0.0, active=3)


def test_operators_take_as_long_as_on_the_slowest_core() -> None:
    """One core is half as fast; on another a single operator was disturbed, which does not count."""
    alone = {"relu": 1.0, "add": 2.0, "mul": 4.0}
    ranks = [
        [timed(name, seconds) for name, seconds in alone.items()],
        [timed(name, 2 * seconds) for name, seconds in alone.items()],
        [timed(name, 9 * seconds if name == "add" else seconds) for name, seconds in alone.items()],
    ]
    seconds_by_op = {timing.op: timing.seconds for timing in of_slowest(ranks)}
    assert (seconds_by_op["relu"], seconds_by_op["mul"]) == (2.0, 8.0)


def test_a_rank_that_timed_nothing_slows_nobody() -> None:
    assert of_slowest([[timed("relu", 1.0)], []])[0].seconds == pytest.approx(1.0)
    assert of_slowest([]) == []


def test_pools_of_ranks_share_the_operators_and_the_time() -> None:
    works = [Work("relu", ((n,),), ((n,),), "float32", n, 8 * n, call=f"relu.default(float32({n}))") for n in SIZES]
    messages: list[str] = []
    growing = Growing(device=CPU, repeats=Repeats(seconds_round=1e-4), keep=lambda _: None, progress=messages.append)
    table = growing.extended(OperatorTable("cpu", ()), works, 1, seconds=60.0)
    assert {timing.call for timing in table.timings} == {work.call for work in works}
    assert messages == [f"operators 1 to {n} of {n}, turn {turn} of 4" for turn, n in enumerate((2, 2, 1, 1), 1)]
    messages.clear()
    assert growing.extended(table, works, 1, seconds=60.0) is table
    assert not messages, "operators in the table are not timed again"
    late = growing.extended(OperatorTable("cpu", ()), works, 1, seconds=-1.0)
    assert not late.timings
    assert [line.split(":")[0] for line in messages] == ["out of time"] * 4
