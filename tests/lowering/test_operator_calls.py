"""Operators on tensors without data: a call like an earlier one gives what that one gave."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from convmesh.dist import dry_mesh
from convmesh.layout import Mesh
from convmesh.lowering.operator_calls import run_call
from convmesh.lowering.recorder import recorded
from convmesh.plans import Work

aten = torch.ops.aten


def meta(*shape: int, **options: Any) -> torch.Tensor:
    return torch.empty(shape, device="meta", **options)


def test_a_repeated_call_has_the_first_ones_work_and_a_result_of_its_own() -> None:
    x, weight = meta(2, 3, 8, 8), meta(4, 3, 3, 3)
    args = (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    results, works = zip(*(run_call(aten.convolution.default, args, {}) for _ in range(3)), strict=True)
    assert works[0] == works[1] == works[2]
    assert works[1] is works[2]
    assert {(r.shape, r.stride(), r.dtype) for r in results} == {((2, 4, 8, 8), (256, 64, 8, 1), torch.float32)}
    assert len({r.untyped_storage()._cdata for r in results}) == 3


def test_the_order_in_memory_tells_calls_apart() -> None:
    plain, last = meta(2, 3, 8, 8), meta(2, 3, 8, 8, memory_format=torch.channels_last)
    for x in (plain, last, plain, last):
        result, _ = run_call(aten.relu.default, (x,), {})
        assert result.stride() == x.stride()


def test_numbers_of_different_types_tell_calls_apart() -> None:
    x = meta(3, dtype=torch.int64)
    for number, dtype in ((1, torch.int64), (1.0, torch.float32), (True, torch.int64), (1.0, torch.float32)):
        assert run_call(aten.add.Tensor, (x, number), {})[0].dtype == dtype


def test_in_place_operators_return_their_argument() -> None:
    for _ in range(2):
        x = meta(4, 4)
        assert run_call(aten.add_.Tensor, (x, meta(4, 4)), {})[0] is x


def test_several_results_come_in_the_same_container() -> None:
    args = (meta(2, 3, 8, 8), None, None, None, None, True, 0.1, 1e-5)
    first, again = (run_call(aten.native_batch_norm.default, args, {})[0] for _ in range(2))
    assert type(first) is type(again)
    assert [t.shape for t in first] == [t.shape for t in again]


def test_what_has_data_is_computed_each_time() -> None:
    for value in (1.0, 2.0):
        assert run_call(aten.add.Tensor, (torch.tensor(value), 1), {})[0].item() == value + 1


def test_a_record_lists_every_call_and_no_view() -> None:
    with recorded(dry_mesh(Mesh())) as steps:
        x = meta(4, 4)
        for _ in range(3):
            x.t().reshape(2, 8).relu_()
    ops = [step.op for step in steps if isinstance(step, Work)]
    assert ops == ["clone", "relu_"] * 3


@pytest.mark.parametrize(
    ("func", "shapes"),
    [
        (aten.mm.default, ((3, 5), (5, 7))),
        (aten.bmm.default, ((2, 3, 5), (2, 5, 7))),
        (aten.addmm.default, ((7,), (3, 5), (5, 7))),
        (aten.baddbmm.default, ((2, 3, 7), (2, 3, 5), (2, 5, 7))),
    ],
)
def test_products_have_as_many_operations_as_torch_counts(func: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    args = [meta(*shape) for shape in shapes]
    result, work = run_call(func, args, {})
    assert work is not None
    assert work.flops == flop_registry[func.overloadpacket](*args, out_val=result)


def test_planning_does_not_wait_for_triton() -> None:
    code = "import sys, convmesh.planner; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
