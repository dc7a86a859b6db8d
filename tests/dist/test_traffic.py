"""Counted bytes equal those of the plan and those passed to torch, or to the lines between ranks of a host."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from convmesh.dist import Traffic, copy_over, exchange, sum_over
from convmesh.dist.host_lines import HostLine, Passage
from convmesh.dist.traffic import all_reduce_bytes
from convmesh.layout import Layout, Mesh
from convmesh.layout.maps import Same
from convmesh.testing import opened
from tests.conftest import Pools
from tests.dist.test_exchange import Case, cases, framed
from tests.draws import draws
from tests.ops.grids import on_grids

EXCHANGE = sys.modules["convmesh.dist.exchange"]
"""The module; the package exports a function of that name."""


@contextmanager
def spying() -> Iterator[Counter[str]]:
    """Bytes of the buffers passed to torch.distributed and to lines inside the block, less what stays on this rank."""
    handed: Counter[str] = Counter()
    send = HostLine.send
    point_to_point, all_to_all, gather = dist.P2POp, dist.all_to_all_single, vars(EXCHANGE)["_gather_equal"]

    def spy_point_to_point(op: Any, buffer: torch.Tensor, *args: Any) -> Any:
        if op is dist.isend:
            handed["neighbour"] += buffer.nbytes
        return point_to_point(op, buffer, *args)

    def spy_send(line: HostLine, what: str, buffer: torch.Tensor) -> Passage:
        handed[what] += buffer.nbytes
        return send(line, what, buffer)

    def spy_all_to_all(output: torch.Tensor, buffer: torch.Tensor, outs: Any, ins: list[int], **kwargs: Any) -> Any:
        own = ins[dist.get_group_rank(kwargs["group"], dist.get_rank())]
        handed["all_to_all"] += buffer.nbytes - own * buffer.element_size()
        return all_to_all(output, buffer, outs, ins, **kwargs)

    def spy_gather(output: torch.Tensor, buffer: torch.Tensor, **kwargs: Any) -> Any:
        handed["all_gather"] += output.nbytes - buffer.nbytes
        return gather(output, buffer, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "P2POp", spy_point_to_point)
        patch.setattr(HostLine, "send", spy_send)
        patch.setattr(dist, "all_to_all_single", spy_all_to_all)
        patch.setattr(EXCHANGE, "_gather_equal", spy_gather)
        yield handed


def check_bytes(case: Case) -> tuple[int, int]:
    """Counted, passed and planned bytes of both directions, and the messages posted."""
    mesh = opened(case.source.mesh)
    plan = case.plan(mesh.rank)
    local = case.local(mesh.rank).requires_grad_()
    with mesh.traffic.watch() as forward, spying() as handed:
        fetched = exchange(local, plan, mesh)
    assert handed.total() == forward.bytes_total == plan.forward.elements_sent * local.element_size()
    assert set(+forward.bytes_sent) <= {plan.carrier}
    assert +handed == +forward.bytes_sent
    with mesh.traffic.watch() as backward, spying() as handed:
        fetched.backward(framed(plan, case.cotangent(mesh.rank)))
    assert handed.total() == backward.bytes_total == plan.adjoint.elements_sent * local.element_size()
    assert +handed == +backward.bytes_sent
    return forward.calls.total(), backward.calls.total()


@on_grids
@draws(10)
@given(data=st.data())
def test_counted_bytes_are_those_of_the_plan_and_of_the_buffers(mesh: Mesh, data: st.DataObject, pools: Pools) -> None:
    pools[mesh.size].run(check_bytes, data.draw(cases(mesh)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_bytes_of_an_all_gather(dtype: torch.dtype, pools: Pools) -> None:
    mesh = Mesh(width=4)
    gather = Case(Layout.of(mesh, (3, 8), {1: "width"}), Layout.of(mesh, (3, 8)), (Same(), Same()), dtype)
    assert gather.plan(0).forward.elements_sent == 3 * 6
    assert pools[4].run(check_bytes, gather) == [(1, 0)] * 4


def reduced_bytes(elements: int) -> tuple[int, int]:
    mesh = opened(Mesh(data=2, width=3))
    weight, bias = torch.ones(elements, requires_grad=True), torch.ones(2, requires_grad=True)
    with mesh.traffic.watch() as forward:
        copied = copy_over(mesh, ("width",), weight, bias)
        total = sum_over(torch.stack([c.sum() for c in copied if c is not None]), mesh, ("data", "width"))
    with mesh.traffic.watch() as backward:
        total.sum().backward()
    assert forward.calls == backward.calls == {"all_reduce": 1}
    return forward.bytes_total, backward.bytes_total


def test_bytes_of_sums_are_those_of_a_ring(pools: Pools) -> None:
    assert pools[6].run(reduced_bytes, 7) == [(2 * 5 * 2 * 4 // 6, 2 * 2 * 9 * 4 // 3)] * 6


def test_the_ring_formula() -> None:
    assert all_reduce_bytes(100, 4, 1) == 0
    assert all_reduce_bytes(100, 4, 2) == 400
    assert all_reduce_bytes(100, 4, 4) == 600


def test_watching_leaves_out_what_was_sent_before_and_after() -> None:
    traffic = Traffic()
    traffic.record("neighbour", 8)
    with traffic.watch() as seen:
        traffic.record("neighbour", 3)
        traffic.record("all_reduce", 5)
    traffic.record("neighbour", 9)
    assert seen.bytes_sent == {"neighbour": 3, "all_reduce": 5}
    assert seen.calls == {"neighbour": 1, "all_reduce": 1}
    assert (seen.bytes_total, traffic.bytes_total, traffic.calls["neighbour"]) == (8, 25, 3)
