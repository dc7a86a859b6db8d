"""Operators of programs, replayed on real tensors and timed."""

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.oracle_runs.pace import Sample, paced
from benchmarks.oracle_runs.table import Point, section

import convmesh as cm
from convmesh import models
from convmesh.lowering.loss_node import with_loss
from convmesh.measure.clock import one_thread
from convmesh.measure.operator_times import Repeats, bytes_of_caches, distinct_works, time_works
from convmesh.measure.overheads import measure_overheads
from convmesh.measure.replay import Replay
from convmesh.measure.sending import SPLITS, measure_sending
from convmesh.measure.updates import measure_updates, measure_updates_at_once
from convmesh.plans import Program, Work
from convmesh.plans.loss_memory import LOSS
from convmesh.system.operator_table import OperatorTable, Overheads, UpdateTiming
from tests.conftest import Pools

CPU = torch.device("cpu")
SHORT = Repeats(seconds_round=1e-4, most=3)


def program_of(name: str, last: bool = False) -> Program:
    small = models.find(name).small()
    model = small.create()
    if last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = small.draw_input()
    target = small.draw_target()
    dtype = torch.float32 if target.is_floating_point() else target.dtype
    lowered = cm.lower_plan(cm.plan(model, tuple(x.shape), cm.Mesh(data=1), "data"), device="cpu")
    return with_loss(lowered, small.task.loss(), target.shape, dtype)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize("name", ["resnet18", "unet3d", "convnext-tiny"])
def test_all_operators_of_a_network_run_alone(name: str) -> None:
    works = distinct_works([program_of(name)])
    timings, failed = time_works(works, CPU, SHORT)
    assert not failed
    assert [timing.call for timing in timings] == [work.call for work in works]
    assert all(timing.seconds > 0 for timing in timings)


def test_operands_have_the_memory_format_of_the_program() -> None:
    works = distinct_works([program_of("resnet18", last=True)])
    assert sum("last=1" in work.call for work in works) > len(works) / 2
    operand = Replay(CPU)._value(_first_operand("relu.default(float32(2, 8, 4, 4, last=1))"))
    assert operand.is_contiguous(memory_format=torch.channels_last)
    strided = Replay(CPU)._value(_first_operand("mm.default(float32(4, 8, strides=(1, 4)))"))
    assert strided.stride() == (1, 4)


def _first_operand(call: str) -> ast.expr:
    expression = ast.parse(call, mode="eval").body
    assert isinstance(expression, ast.Call)
    return expression.args[0]


def test_a_call_that_fails_is_named() -> None:
    bad = Work("frobnicate", (), (), "float32", 0, 0, (), "frobnicate.default(float32(2))")
    assert time_works([bad], CPU, SHORT) == ([], [bad.call])


def test_larger_operators_take_longer() -> None:
    calls = [f"mm.default(float32({n}, {n}), float32({n}, {n}))" for n in (16, 512)]
    works = [Work("mm", (), (), "float32", 1, 1, (), call) for call in calls]
    (small, large), _ = time_works(works, CPU)
    assert large.seconds > 5 * small.seconds


def test_the_loss_is_a_node_with_forward_and_backward() -> None:
    node = program_of("lenet5").nodes[-1]
    assert node.node == LOSS
    assert node.forward
    assert node.backward


def test_gradients_of_a_tensor_with_two_users_are_summed() -> None:
    class Skip(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Conv2d(4, 4, 1), torch.nn.Conv2d(4, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            total: torch.Tensor = y + self.b(y)
            return total

    nodes = {n.node: n for n in cm.lower_plan(cm.plan(Skip(), (2, 4, 8, 8), cm.Mesh(data=1), "data")).program.nodes}
    sums = [s for n in nodes.values() for s in n.backward if isinstance(s, Work) and s.op == "add"]
    assert [s.outputs for s in sums] == [((2, 4, 8, 8),)]


def test_operators_that_only_read_shapes_are_not_works() -> None:
    nodes = program_of("unet2d").nodes
    joins = [n for n in nodes if n.kind == "cat"]
    assert joins
    assert all(len([s for s in n.forward if isinstance(s, Work)]) == 1 for n in joins)


def test_optimisers_cost_more_for_more_elements() -> None:
    timings = measure_updates(CPU)
    assert set(timings) == {"sgd float32", "momentum float32", "adam float32"}
    assert timings["adam float32"].seconds_element > timings["sgd float32"].seconds_element > 0


def test_optimisers_are_timed_on_ranks_at_once() -> None:
    timings = measure_updates_at_once(2, seconds_timeout=300)
    assert set(timings) == {"sgd float32 x2", "momentum float32 x2", "adam float32 x2"}
    assert {timing.active for timing in timings.values()} == {2}
    assert timings["adam float32 x2"].seconds_element > timings["sgd float32 x2"].seconds_element > 0


def overheads_alone() -> tuple[float, float]:
    from convmesh.measure.overheads import KINDS

    kinds = {name: KINDS[name] for name in ("conv", "identity")}
    overheads = measure_overheads(CPU, kinds)
    return overheads.forward("conv"), overheads.forward("identity")


def sending_by_kind() -> Overheads:
    """Overheads of a convolution split by space and by channels."""
    splits = [(replace(setting, rounds=1), ("conv",)) for setting, kinds in SPLITS if "conv" in kinds]
    return measure_sending(Overheads(), splits)


def test_the_runtime_takes_longer_for_a_convolution_than_for_nothing_and_longer_if_it_is_split(pools: Pools) -> None:
    for _ in range(5):  # again where others take the cores meanwhile
        ((conv, nothing),) = pools[1].run(overheads_alone)
        if conv > nothing:
            break
    assert conv > nothing >= 0
    sending = pools[2].run(sending_by_kind)[0]
    assert set(sending.kinds) == {"conv space", "conv channels"}
    assert min(sending.forward("conv", cut) for cut in ("space", "channels")) > 1.5 * conv


def test_pace_is_how_much_longer_the_heaviest_operators_take_than_in_the_table() -> None:
    program = program_of("lenet5")
    timings, _ = time_works(distinct_works([program]), CPU, SHORT)
    table = OperatorTable("some", tuple(timings), {"sgd float32": UpdateTiming(1.0, 2.0)}, Overheads(1.0, 2.0, 3.0))
    sample = Sample.of([program], table, 1)
    assert len(sample.works) == 12 < len(timings)
    slower = paced(replace(cm.System.load("dgx-h200"), operators=table), 2.0).operators
    assert slower is not None
    again = [timing for work in sample.works if (timing := slower.find(work.call)) is not None]
    assert sample.pace(again) == pytest.approx(2.0)
    assert (slower.updates["sgd float32"].seconds_element, slower.overheads.backward("any")) == (4.0, 4.0)
    heavy = replace(again[0], seconds=3 * again[0].seconds)
    assert 2.0 < sample.pace([heavy, *again[1:]]) < 6.0


def test_pace_is_timed_on_the_ranks_that_ran_the_steps(pools: Pools) -> None:
    program = program_of("lenet5")
    timings, _ = time_works(distinct_works([program]), CPU, SHORT)
    assert 0.01 < Sample.of([program], OperatorTable("some", tuple(timings)), 1).pace_on(pools[2]) < 100


def test_the_largest_cache_is_read_from_sysfs(tmp_path: Path) -> None:
    assert bytes_of_caches(tmp_path) == 0
    for index, size in enumerate(("32K", "1024K", "32768K")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert bytes_of_caches(tmp_path) == 32 << 20


def test_predictions_are_summed_up_at_every_pace() -> None:
    ways = {
        way: [Point("net", name, 2, seconds, (1.0, 1.0), 2.0) for name in ("data", "filter")]
        for way, seconds in (("as calibrated", 0.5), ("at the pace of the steps", 1.0))
    }
    text = section(ways, "head")
    assert "as calibrated: mean accuracy **50.0%**" in text
    assert "at the pace of the steps: mean accuracy **100.0%**" in text
    assert "| filter | 1 | 50.0% (50.0%) | 100.0% (100.0%) |" in text
