"""Convolutions of compiled steps that run by our own kernels, found in programs by their calls."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

import convmesh as cm
from convmesh import Mesh, models
from convmesh.kernels.tuned.conv_configs import KernelConfig
from convmesh.kernels.tuned.conv_shape import ConvShape
from convmesh.kernels.tuned.conv_table import ConvTable, Measured
from convmesh.lowering.lower import lower_plan
from convmesh.measure.operator_times import distinct_works
from convmesh.measure.tuned_timings import tuned_timings
from convmesh.oracle import predict_programs
from convmesh.plans import Program, Work
from convmesh.plans.fused.fused_program import fused
from convmesh.system import System
from convmesh.system.operator_table import OperatorTable, Timing, tuned_call

NONE = OperatorTable("NVIDIA H200", ())
CONFIG = KernelConfig(1, 128, 32, 32, 4, 3, 16, 1)
SHAPE = "8x4x128x128x128 32 k3x3x3 s1x1x1 p1x1x1 d1x1x1"


def row(phase: str, seconds: float, seconds_torch: float = 4e-3, shape: str = SHAPE) -> Measured:
    return Measured(phase, ConvShape.parse(shape), "bfloat16", CONFIG, seconds, seconds_torch)


def table(*rows: Measured) -> ConvTable:
    return ConvTable("NVIDIA H200", rows)


@functools.cache
def cosmoflow(samples: int = 8) -> Program:
    """As its compiled step is lowered for a GPU."""
    model = models.create("cosmoflow")
    plan = cm.plan(model, (samples, 4, 128, 128, 128), Mesh(data=1), "data", precision="amp-bf16")
    return lower_plan(replace(plan, compile=True), device="cuda").program


def works(program: Program) -> list[Work]:
    return distinct_works([fused(program)])


def test_phases_are_told_apart() -> None:
    found = list(tuned_timings(works(cosmoflow()), table(row("forward", 1e-3), row("weight", 2e-3)), NONE))
    assert sorted(timing.seconds for timing in found) == [1e-3, 2e-3]
    assert all(timing.call.startswith("tuned.convolution") and timing.flops > 0 for timing in found)
    backward = max(found, key=lambda timing: timing.seconds)
    assert "(False, True" in backward.call  # the gradient of the weight


def test_kernels_that_do_not_beat_torch_are_none() -> None:
    assert list(tuned_timings(works(cosmoflow()), table(row("forward", 3.9e-3)), NONE)) == []


def test_more_samples_take_longer() -> None:
    (found,) = tuned_timings(works(cosmoflow(16)), table(row("forward", 1e-3)), NONE)
    assert found.seconds == pytest.approx(2e-3)


def test_what_our_kernels_write_need_not_be_converted() -> None:
    """Of one channel the format cannot be told, and torch's kernel writes what it computes of it plainly."""
    x, weight, y = (1, 1, 128, 128, 128), (32, 1, 3, 3, 3), (1, 32, 128, 128, 128)
    rest = "None, (1, 1, 1,), (1, 1, 1,), (1, 1, 1,), False, (0, 0, 0,), 1)"
    first = Work(
        "convolution",
        (x, weight),
        (y,),
        "bfloat16",
        1,
        1,
        (),
        f"convolution.default(bfloat16{x}, bfloat16{weight}, {rest}",
    )
    call = "convolution.default(bfloat16(1, 32, 128, 128, 128{}), bfloat16(32, 32, 3, 3, 3, last=1), " + rest
    second = Work("convolution", (y, (32, 32, 3, 3, 3)), (y,), "bfloat16", 1, 1, (), call.format(""))
    known = OperatorTable("NVIDIA H200", (Timing(call.format(", last=1"), "bfloat16", second.inputs, 1, 1, 5e-4, 0.1),))
    own = table(row("forward", 1e-4, shape="1x1x128x128x128 32 k3x3x3 s1x1x1 p1x1x1 d1x1x1"))
    assert {t.call: t.seconds for t in tuned_timings([first, second], own, known)} == {
        tuned_call(first.call): 1e-4,
        tuned_call(second.call): 5e-4,
    }
    assert list(tuned_timings([first, second], table(), known)) == []


def test_a_compiled_step_is_predicted_with_them() -> None:
    """The first layer of cosmoflow takes torch more than a third of the step."""
    program, shipped = cosmoflow(), System.load("dgx-h200")
    assert shipped.operators is not None
    known = tuple(timing for timing in shipped.operators.timings if timing.op != "tuned")
    own = tuple(tuned_timings(works(program), table(row("forward", 0.76e-3), row("weight", 0.97e-3)), NONE))
    seconds = [
        predict_programs(
            {0: one}, replace(shipped, operators=replace(shipped.operators, timings=(*known, *more)))
        ).seconds_step
        for one, more in ((program, ()), (program, own), (replace(program, compile=False), own))
    ]
    torch_alone, with_own, eager = seconds
    assert with_own < 0.75 * torch_alone
    assert eager > torch_alone
