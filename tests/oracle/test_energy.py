"""Energy of steps with known parts: closed forms."""

import pytest

from convmesh import Mesh
from convmesh.oracle.energy import (
    LEVEL_ARITHMETIC,
    LEVEL_MEMORY,
    LEVEL_WAITING,
    Energy,
    arithmetic_share,
    energy_of,
)
from convmesh.oracle.pricing.estimate import Estimate
from convmesh.oracle.simulate.step import Scheduled
from convmesh.plans.program import NodeProgram, Program
from convmesh.plans.steps import Step, Transfer, Work
from convmesh.system import System

SYSTEM = System.load("dgx-a100")
IDLE, BUSY = float(SYSTEM.power.watts_device_idle), float(SYSTEM.power.watts_device_busy)
PRODUCT = Work("mm", ((4096, 4096), (4096, 4096)), ((4096, 4096),), "float32", 2 * 4096**3, 3 * 4 * 4096**2)
COPY = Work("add", ((1 << 20,),), ((1 << 20,),), "float32", 0, 8 << 20)


def seconds(**parts: float) -> Scheduled:
    compute, exposed, idle = (Estimate.exactly(parts.get(name, 0.0)) for name in ("compute", "exposed", "idle"))
    nothing = Estimate.exactly(0.0)
    return Scheduled(compute, exposed, nothing, idle, nothing)


def program(mesh: Mesh, *steps: Step) -> dict[int, Program]:
    return {0: Program(mesh, 0, (NodeProgram("a", "a", (), (), (), steps),), ())}


def used(spent: Scheduled, *steps: Step, ranks: int = 8) -> Energy:
    return energy_of(spent, SYSTEM, program(Mesh(data=ranks), *steps))


def test_a_waiting_node_draws_idle_host_and_network_power_and_the_facility_overhead() -> None:
    energy = used(seconds(idle=2.0))
    machine = 2 * (8 * IDLE + float(SYSTEM.power.watts_host) + float(SYSTEM.power.watts_network))
    assert energy.devices.value == pytest.approx(2 * 8 * IDLE)
    assert energy.joules.value == pytest.approx(machine * float(SYSTEM.power.facility_overhead))
    assert energy.watts == pytest.approx(energy.joules.value / 2)


@pytest.mark.parametrize(("work", "level"), [(PRODUCT, LEVEL_ARITHMETIC), (COPY, LEVEL_MEMORY)])
def test_a_device_draws_more_when_arithmetic_bounds_it(work: Work, level: float) -> None:
    assert used(seconds(compute=1.0), work).devices.value == pytest.approx(8 * (IDLE + level * (BUSY - IDLE)))


def test_waiting_for_transfers_draws_little() -> None:
    assert used(seconds(exposed=1.0)).devices.value == pytest.approx(8 * (IDLE + LEVEL_WAITING * (BUSY - IDLE)))


def test_the_share_of_arithmetic_is_by_time() -> None:
    assert arithmetic_share(program(Mesh(data=8), PRODUCT), SYSTEM.device) == 1
    assert arithmetic_share(program(Mesh(data=8), COPY), SYSTEM.device) == 0
    assert 0 < arithmetic_share(program(Mesh(data=8), PRODUCT, COPY), SYSTEM.device) < 1
    assert arithmetic_share(program(Mesh(data=8)), SYSTEM.device) == 0


@pytest.mark.parametrize(("peer", "medium"), [(1, "nvlink"), (8, "network")])
def test_a_message_costs_by_the_medium_that_it_crosses(peer: int, medium: str) -> None:
    energy = used(seconds(idle=1.0), Transfer("neighbour", ("data",), 10**9, peer), ranks=16)
    assert energy.links.value == pytest.approx(16 * 8e9 * float(SYSTEM.power.joules_per_bit[medium]))


def test_a_ring_over_two_nodes_leaves_each_of_them_once() -> None:
    energy = used(seconds(idle=1.0), Transfer("all_reduce", ("data",), 10**9), ranks=16)
    per_bit = SYSTEM.power.joules_per_bit
    each = (14 * float(per_bit["nvlink"]) + 2 * float(per_bit["network"])) / 16
    assert energy.links.value == pytest.approx(16 * 8e9 * each)


def test_carbon_dioxide_and_price_follow_from_joules_and_hours() -> None:
    energy = used(seconds(idle=3600.0), ranks=12)
    kwh = energy.joules.value / 3.6e6
    assert energy.grams_co2.value == pytest.approx(kwh * float(SYSTEM.power.grams_co2_per_kwh))
    assert SYSTEM.node.dollars_per_hour is not None
    assert energy.dollars == pytest.approx(2 * float(SYSTEM.node.dollars_per_hour)), "nodes are rented whole"


def test_bounds_hold_the_value_and_a_system_without_a_price_has_none() -> None:
    energy = energy_of(seconds(compute=1.0), System.load("lassen"), program(Mesh(data=4), PRODUCT))
    assert energy.dollars is None
    assert all(part.low <= part.value <= part.high for part in (*energy.parts.values(), energy.joules))
