"""The kernels that a compiler makes of a step, from the program alone: what they read and write, and what is kept."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

import convmesh as cm
from convmesh import Mesh
from convmesh.lowering.lower import lower_plan
from convmesh.plans import Program, Transfer, Wait, Work
from convmesh.plans.fused.fused_program import fused
from convmesh.plans.fused.peeled_bias import without_bias

SHAPE = (4, 8, 16, 16)
BYTES = 4 * 8 * 16 * 16 * 4


class Block(nn.Module):
    """conv, norm, relu, conv, norm, plus a shortcut, relu."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 8, 3, padding=1, bias=bias)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1, bias=bias)
        self.last = nn.BatchNorm2d(8)
        self.head = nn.Conv2d(8, 8, 1, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.last(self.second(torch.relu(self.norm(self.first(x)))))
        result: torch.Tensor = self.head(torch.relu(y + x))
        return result


def program_of(model: nn.Module, mesh: Mesh | None = None, strategy: str = "data") -> Program:
    plan = cm.plan(model, SHAPE, mesh or Mesh(data=1), strategy, compile=True)
    return fused(lower_plan(plan).program)


def works(program: Program, node: str, phase: str) -> list[Work]:
    (found,) = (n for n in program.nodes if n.node == node)
    return [step for step in getattr(found, phase) if isinstance(step, Work)]


def test_a_norm_and_its_activation_are_two_kernels_forward_and_two_back() -> None:
    program = program_of(Block())
    made = [work.op for node in ("norm", "relu") for work in works(program, node, "forward")]
    assert made == ["fused_pointwise", "fused_moments", "fused_pointwise"]  # the first counts batches
    back = [work.op for node in ("relu", "norm") for work in works(program, node, "backward")]
    assert back == ["fused_sums", "fused_pointwise"]


def test_a_fused_kernel_reads_and_writes_each_value_once() -> None:
    program = program_of(Block())
    (applied,) = works(program, "relu", "forward")
    assert applied.inputs[0] == applied.outputs[0] == SHAPE
    assert applied.bytes_moved == 2 * BYTES + 4 * 8 * 4  # x, y, and four values a channel
    (joined,) = works(program, "relu_1", "forward")
    assert joined.bytes_moved == 3 * BYTES + 4 * 8 * 4  # with the shortcut
    assert "add" not in [work.op for work in program.works()]


def test_what_no_compiler_looks_into_stays() -> None:
    plan = cm.plan(Block(), SHAPE, Mesh(data=1), "data", compile=True)
    before, after = (Counter(w.op for w in p.works()) for p in _both(lower_plan(plan).program))
    kept = {op: count for op, count in before.items() if op.startswith("convolution")}
    assert kept == {op: count for op, count in after.items() if op.startswith("convolution")}
    assert {op for op in after if not op.startswith("convolution")} == {
        "fused_pointwise", "fused_moments", "fused_sums",
    }  # fmt: skip


def _both(program: Program) -> tuple[Program, Program]:
    return program, fused(program)


def test_bias_is_added_by_the_next_kernel() -> None:
    program = program_of(Block(bias=True))
    convolutions = [work for work in program.works() if work.op == "convolution"]
    assert all(len(work.inputs) == 2 for work in convolutions)
    assert [work.op for work in works(program, "first", "forward")] == ["convolution", "fused_pointwise"]
    (added,) = works(program, "first", "forward")[1:]
    assert added.bytes_moved == 2 * BYTES + 8 * 4  # backward needs the sum: it is written


def test_a_call_with_bias_is_written_without() -> None:
    call = "convolution.default(float32(4, 8, 16, 16, last=1), float32(8, 8, 3, 3), {}, (1, 1,), 1)"
    work = Work("convolution", (SHAPE, (8, 8, 3, 3), (8,)), (SHAPE,), "float32", 1, 1, (), call.format("float32(8)"))
    assert without_bias(work).call == call.format("None")
    assert without_bias(without_bias(work)) == without_bias(work)


def test_of_a_relu_that_only_asks_for_signs_a_byte_is_kept() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
            self.norm = nn.BatchNorm2d(8)
            self.end = nn.Conv2d(8, 8, 1, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.end(nn.functional.max_pool2d(torch.relu(self.norm(self.conv(x))), 2))
            return result

    program = program_of(Pooled())
    applied = works(program, "relu", "forward")
    assert [work.outputs for work in applied] == [(SHAPE,)]
    assert "(bool(4, 8, 16, 16),)" in applied[0].call  # nothing but the sign is written
    assert applied[0].bytes_moved == BYTES + BYTES // 4 + 4 * 8 * 4


@pytest.mark.parametrize(("mesh", "strategy"), [(Mesh(height=2), "spatial"), (Mesh(filter=2), "filter")])
def test_transfers_stay_in_their_order_and_nothing_is_fused_across_them(mesh: Mesh, strategy: str) -> None:
    plan = cm.plan(Block(), SHAPE, mesh, strategy, compile=True)
    before, after = _both(lower_plan(plan).program)
    sent = [[s for _, _, s in p.steps() if isinstance(s, (Transfer, Wait))] for p in (before, after)]
    assert sent[0] == sent[1]
    assert after.bytes_sent == before.bytes_sent
    for node in after.nodes:
        for steps in (node.forward, node.backward):
            assert all(not isinstance(b, Wait) or isinstance(a, (Transfer, Wait, Work)) for a, b in pairwise(steps))


def test_a_compiled_step_is_predicted_to_be_faster_and_smaller() -> None:
    model = cm.models.create("resnet18")
    eager = cm.plan(model, (32, 3, 224, 224), Mesh(data=1), "data", precision="amp-bf16")
    compiled = replace(eager, compile=True)
    slow, fast = (cm.predict(plan, "dgx-h200") for plan in (eager, compiled))
    assert fast.seconds_step < 0.8 * slow.seconds_step
    assert fast.bytes_memory < slow.bytes_memory
    assert cm.predict(eager, "dgx-h200", compile=True).seconds_step == fast.seconds_step


def test_a_plan_remembers_that_its_step_is_compiled() -> None:
    plan = cm.plan(Block(), SHAPE, Mesh(data=1), "data", compile=True)
    assert "compile = true" in str(plan)
    again = cm.plan(Block(), SHAPE, strategy=plan)
    assert again.compile
    assert not cm.plan(Block(), SHAPE, strategy=plan, compile=False).compile
