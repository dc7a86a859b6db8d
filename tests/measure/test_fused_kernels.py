"""Stand-ins for fused kernels read and write what the program says; nodes are timed among others."""

import ast

import numpy as np
import pytest
import torch

import convmesh as cm
from convmesh.lowering.lower import lower_plan
from convmesh.measure.fused_kernels import FORMS
from convmesh.measure.mixed_networks import MixedNetworks, not_negative
from convmesh.measure.operator_times import Repeats, time_works
from convmesh.measure.overheads import KINDS
from convmesh.measure.replay import Replay
from convmesh.plans import Work
from convmesh.plans.fused.fused_program import fused, fused_work
from convmesh.system.operator_table import Overheads
from tests.conftest import Pools

CPU = torch.device("cpu")
SHAPE = (2, 8, 6, 6)
EACH = ("float32", (1, 8, 1, 1))
SAMPLES = [
    fused_work("pointwise", [("bfloat16", SHAPE), EACH], [("bfloat16", SHAPE), ("bool", SHAPE)], True, 1),
    fused_work("moments", [("bfloat16", SHAPE)], [EACH, EACH], True, 1),
    fused_work("sums", [("bfloat16", SHAPE), ("bool", SHAPE)], [EACH, EACH], True, 1),
    fused_work("rows", [("bfloat16", (12, 8))], [("bfloat16", (12, 8))], False, 1),
]


@pytest.mark.parametrize("work", SAMPLES, ids=lambda work: str(work.op))
def test_stand_ins_make_what_the_kernel_writes(work: Work) -> None:
    call = ast.parse(work.call, mode="eval").body
    assert isinstance(call, ast.Call)
    reads, writes = (Replay(CPU)._value(part) for part in call.args)
    made = FORMS[work.op](reads, writes)
    assert [(t.shape, t.dtype) for t in made] == [(t.shape, t.dtype) for t in writes]


def test_every_form_has_a_stand_in_but_joined_copies() -> None:
    model = cm.models.find("convnext-tiny").small().create()
    plan = cm.plan(model, (4, 3, 64, 64), cm.Mesh(data=1), "data", precision="amp-bf16", compile=True)
    forms = {work.op for work in fused(lower_plan(plan).program).works() if work.op.startswith("fused_")}
    assert forms <= {*FORMS, "fused_copies"}
    assert {"fused_rows", "fused_sums", "fused_pointwise"} <= forms


@pytest.mark.full
def test_stand_ins_are_compiled_and_timed() -> None:
    timings, failed = time_works(SAMPLES, CPU, Repeats(seconds_round=1e-4, most=3))
    assert not failed
    assert [timing.op for timing in timings] == [work.op for work in SAMPLES]


def seconds_among_others() -> tuple[list[str], float, float]:
    nodes, _ = MixedNetworks(CPU).seconds()
    return list(nodes), nodes["conv"][0], nodes["identity"][0]


@pytest.mark.full
def test_a_convolution_among_others_takes_longer_than_nothing(pools: Pools) -> None:
    ((kinds, conv, nothing),) = pools[1].run(seconds_among_others)
    assert kinds == list(KINDS)
    assert conv > nothing


def test_what_nodes_take_follows_from_networks_and_is_not_negative() -> None:
    counts = np.array([[1.0, 2.0, 1.0], [1.0, 1.0, 3.0], [1.0, 4.0, 2.0], [1.0, 3.0, 3.0]])
    assert not_negative(counts, counts @ [3.0, 2.0, 0.5]) == pytest.approx([3.0, 2.0, 0.5])
    found = not_negative(counts, counts @ [3.0, 2.0, -0.5])
    assert found[2] == 0.0
    assert min(found) >= 0


def test_kinds_that_were_not_timed_take_what_relu_takes_for_each_operator() -> None:
    known = Overheads(nodes={"relu": (3.0, 2.0), "identity": (1.0, 1.0), "conv": (7.0, 8.0), "conv amp": (9.0, 8.0)})
    assert known.among_others("conv", 5, "", 0) == 7.0
    assert known.among_others("conv", 5, "amp-bf16", 0) == 9.0
    assert known.among_others("softmax", 4, "", 1) == 5.0
    assert Overheads().among_others("conv", 1, "", 0) is None
