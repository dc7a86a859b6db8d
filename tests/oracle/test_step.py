"""Clocks: overlap helps but no more than it can, buckets leave when full, equal ranks are simulated once."""

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convmesh.layout import Mesh
from convmesh.oracle.pricing.compute_model import ComputeModel
from convmesh.oracle.pricing.stragglers import expected_maximum, seconds_straggling
from convmesh.oracle.pricing.transfer_model import TransferModel
from convmesh.oracle.simulate.priced_steps import Busy
from convmesh.oracle.simulate.step import Scheduled, schedule
from convmesh.plans import Program, ShowingProgram, Step, Transfer, Wait
from convmesh.system.operator_table import OperatorTable, Overheads, Timing
from tests.oracle.little_programs import SYSTEM, all_reduce, node, program, scheduled, waited, work

PAIR = Mesh(data=2)
seconds = st.floats(0.01, 5.0)


def step(found: Scheduled) -> float:
    return found.step.value


def one_transfer(before: float, behind: float, size: float, after: int) -> Scheduled:
    """Work, then a sum that is waited for `after` steps later, after other work."""
    steps = waited([work(before), all_reduce(size, "data"), work(behind)], 0, after)
    return scheduled(program(PAIR, 0, [node("a", steps)]))


@given(before=seconds, behind=seconds, size=st.floats(0.1, 500.0))
@settings(max_examples=50, deadline=None)
def test_overlap_lies_between_none_and_the_longer_of_the_two(before: float, behind: float, size: float) -> None:
    serial, overlapped = one_transfer(before, behind, size, 0), one_transfer(before, behind, size, 1)
    sent = serial.exposed.value
    assert serial.hidden.value == 0
    assert step(serial) >= step(overlapped) - 1e-12
    assert step(overlapped) >= max(overlapped.compute.value, sent) - 1e-12
    assert overlapped.exposed.value + overlapped.hidden.value == pytest.approx(sent)
    assert step(serial) == pytest.approx(serial.compute.value + sent)


steps_of_a_node = st.lists(st.one_of(seconds.map(work), st.just(all_reduce(8, "data"))), min_size=1, max_size=6)


def with_waits(steps: list[Step], after: int) -> list[Step]:
    """Insert the last wait first, since waits count as steps."""
    for number in reversed(range(sum(isinstance(s, Transfer) for s in steps))):
        steps = waited(steps, number, after)
    return steps


@given(nodes=st.lists(steps_of_a_node, min_size=1, max_size=4), after=st.integers(0, 3), more=seconds, data=st.data())
@settings(max_examples=50, deadline=None)
def test_more_work_never_makes_a_step_shorter(
    nodes: list[list[Step]], after: int, more: float, data: st.DataObject
) -> None:
    where = data.draw(st.integers(0, len(nodes) - 1))
    longer = [[*of, work(more)] if i == where else of for i, of in enumerate(nodes)]
    times = []
    for listed in (nodes, longer):
        made = [node(f"n{i}", with_waits(of, after), [work(0.5)], [f"w{i}"]) for i, of in enumerate(listed)]
        buckets = [(4.0, [f"w{i}"]) for i in reversed(range(len(listed)))]
        times.append(step(scheduled(program(PAIR, 0, made, buckets))))
    assert times[0] <= times[1] + 1e-12


@given(nodes=st.lists(steps_of_a_node, min_size=1, max_size=4), after=st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_one_rank_stands_for_all_that_do_the_same(nodes: list[list[Step]], after: int) -> None:
    mesh = Mesh(data=4)
    made = [node(f"n{i}", with_waits(of, after), [work(1)], [f"w{i}"]) for i, of in enumerate(nodes)]
    ranks = [program(mesh, rank, made, [(16, [f"w{i}" for i in range(len(nodes))])]) for rank in range(4)]
    alone, together = scheduled(ranks[1]), scheduled(*ranks)
    for part in ("compute", "exposed", "hidden", "idle", "update"):
        assert getattr(alone, part).value == pytest.approx(getattr(together, part).value), part


def halos(mesh: Mesh, rank: int, milliseconds: float) -> Program:
    """A layer that waits for its neighbours along height, after its own work."""
    peers = [other for other in (rank - 1, rank + 1) if 0 <= other < mesh.size]
    sends = [Transfer("neighbour", ("height",), 1000, peer) for peer in peers]
    wait = Wait(tuple(range(len(peers))), tuple((peer, 1000) for peer in peers))
    return program(mesh, rank, [node("before", [work(milliseconds)]), node("halo", [*sends, work(0.1), wait, work(1)])])


def test_a_rank_waits_for_a_slow_neighbour_but_not_for_one_further_away() -> None:
    mesh = Mesh(height=4)
    even = scheduled(*(halos(mesh, rank, 1.0) for rank in range(4)))
    uneven = scheduled(*(halos(mesh, rank, 5.0 if rank == 0 else 1.0) for rank in range(4)))
    ends = {rank: max(i.end for i in uneven.timeline.of(rank, "compute")) for rank in range(4)}
    assert even.idle.value < 1e-9
    assert step(uneven) > step(even) + 3.9e-3
    assert ends[1] > ends[2] + 3e-3, "one hop in one exchange"
    assert ends[2] == pytest.approx(ends[3])


def test_collectives_wait_for_the_last_of_their_group() -> None:
    mesh = Mesh(data=2, height=2)
    made = []
    for rank in range(4):
        steps: list[Step] = [work(4.0 if rank == 0 else 1.0), all_reduce(1, "height"), Wait((0,))]
        made.append(program(mesh, rank, [node("a", steps)]))
    found = scheduled(*made)
    begins = {i.rank: i.begin for i in found.timeline.intervals if i.stream == "communication"}
    assert begins[0] == begins[1] > 3e-3, "ranks 0 and 1 are a group along height"
    assert begins[2] == begins[3] < begins[0]


def test_buckets_leave_when_their_last_gradient_is_ready() -> None:
    nodes = [node(f"n{i}", [work(1)], [work(2)], [f"w{i}"]) for i in range(4)]
    found = scheduled(program(PAIR, 0, nodes, [(8, ["w3", "w2"]), (8, ["w1"]), (8, ["w0"])]))
    backward = {i.layer: i.end for i in found.timeline.of(0, "compute") if i.phase == "backward"}
    first, second, third = (i.begin for i in found.timeline.of(0, "communication"))
    assert first == pytest.approx(backward["n2"])
    assert second == pytest.approx(backward["n1"])
    assert third == pytest.approx(backward["n0"])
    assert found.hidden.value > found.exposed.value > 0


def test_a_bucket_waits_for_the_one_before_it_and_an_unused_weight_for_the_end() -> None:
    nodes = [node(f"n{i}", [work(1)], [work(2)], [f"w{i}"]) for i in range(3)]
    found = scheduled(program(PAIR, 0, nodes, [(1, ["w0"]), (1, ["w2"]), (1, ["w1", "never"])]))
    end = max(i.end for i in found.timeline.of(0, "compute") if i.phase == "backward")
    assert [i.begin >= end for i in found.timeline.of(0, "communication")] == [True, True, True]


def test_weights_sent_after_the_update_are_waited_for_at_once_or_by_the_layer_that_uses_them() -> None:
    nodes = [node(f"n{i}", [work(3)], [work(3)], [f"w{i}"]) for i in range(3)]
    made = program(PAIR, 0, nodes)
    sent = Transfer("broadcast", ("data",), 50 << 20)
    at_use, at_once = (
        scheduled(replace(made, shown=(ShowingProgram(("w2",), (sent,), (work(0.1),), at_use=use),)))
        for use in (True, False)
    )
    assert at_once.hidden.value == 0
    assert at_use.hidden.value > 0
    assert step(at_use) < step(at_once)


def test_blocks_that_are_computed_again_cost_their_forward_once_more() -> None:
    nodes = [node(f"n{i}", [work(1)], [work(2)]) for i in range(4)]
    plain = scheduled(program(PAIR, 0, nodes))
    again = scheduled(program(PAIR, 0, [replace(n, block="b") if i in (1, 2) else n for i, n in enumerate(nodes)]))
    forward = (
        scheduled(program(PAIR, 0, nodes[:2])).compute.value - scheduled(program(PAIR, 0, nodes[:1])).compute.value
    )
    backward = scheduled(program(PAIR, 0, [node("x", [], [work(2)])])).compute.value
    assert again.compute.value - plain.compute.value == pytest.approx(2 * (forward - backward))


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 3)), min_size=1, max_size=8), st.floats(0, 5), st.floats(0, 5))
def test_a_stretch_of_operators_is_a_queue_of_them(ops: list[tuple[float, float]], host: float, device: float) -> None:
    asked, done, busy = host, device, Busy.of(ops)
    for seconds_device, seconds_host in ops:
        asked += seconds_host
        done = max(done, asked) + seconds_device
    assert max(device + busy.seconds, host + busy.seconds_late) == pytest.approx(done)
    assert host + busy.seconds_host == pytest.approx(asked)


def test_the_timeline_opens_in_a_trace_viewer_and_a_device_does_one_thing_at_a_time() -> None:
    nodes = [
        node(f"n{i}", [work(1), all_reduce(2, "data"), work(1), Wait((0,))], [work(2)], [f"w{i}"]) for i in range(3)
    ]
    timeline = scheduled(program(PAIR, 0, nodes, [(8, ["w2", "w1", "w0"])])).timeline
    computed = list(timeline.of(0, "compute"))
    assert all(a.end <= b.begin + 1e-12 for a, b in itertools.pairwise(computed))
    trace = json.loads(json.dumps(timeline.to_chrome()))
    timed = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(timed) == len(timeline.intervals)
    assert {event["tid"] for event in timed} == {0, 1}


def test_the_more_ranks_the_later_the_last() -> None:
    assert expected_maximum(1) == 0
    assert expected_maximum(2) == pytest.approx(0.564, rel=0.05)
    assert expected_maximum(1000) == pytest.approx(3.241, rel=0.01)
    assert seconds_straggling(1.0, 1024, 0.01) == pytest.approx(0.0325, rel=0.01)


def beside_host(seconds_device: float, seconds_host: float, waits: bool = False) -> Scheduled:
    """Twenty operators forward and twenty backward, on a device whose table has all their times."""
    called = replace(work(1), call="copy_.default()")
    timing = Timing(called.call, "float32", called.inputs, 0, called.bytes_moved, seconds_device, 0.0, seconds_host)
    table = OperatorTable("some", (timing,), overheads=Overheads(waits_for_loss=waits))
    system = replace(SYSTEM, operators=table)
    nodes = [node(f"n{i}", [called], [called]) for i in range(20)]
    mesh = Mesh()
    return schedule({0: program(mesh, 0, nodes)}, ComputeModel(system), TransferModel(system, mesh))


def test_a_slow_host_bounds_the_step_and_one_that_is_ahead_costs_nothing() -> None:
    assert step(beside_host(1e-6, 10e-6)) == pytest.approx(40 * 10e-6, rel=0.02)
    found = beside_host(10e-6, 1e-6)
    assert step(found) == pytest.approx(40 * 10e-6, rel=1e-6)
    assert found.timeline.intervals[0].begin == 0
    assert found.timeline.intervals[-1].end == pytest.approx(step(found))


def test_a_host_that_waits_for_the_loss_must_launch_again_first() -> None:
    """A host ten times slower than the device never gets ahead; one ten times faster lags by one operator."""
    assert step(beside_host(10e-6, 1e-6, waits=True)) == pytest.approx(40 * 10e-6 + 1e-6, rel=1e-3)


@pytest.mark.parametrize(
    ("axes", "more"), [(("height",), 4e-4), (("data", "width"), 4e-4), (("filter",), 3e-4), (("data",), 1.1e-4)]
)
def test_the_overhead_of_a_node_depends_on_what_its_transfers_cut(axes: tuple[str, ...], more: float) -> None:
    """Space and channels were measured; samples add the sending time."""
    kinds = {"conv": (1e-5, 0.0), "conv space": (4e-4, 0.0), "conv channels": (3e-4, 0.0)}
    table = OperatorTable("some", (), overheads=Overheads(kinds=kinds, seconds_sending=1e-4))
    system, mesh = replace(SYSTEM, operators=table), Mesh(data=2, height=2, width=2, filter=2)
    compute, transfer = ComputeModel(system), TransferModel(system, mesh)
    spent, sends = [], (all_reduce(1, *axes), Wait((0,)))
    for more_steps in ((), sends):
        steps: list[Step] = [work(1), *more_steps]
        made = replace(node("a", steps), kind="conv")
        spent.append(schedule({0: program(mesh, 0, [made])}, compute, transfer).compute.value)
    assert spent[1] - spent[0] == pytest.approx(more - 1e-5)
