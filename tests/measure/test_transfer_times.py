"""Measured transfers: every carrier through the runtime, held-out sizes, and the cost of computing meanwhile."""

import statistics
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from convmesh.dist import open_mesh
from convmesh.layout import Mesh
from convmesh.measure.overlap import measure_overlap
from convmesh.measure.spawned import spawned
from convmesh.measure.timed_carriers import MAKERS
from convmesh.measure.timing import time_after_work
from convmesh.measure.transfer_times import Effort, measure_posting, measure_ranks, without_posting
from convmesh.system.curves import TransferCurve
from convmesh.system.transfer_table import Overlap, TransferTable
from tests.conftest import Pools


def sent(ranks: int, size: int) -> dict[str, int]:
    """Bytes that this rank sends in one transfer of each kind, as the runtime counts them."""
    mesh = open_mesh(Mesh(filter=ranks))
    by_carrier = {}
    for carrier, make in MAKERS.items():
        if carrier == "stage":
            continue
        with mesh.traffic.watch() as traffic:
            make(mesh, size)()
        assert set(traffic.bytes_sent) <= {carrier}
        by_carrier[carrier] = traffic.bytes_sent[carrier]
    return by_carrier


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_carrier_sends_about_the_requested_bytes(pools: Pools, ranks: int) -> None:
    first, *_, last = pools[ranks].run(sent, ranks, 48_000)
    assert all(first[carrier] == pytest.approx(48_000, rel=0.01) for carrier in first if carrier != "reduce")
    assert (first["reduce"], last["broadcast"]) == (0, 0)
    assert last["reduce"] == 48_000


@pytest.fixture(scope="module")
def table(pools: Pools) -> TransferTable:
    """Measured in a few seconds between two ranks."""
    effort = Effort(ranks=(2,), factor=16, bytes_most=1 << 20, seconds=1.5)
    measured, overlap = pools[2].run(measure_ranks, effort)[0]
    return TransferTable(backend="gloo", cores=2, curves=tuple(measured), overlaps=(overlap,))


def test_a_table_of_a_few_seconds_has_every_carrier(table: TransferTable) -> None:
    assert {curve.carrier for curve in table.curves} == set(MAKERS)
    for curve in table.curves:
        assert (curve.ranks, curve.active, curve.groups) == (2, 2, 1)
        assert 1e-6 < curve.seconds_floor < 1
        assert list(curve.seconds) == sorted(curve.seconds), curve.carrier
        assert 1e6 < 1 / curve.seconds_per_byte < 1e11, curve.carrier
    longer = [curve.seconds[-1] > curve.seconds_floor for curve in table.curves]
    assert sum(longer) > len(longer) / 2, "a mebibyte takes longer than 64 bytes, unless the machine is busy"


class Copies(TorchDispatchMode):
    """Counts operators that copy values."""

    def __init__(self) -> None:
        super().__init__()
        self.count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += int(func._schema.name in ("aten::clone", "aten::copy_", "aten::cat"))
        return func(*args, **(kwargs or {}))


def copies(ranks: int, carrier: str) -> int:
    once = MAKERS[carrier](open_mesh(Mesh(filter=ranks)), 48_000)
    counter = Copies()
    with counter:
        once()
    return counter.count


@pytest.mark.parametrize("carrier", ["neighbour", "all_gather"])
def test_copies_are_not_timed_with_transfers(pools: Pools, carrier: str) -> None:
    """Copies are computations of a program and would count twice."""
    assert pools[4].run(copies, 4, carrier) == [0, 0, 0, 0]


def test_posting_takes_cpu_time_for_carriers_that_nodes_send(pools: Pools) -> None:
    first, second = pools[2].run(measure_posting, ("all_reduce", "neighbour", "stage", "broadcast"))
    assert first == second
    assert set(first) == {"all_reduce", "neighbour"}
    assert all(1e-6 < seconds < 0.1 for seconds in first.values())


def test_a_curve_begins_when_a_transfer_is_posted() -> None:
    curve = TransferCurve(carrier="neighbour", ranks=2, active=2, bytes_sent=(64, 1 << 20), seconds=(0.5e-3, 2e-3))
    assert without_posting(curve, 0.2e-3).seconds == pytest.approx((0.3e-3, 1.8e-3))
    assert without_posting(curve, 9.9e-3).seconds == pytest.approx((0.1e-3, 0.4e-3)), "something always remains"


SIZES = [1 << n for n in range(10, 23, 2)]
CARRIERS = ("all_reduce", "all_gather", "neighbour")


def one_round() -> list[list[float]]:
    """Seconds by carrier and size."""
    mesh = open_mesh(Mesh(filter=2))
    calls = [[MAKERS[carrier](mesh, size) for size in SIZES] for carrier in CARRIERS]
    return [[time_after_work(mesh, call, 0.02).seconds for call in of_carrier] for of_carrier in calls]


def off_between(seconds: list[list[float]]) -> float:
    """The median factor by which sizes between those of a curve are mispredicted."""
    ratios: list[float] = []
    for carrier, times in zip(CARRIERS, seconds, strict=True):
        curve = TransferCurve(
            carrier=carrier, ranks=2, active=2, bytes_sent=tuple(SIZES[::2]), seconds=tuple(times[::2])
        )
        ratios += [curve.at(size) / measured for size, measured in zip(SIZES[1::2], times[1::2], strict=True)]
    return statistics.median(max(ratio, 1 / ratio) for ratio in ratios)


def test_sizes_between_are_predicted(pools: Pools) -> None:
    """From the least of some rounds: of two where the machine is quiet, of up to 16 where others use it too."""
    least = pools[2].run(one_round)[0]
    for _ in range(15):
        again = pools[2].run(one_round)[0]
        least = [[*map(min, known, times)] for known, times in zip(least, again, strict=True)]
        if off_between(least) < 1.8:
            return
    raise AssertionError(f"off by {off_between(least)}: {least}")


def overlap_again() -> Overlap:
    return measure_overlap(open_mesh(Mesh(filter=2)))


def test_overlapping_computation_costs_something_but_no_more_than_running_in_sequence(
    table: TransferTable, pools: Pools
) -> None:
    """Measured again, a few times, where others take the cores meanwhile."""
    (measured,) = table.overlaps
    for _ in range(5):
        if max(measured.compute_slowdown, measured.transfer_slowdown) < 20:
            break
        measured = pools[2].run(overlap_again)[0]
    assert measured.active == 2
    assert 0 <= measured.hidden <= 1
    assert 1 <= measured.compute_slowdown < 20
    assert 1 <= measured.transfer_slowdown < 20


def test_the_time_is_divided_among_the_curves() -> None:
    effort = Effort()
    assert effort.groups(8, "all_reduce") == (2, 4, 8)
    assert effort.groups(8, "stage") == (2,)
    assert effort.sizes("all_reduce")[0] == 64
    assert effort.sizes("all_reduce")[-1] == 64 << 20
    assert len(effort.sizes("reduce")) < len(effort.sizes("all_reduce"))
    assert effort.seconds_curve * (6 * 7 + 3) == pytest.approx(effort.seconds)


def test_spawned_ranks_measure_too() -> None:
    effort = Effort(ranks=(2,), carriers=("all_reduce",), factor=64, bytes_most=4096, seconds=0.2)
    ((measured, overlap),) = spawned(2, measure_ranks, effort)
    assert [curve.bytes_sent for curve in measured] == [(64, 4096)]
    assert overlap.active == 2
