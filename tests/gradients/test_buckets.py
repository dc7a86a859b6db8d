"""Buckets: when they leave, what they hold and send, and what they refuse."""

from typing import Any

import pytest
import torch
from torch import nn

from convmesh import LayoutError, Mesh, OpenMesh, UnsupportedError
from convmesh.dist import Traffic, dry_mesh
from convmesh.dist.traffic import all_reduce_bytes
from convmesh.gradients.buckets import plan_buckets
from convmesh.gradients.reduction import GradientReducer
from convmesh.testing import RankPool, opened
from tests.gradients.partial_nets import MESHES, Towers, batches

Pools = dict[int, RankPool]
SMALL: dict[str, Any] = {"bytes_bucket": 200, "bytes_first": 50}


def started_when_the_first_layer_comes() -> tuple[list[bool], list[bool]]:
    """Which buckets are under way when backward reaches the first of three layers, and after it."""
    net = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    reducer = GradientReducer(opened(Mesh(data=2)), [(p, ("data",)) for p in net.parameters()], 1, 1)
    seen: list[bool] = []
    hidden = net[0](torch.ones(2, 4))
    hidden.register_hook(lambda _: seen.extend(b.is_started for b in reducer.buckets))
    net[1:](hidden).sum().backward()
    return seen, [b.is_started for b in reducer.buckets]


def test_buckets_leave_while_backward_goes_on(pools: Pools) -> None:
    assert pools[2].run(started_when_the_first_layer_comes) == [([True, True, False], [False] * 3)] * 2


def ways_of_updating() -> list[Any]:
    """`foreach` of a group of plain and cut weights, of a plain group, and of one where the user chose."""
    net = Towers(opened(MESHES[2]))
    net.reducer = GradientReducer(opened(MESHES[2]), net.axes_of())
    chosen = {"params": [*net.unused.parameters()], "foreach": False}
    groups: list[dict[str, Any]] = [
        {"params": [net.cut, *net.fine.parameters()]}, {"params": list(net.coarse.parameters())}, chosen,
    ]  # fmt: skip
    optimizer = torch.optim.AdamW(groups)
    optimizer.step()
    return [group["foreach"] for group in optimizer.param_groups]


def test_groups_of_plain_and_cut_weights_are_updated_one_by_one(pools: Pools) -> None:
    assert pools[4].run(ways_of_updating) == [[False, None, False]] * 4


def used_on_one_rank_only() -> list[bool]:
    """Does a parameter that one rank used have a gradient, and one that none used?"""
    mesh = opened(Mesh(data=2))
    used, unused = (nn.Parameter(torch.ones(3)) for _ in range(2))
    other = nn.Parameter(torch.ones(3))
    reducer = GradientReducer(mesh, [(p, ("data",)) for p in (used, unused, other)])
    loss = other.sum() + (0 * used.sum() if mesh.rank == 1 else 0)
    loss.backward()
    reducer.close()
    return [p.grad is not None for p in (used, unused, other)]


def test_a_gradient_is_on_all_ranks_or_on_none(pools: Pools) -> None:
    assert pools[2].run(used_on_one_rank_only) == [[True, False, True]] * 2


def in_another_type(dtype_reduce: torch.dtype | None) -> tuple[torch.dtype, int]:
    """The gradient's type, and how many of its values are not the exact sum, rounded once."""
    mesh = opened(Mesh(data=4))
    parts = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    reducer = GradientReducer(mesh, [(weight, ("data",))], dtype_reduce=dtype_reduce)
    (weight * parts[mesh.rank]).sum().backward()
    reducer.close()
    assert weight.grad is not None
    return weight.grad.dtype, int((weight.grad != parts.double().sum(0).bfloat16()).sum())


def test_sums_may_be_taken_in_float32(pools: Pools) -> None:
    assert pools[4].run(in_another_type, torch.float32) == [(torch.bfloat16, 0)] * 4
    assert all(wrong > 100 for _, wrong in pools[4].run(in_another_type, None))


def memory_of_gradients() -> tuple[set[int], set[int], bool]:
    net = Towers(opened(Mesh(data=2)))
    kernel = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    net.reducer = GradientReducer(opened(Mesh(data=2)), [*net.axes_of(), (kernel, ("data",))])
    found = []
    for x in batches()[:2]:
        (net(x) + kernel.square().sum()).backward()
        found.append({p.grad.untyped_storage().data_ptr() for p in net.parameters() if p.grad is not None})
        net.zero_grad()
    return found[0], found[1], kernel.grad is not None and kernel.grad.stride() == kernel.stride()


def test_gradients_live_in_the_buckets_from_step_to_step(pools: Pools) -> None:
    for first, second, keeps_format in pools[2].run(memory_of_gradients):
        assert first == second
        assert len(first) == 2  # one bucket for each set of axes
        assert keeps_format


def step_traffic(mesh: OpenMesh) -> tuple[Traffic, Traffic, int]:
    net = Towers(mesh if not mesh.is_dry else None).to(mesh.device)
    net.mesh = mesh
    reducer = GradientReducer(mesh, net.axes_of(), **SMALL)
    x = batches()[0].to(mesh.device)
    with reducer.no_sync(), mesh.traffic.watch() as apart:
        net(x).backward()
    with mesh.traffic.watch() as sent:
        net(x).backward()
    return apart, sent, sum(all_reduce_bytes(b.elements, 8, mesh.mesh.extent(b.axes)) for b in reducer.buckets)


def real_traffic(mesh: Mesh) -> tuple[Traffic, Traffic, int]:
    return step_traffic(opened(mesh))


def dry_traffic(mesh: Mesh) -> list[tuple[Traffic, Traffic, int]]:
    return [step_traffic(dry_mesh(mesh, rank)) for rank in range(mesh.size)]


@pytest.mark.parametrize("mesh", MESHES[:2], ids=str)
def test_traffic_is_counted_and_dry_traffic_equals_it(mesh: Mesh, pools: Pools) -> None:
    real = pools[mesh.size].run(real_traffic, mesh)
    assert pools[1].run(dry_traffic, mesh)[0] == real
    for apart, sent, expected in real:
        assert apart.bytes_total == 0
        assert sent.bytes_sent == {"all_reduce": expected}
        assert sent.calls["all_reduce"] > 4


def test_buckets_fill_from_the_last_parameter_and_leave_in_one_order() -> None:
    keys = ["a", "a", "b", "a", "b", "a"]
    assert plan_buckets(keys, [4, 4, 4, 4, 4, 4], 8, 4) == [[5], [4], [3, 1], [2], [0]]
    assert plan_buckets(keys, [4] * 6, 1000, 1000) == [[4, 2], [5, 3, 1, 0]]


def refusals() -> None:
    mesh = opened(Mesh(data=2))
    weight = nn.Parameter(torch.ones(2, 3))
    with pytest.raises(LayoutError, match=r"bytes_bucket.*=0"):
        GradientReducer(mesh, [(weight, ("data",))], bytes_bucket=0)
    with pytest.raises(LayoutError, match=r"twice, with \('data',\) and \(\)"):
        GradientReducer(mesh, [(weight, ("data",)), (weight, ())])
    table = nn.Embedding(4, 2, sparse=True)
    reducer = GradientReducer(mesh, [(p, ("data",)) for p in table.parameters()])
    with pytest.raises(UnsupportedError, match="sparse=False"):
        table(torch.tensor([1])).sum().backward()
    reducer.close()


def test_what_cannot_be_reduced_is_refused(pools: Pools) -> None:
    pools[2].run(refusals)


def refires_after_failure() -> float:
    """A backward that fails on all ranks is abandoned; the next one is complete."""
    mesh = opened(Mesh(data=2))
    late, early = (nn.Parameter(torch.ones(3)) for _ in range(2))
    reducer = GradientReducer(mesh, [(early, ("data",)), (late, ("data",))], bytes_first=1)
    broken = (early * 2).sum() * 1.0
    broken.register_hook(_fail)
    with pytest.raises(RuntimeError, match="broken"):
        (late.sum() + broken).backward()
    reducer.reset()
    ((early * late).sum() * (1 + mesh.rank)).backward()
    assert early.grad is not None
    return early.grad[0].item()


def _fail(grad: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("broken")


def test_a_failed_backward_can_be_abandoned(pools: Pools) -> None:
    assert pools[2].run(refires_after_failure) == [3.0, 3.0]


def written_by_hand() -> tuple[float, float]:
    """A schedule that writes weight gradients itself, twice, and lets them be summed at its end."""
    mesh = opened(Mesh(data=2))
    weight = nn.Parameter(torch.ones(3))
    reducer = GradientReducer(mesh, [(weight, ("data",))])
    found = []
    for _ in range(2):
        weight.grad = None
        with reducer.no_sync():
            (weight.grad,) = torch.autograd.grad((weight * (1 + mesh.rank)).sum(), weight)
            weight.grad += 1
        reducer.reduce_now()
        found.append(float(weight.grad[0]))
    return found[0], found[1]


def test_gradients_without_backward_are_summed_on_demand(pools: Pools) -> None:
    assert pools[2].run(written_by_hand) == [(5.0, 5.0)] * 2
