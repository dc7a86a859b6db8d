"""Pipelines: the order is torch's own, bubbles match theory, computing ranks share cores."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

from convmesh.layout import Mesh
from convmesh.oracle.pricing.compute_model import ComputeModel
from convmesh.oracle.pricing.transfer_model import TransferModel
from convmesh.oracle.simulate.pipeline_clocks import CoreSharing, StageSeconds, run_actions
from convmesh.oracle.simulate.step import schedule
from convmesh.plans import BucketProgram, Program, Transfer
from convmesh.plans.stage_order import actions_of
from tests.oracle.little_programs import SYSTEM, all_reduce, node, program, scheduled, work

KINDS = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}
CLASSES: dict[str, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
}


class Stage:
    """A stage for torch's schedules that records what it is asked to run."""

    def __init__(self, index: int, stages: int, pipe: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, stages, pipe, index % pipe
        self.is_first, self.is_last, self.has_backward = index == 0, index == stages - 1, True
        self.submod = self.group = self.device = self.stage_index_to_group_rank = None
        self.ran: list[tuple[str, int, int]] = []

    def perform_reduce_grad(self, _: int) -> None:
        """Sum nothing."""

    def release_fwd_send_outputs(self, _: int) -> None:
        """Nothing was sent; torch asks from 2.15 on."""

    def no_messages(self, _: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_messages

    def forward_one_chunk(self, index: int, *_: Any, **__: Any) -> None:
        self.ran.append(("forward", self.stage_index, index))

    def backward_one_chunk(self, index: int, *_: Any, **__: Any) -> None:
        self.ran.append(("backward", self.stage_index, index))


def torch_order(name: str, pipe: int, own: int, microbatches: int) -> dict[int, list[tuple[str, int, int]]]:
    if name in ("gpipe", "1f1b"):
        return {rank: _run_by_torch(name, Stage(rank, pipe, pipe), microbatches) for rank in range(pipe)}
    made = CLASSES[name]([Stage(pipe * k, pipe * own, pipe) for k in range(own)], microbatches, loss_fn=max)
    return {
        rank: [
            (KINDS[a.computation_type.value], a.stage_index, a.microbatch_index)
            for a in actions
            if a.computation_type.value in KINDS
        ]
        for rank, actions in made.pipeline_order_with_comms.items()
    }


def _run_by_torch(name: str, stage: Stage, microbatches: int) -> list[tuple[str, int, int]]:
    """Run the two schedules for which torch keeps no correct list (2.13 miscounts the last stages of 1F1B)."""
    made = CLASSES[name](stage, microbatches)
    made._initialize_stage = lambda *_: None
    made._step_microbatches([()] * microbatches, [{}] * microbatches)
    return stage.ran


@pytest.mark.parametrize("pipe", [2, 3, 4])
@pytest.mark.parametrize(
    ("name", "own"), [("gpipe", 1), ("1f1b", 1), *itertools.product(("interleaved", "zero-bubble"), (1, 2, 3))]
)
def test_the_order_is_that_of_torch(name: str, own: int, pipe: int) -> None:
    for rounds in (1, 2, 3):
        microbatches = rounds * pipe
        theirs = torch_order(name, pipe, own, microbatches)
        for rank in range(pipe):
            actions = actions_of(name, pipe, pipe * own, microbatches, rank)
            assert [(a.kind, a.stage, a.microbatch) for a in actions] == theirs[rank]


def makespan(
    name: str, stages: list[StageSeconds], microbatches: int, pipe: int, sharing: CoreSharing | None = None
) -> float:
    orders = {rank: actions_of(name, pipe, len(stages), microbatches, rank) for rank in range(pipe)}
    return max(ran[-1].end for ran in run_actions(orders, stages, sharing).values())


@given(
    pipe=st.integers(2, 6), rounds=st.integers(1, 4), forward=st.floats(0.1, 2), backward=st.floats(0.1, 4),
    name=st.sampled_from(["gpipe", "1f1b"]),
)  # fmt: skip
def test_equal_stages_wait_p_minus_one_micro_batches(
    pipe: int, rounds: int, forward: float, backward: float, name: str
) -> None:
    microbatches = pipe * rounds
    found = makespan(name, [StageSeconds(forward, backward)] * pipe, microbatches, pipe)
    ideal = microbatches * (forward + backward)
    assert found / ideal - 1 == pytest.approx((pipe - 1) / microbatches)


def test_interleaving_and_splitting_backward_shorten_the_bubble() -> None:
    pipe, microbatches = 4, 8
    plain = makespan("1f1b", [StageSeconds(1.0, 2.0, 1.0, 1.0)] * 4, microbatches, pipe)
    looped = makespan("interleaved", [StageSeconds(0.5, 1.0)] * 8, microbatches, pipe)
    split = makespan("zero-bubble", [StageSeconds(1.0, 2.0, 1.0, 1.0)] * 4, microbatches, pipe)
    assert plain == pytest.approx(33)
    assert looped == pytest.approx(24 + 9 / 2)
    assert 24 < split < plain


def test_messages_delay_the_first_and_the_last_micro_batch() -> None:
    stages = [StageSeconds(1.0, 2.0, onward=0.25, back=0.5)] * 3
    assert makespan("gpipe", stages, 6, 3) == pytest.approx((6 + 2) * 3 + 2 * 0.75)


@given(
    pipe=st.integers(2, 5), rounds=st.integers(1, 3), times=st.lists(st.floats(0.1, 2), min_size=5, max_size=5),
    cores=st.integers(1, 4), ranks=st.integers(1, 3),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_ranks_on_few_cores_share_them(pipe: int, rounds: int, times: list[float], cores: int, ranks: int) -> None:
    stages = [StageSeconds(t, 2 * t) for t in times[:pipe]]
    alone = makespan("1f1b", stages, pipe * rounds, pipe)
    shared = makespan("1f1b", stages, pipe * rounds, pipe, CoreSharing(ranks, cores))
    in_all = sum(3 * t for t in times[:pipe]) * pipe * rounds * ranks
    assert shared >= max(alone, in_all / cores) * (1 - 1e-9)
    assert shared <= alone * max(1.0, pipe * ranks / cores) * (1 + 1e-9)
    if cores == 1 and ranks == 1:
        assert shared == pytest.approx(in_all)
    assert makespan("1f1b", stages, pipe, pipe, CoreSharing(ranks, math.inf)) == makespan("1f1b", stages, pipe, pipe)


def stage_program(mesh: Mesh, rank: int, milliseconds: float, microbatches: int, name: str = "1f1b") -> Program:
    """One layer per stage, twice as long backward; gradients are summed along data, if there is such an axis."""
    stage = mesh.coordinates(rank)["pipe"]
    pipe = mesh.axes["pipe"]
    each = mesh.size // pipe
    nodes = [replace(node(f"n{stage}", [work(milliseconds)], [work(2 * milliseconds)], [f"w{stage}"]), stage=stage)]
    if stage:
        back = Transfer("stage", ("pipe",), 1 << 20, rank - each)
        nodes.insert(0, replace(node(f"stage_{stage}_receives", [], [back]), stage=stage))
    if stage < pipe - 1:
        onward = Transfer("stage", ("pipe",), 1 << 20, rank + each)
        nodes.append(replace(node(f"stage_{stage}_sends", [onward]), stage=stage))
    made = program(mesh, rank, nodes)
    if "data" in mesh.axes:
        made = replace(made, buckets=(BucketProgram((f"w{stage}",), ((all_reduce(8, "data"),), (), ())),))
    return replace(made, stage=stage, repeats=microbatches, stages=pipe, schedule=name)


def test_a_pipelines_step_is_its_work_its_bubble_and_its_messages() -> None:
    mesh = Mesh(pipe=4)
    found = scheduled(*(stage_program(mesh, rank, 1.0, 8) for rank in range(4)))
    bubble = found.compute.value * 3 / 8
    assert (
        found.compute.value * (1 + 3 / 8) < found.step.value - found.update.value < found.compute.value * (1.02 + 3 / 8)
    )
    assert found.idle.value == pytest.approx(bubble, rel=0.05)


def test_a_pipeline_with_a_slow_stage_takes_that_stages_time_for_every_micro_batch() -> None:
    mesh = Mesh(pipe=3)
    even, uneven = (
        scheduled(*(stage_program(mesh, rank, slow if rank == 1 else 1.0, 12) for rank in range(3)))
        for slow in (1.0, 3.0)
    )
    assert uneven.rank == 1
    assert uneven.step.value > 2.5 * even.step.value
    assert uneven.idle.value / uneven.step.value < even.idle.value / even.step.value


def test_ranks_along_data_of_a_pipeline_are_simulated_once() -> None:
    mesh = Mesh(pipe=2, data=3)
    made = [stage_program(mesh, rank, 1.0, 4) for rank in range(mesh.size)]
    alone, together = scheduled(made[0], made[3]), scheduled(*made)
    assert alone.step.value == pytest.approx(together.step.value)
    assert alone.exposed.value == pytest.approx(together.exposed.value)
    assert alone.exposed.value > 0


def test_the_timeline_of_a_pipeline_has_every_micro_batch_of_every_stage() -> None:
    mesh = Mesh(pipe=2)
    found = scheduled(*(stage_program(mesh, rank, 1.0, 4, "zero-bubble") for rank in range(2)))
    forward = [i for i in found.timeline.of(1, "compute") if i.phase == "forward"]
    assert [i.layer for i in forward] == ["n1"] * 4
    assert forward[0].begin >= next(found.timeline.of(0, "compute")).end


def test_on_one_core_a_pipeline_takes_the_work_of_all_its_ranks() -> None:
    mesh = Mesh(pipe=3)
    made = {rank: stage_program(mesh, rank, 1.0, 6) for rank in range(3)}
    compute, transfer = ComputeModel(SYSTEM), TransferModel(SYSTEM, mesh)
    free, crowded = schedule(made, compute, transfer), schedule(made, compute, transfer, CoreSharing(1, 1))
    assert crowded.update.value == pytest.approx(3 * free.update.value)
    assert crowded.step.value == pytest.approx(3 * (free.compute.value + free.update.value), rel=0.01)
