"""Prices of computations: as timed, from neighbours, or from a device's figures, each with its basis."""

from dataclasses import replace

import pytest

from convmesh.oracle import Assumptions
from convmesh.oracle.pricing.compute_model import ComputeModel
from convmesh.oracle.pricing.roofline import Product, Roofline
from convmesh.plans import Work
from convmesh.system import Figure, System
from convmesh.system.operator_table import OperatorTable, Timing, UpdateTiming, tuned_call

H200 = System.load("dgx-h200")
BARE = replace(H200, operators=None)


def convolution(samples: int, channels: int = 256, extent: int = 56, groups: int = 1) -> Work:
    image, weight = (samples, channels, extent, extent), (channels, channels // groups, 3, 3)
    flops = 2 * samples * channels * extent**2 * channels // groups * 9
    moved = 2 * (2 * samples * channels * extent**2 + channels * channels // groups * 9)
    call = f"convolution.default(bfloat16{image}, bfloat16{weight})"
    return Work("convolution", (image, weight), (image,), "bfloat16", flops, moved, (), call)


def relu(elements: int) -> Work:
    call = f"relu.default(float32({elements}))"
    return Work("relu", ((elements,),), ((elements,),), "float32", 0, 8 * elements, (), call)


def timed(work: Work, seconds: float, active: int = 1) -> Timing:
    return Timing(work.call, work.dtype, work.inputs, work.flops, work.bytes_moved, seconds, 0.05, 0.0, active)


def on_cores(cores: int, *timings: Timing) -> System:
    """A host whose ranks share cores, with an operator table."""
    node = replace(H200.node, cores=Figure(cores, "", "measured", "test"))
    updates = {"momentum float32": UpdateTiming(1e-6, 1e-9)}
    return replace(H200, node=node, operators=OperatorTable("test", timings, updates))


def test_timed_operators_are_priced_as_timed() -> None:
    assert H200.operators is not None
    timing = next(t for t in H200.operators.timings if t.op == "convolution")
    work = Work(timing.op, timing.inputs, (), timing.dtype, timing.flops, timing.bytes_moved, (), timing.call)
    found = ComputeModel(H200).work(work)
    assert (found.value, found.basis) == (timing.seconds, "measured")


def test_untimed_operators_are_interpolated_with_a_wider_interval() -> None:
    work, known = relu(3_000_000), relu(2_000_000)
    compute = ComputeModel(on_cores(2, timed(known, 1e-3), timed(relu(4_000_000), 2e-3)))
    found, exact = compute.work(work), compute.work(known)
    assert found.basis == "interpolated"
    assert 1e-3 < found.value < 2e-3
    assert (found.high - found.low) / found.value > (exact.high - exact.low) / exact.value


def test_without_a_table_the_device_is_a_model() -> None:
    found = ComputeModel(BARE).work(convolution(32))
    assert found.basis == "model"
    assert found.value > convolution(32).flops / float(H200.device.peak("bfloat16"))


def test_ranks_slow_each_other_as_measured_and_take_turns_beyond_the_cores() -> None:
    work = relu(1_000_000)
    system = on_cores(2, timed(work, 1e-3), timed(work, 1.5e-3, active=2))
    seconds = [ComputeModel(system, active=active).work(work).value for active in (1, 2, 8)]
    assert seconds == pytest.approx([1e-3, 1.5e-3, 6e-3])


def test_operators_timed_alone_slow_down_like_their_kind() -> None:
    work, other = relu(1_000_000), relu(4_000_000)
    system = on_cores(2, timed(work, 1e-3), timed(other, 4e-3), timed(other, 6e-3, active=2))
    assert ComputeModel(system, active=2).work(work).value == pytest.approx(1.5e-3)


def test_the_optimiser_costs_by_tensor_and_by_element() -> None:
    compute = ComputeModel(on_cores(2))
    assert compute.update(1000, "float32").value == pytest.approx(1e-6 + 1000 * 1e-9)
    adam = ComputeModel(on_cores(2), Assumptions(optimizer="adam")).update(1 << 24, "float32")
    assert adam.basis == "model", "it was not timed"


def test_the_optimiser_is_as_slow_as_timed_with_the_active_ranks() -> None:
    work = relu(1_000_000)
    system = on_cores(4, *(timed(work, 1e-3, active) for active in (1, 2, 4)))
    assert system.operators is not None
    updates = {**system.operators.updates, "momentum float32 x4": UpdateTiming(2e-6, 3e-9, active=4)}
    system = replace(system, operators=replace(system.operators, updates=updates))
    seconds = [ComputeModel(system, active=active).update(1000, "float32").value for active in (1, 2, 4, 8)]
    alone, crowded = 1e-6 + 1000 * 1e-9, 2e-6 + 1000 * 3e-9
    assert seconds == pytest.approx([alone, alone, crowded, 2 * crowded])


def test_small_operators_cost_the_launch_floor() -> None:
    compute = ComputeModel(BARE)
    assert compute.work(relu(4)).value == compute.work(relu(400)).value == float(H200.device.seconds_launch)


def test_a_quarter_of_the_filters_costs_more_than_a_quarter() -> None:
    roofline = Roofline(H200.device, Assumptions())
    whole, part = Product(4096, 64, 576), Product(4096, 8, 576)
    assert part.fill < whole.fill <= 1
    work = convolution(8, 64)
    narrow = replace(work, inputs=(work.inputs[0], (8, 64, 3, 3)), outputs=((8, 8, 56, 56),), flops=work.flops // 8)
    assert roofline.arithmetic(narrow) > roofline.arithmetic(work) / 8


def test_one_tile_too_many_costs_a_wave() -> None:
    roofline = Roofline(H200.device, Assumptions())
    processors = int(H200.device.processors)
    full, over = (roofline._waves(Product(128 * tiles, 128, 128)) for tiles in (processors, processors + 1))
    assert full == 1
    assert over < 0.6


def test_depthwise_convolutions_leave_tensor_cores_alone() -> None:
    roofline = Roofline(H200.device, Assumptions())
    dense, thin = convolution(32), convolution(32, groups=256)
    assert roofline.arithmetic(thin) / thin.flops > 2 * roofline.arithmetic(dense) / dense.flops


def test_tensor_cores_take_what_torch_gives_them() -> None:
    conv = replace(convolution(64), dtype="float32")
    square = (4096, 4096)
    product = Work("mm", (square, square), (square,), "float32", 2 * 4096**3, 12 * 4096**2)
    by_default, never, always = (Roofline(BARE.device, Assumptions(tf32=told)) for told in (None, False, True))
    assert by_default.seconds(conv) == always.seconds(conv) < never.seconds(conv)
    assert by_default.seconds(product) == never.seconds(product) > always.seconds(product)


def test_compiled_steps_are_priced_by_our_own_kernels_where_these_were_timed() -> None:
    work, other = convolution(32), convolution(64)
    tuned = replace(timed(work, 1e-4), call=tuned_call(work.call))
    compute = ComputeModel(on_cores(1, timed(work, 1e-3), timed(other, 2e-3), tuned))
    assert compute.priced(work)[0].value == 1e-3
    assert compute.priced(work, compiled=True)[0].value == 1e-4
    assert compute.priced(other, compiled=True)[0].value == 2e-3
    assert compute.priced(work)[0].value == 1e-3  # what is kept of one is not taken for the other


def test_our_own_kernels_say_nothing_of_operators_that_were_not_timed() -> None:
    known, tuned = (
        timed(convolution(32), 1e-3),
        replace(timed(convolution(64), 1e-6), call="tuned.convolution.default()"),
    )
    found = ComputeModel(on_cores(1, known, tuned)).work(convolution(48))
    assert found.value == pytest.approx(1.5e-3, rel=0.2)
