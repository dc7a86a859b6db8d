"""Every carrier between ranks that share a GPU: values arrive exactly, and sums of gradients go back."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from convmesh import Mesh
from convmesh.dist import all_reduce, copy_over, exchange, sum_over
from convmesh.layout import Layout
from convmesh.layout.maps import Same
from convmesh.testing import opened
from tests.dist.test_exchange import HALO, Case, framed, halo, pick
from tests.gpu.conftest import Ranks

pytestmark = [
    pytest.mark.gpu,
    # Asking torch would start CUDA here, and forked ranks could not start it again.
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA GPU on this machine"),
]

SHAPE = (4, 4, 8, 12)
ROWS, GRID = Mesh(height=2), Mesh(height=2, width=2)
CUT_ROWS, CUT_GRID = {2: "height"}, {2: "height", 3: "width"}


def moved(mesh: Mesh, before: dict[int, Any], after: dict[int, Any]) -> Case:
    return Case(Layout.of(mesh, SHAPE, before), Layout.of(mesh, SHAPE, after), (Same(),) * 4)


CASES = {
    2: [halo(ROWS, SHAPE, HALO, (2,)), moved(ROWS, CUT_ROWS, {1: "height"}), moved(ROWS, CUT_ROWS, {})],
    4: [
        halo(GRID, SHAPE, HALO, (2, 3)),
        moved(GRID, CUT_GRID, {0: "height", 1: "width"}),
        moved(GRID, CUT_GRID, {2: "height"}),
        moved(GRID, {2: ("height", "width")}, {}),
    ],
}
"""Halos, other layouts, and whole tensors on every rank."""


def exchanged(case: Case) -> tuple[set[str], float]:
    """The carriers of an exchange there and back, and the largest error of values and gradients."""
    mesh = opened(case.source.mesh, "cuda")
    plan, local = case.plan(mesh.rank), case.local(mesh.rank).cuda().requires_grad_()
    with mesh.traffic.watch() as traffic:
        fetched = exchange(local, plan, mesh)
        fetched.backward(framed(plan, case.cotangent(mesh.rank)).cuda())
    values = pick(fetched.detach().cpu(), plan.needed.within(plan.frame))
    assert local.grad is not None
    errors = [values - case.wanted(mesh.rank), local.grad.cpu() - case.gradient(mesh.rank)]
    return {*traffic.calls}, max(float(error.abs().max()) for error in errors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", CASES)
def test_exchanges_are_exact_by_every_carrier(count: int, dtype: torch.dtype, ranks: Ranks) -> None:
    seen: set[str] = set()
    for case in CASES[count]:
        for carrier in (None, "neighbour", "all_to_all"):
            chosen = replace(case, carrier=carrier, dtype=dtype)
            for carriers, error in ranks(count).run(exchanged, chosen):
                assert error == 0, (case, carrier)
                seen |= carriers
    gathers = {"all_gather"} if count > 2 else set()  # two ranks send each other messages instead
    assert seen == {"neighbour", "all_to_all"} | gathers


def summed(mesh: Mesh, axes: tuple[str, ...]) -> list[float]:
    """A sum, its gradient, and that of copies that work differently on every rank."""
    held = opened(mesh, "cuda")
    x = torch.full((3,), float(held.rank + 1), device="cuda", dtype=torch.float64, requires_grad=True)
    (sum_over(x, held, axes) * 3).sum().backward()
    w = torch.full((2,), 5.0, device="cuda", requires_grad=True)
    (copied,) = copy_over(held, axes, w)
    assert copied is not None
    (copied * (held.rank + 1)).sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    return [float(t[0]) for t in (all_reduce(x.detach(), held, axes), x.grad, w.grad)]


@pytest.mark.parametrize("mesh", [Mesh(width=2), Mesh(height=2, width=2)], ids=str)
def test_sums_and_copies(mesh: Mesh, ranks: Ranks) -> None:
    for axes in (("width",), tuple(mesh.axes)):
        for rank, found in enumerate(ranks(mesh.size).run(summed, mesh, axes)):
            total = float(sum(member + 1 for member in mesh.group(axes, rank)))
            assert found == [total, 3.0, total]
