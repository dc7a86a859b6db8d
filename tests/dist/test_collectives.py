"""Sums over ranks and copies to ranks, which are each other's adjoint."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from convmesh.dist import Reduction, all_reduce, copy_over, sum_over
from convmesh.errors import MeshError
from convmesh.layout import Mesh
from convmesh.testing import opened
from tests.conftest import Pools
from tests.ops.grids import on_grids

CUBE = Mesh(depth=2, height=2, width=2)


def sums(mesh: Mesh, axes: tuple[str, ...], dtype: torch.dtype) -> torch.Tensor:
    opened_mesh = opened(mesh)
    return all_reduce(torch.full((2, 3), float(opened_mesh.rank + 1), dtype=dtype), opened_mesh, axes)


@on_grids
@given(data=st.data())
def test_sums_over_any_axes(mesh: Mesh, data: st.DataObject, pools: Pools) -> None:
    axes = tuple(name for name in mesh.axes if data.draw(st.booleans()))
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64]))
    for rank, result in enumerate(pools[mesh.size].run(sums, mesh, axes, dtype)):
        expected = float(sum(member + 1 for member in mesh.group(axes, rank)))
        torch.testing.assert_close(result, torch.full((2, 3), expected, dtype=dtype), rtol=0, atol=0)


def largest() -> float:
    mesh = opened(Mesh(width=3))
    return float(all_reduce(torch.tensor([float(-mesh.rank)]), mesh, ("width",), dist.ReduceOp.MAX).item())


def test_other_reductions(pools: Pools) -> None:
    assert pools[3].run(largest) == [0.0] * 3


def packed() -> tuple[list[float], list[int]]:
    """Several tensors summed in one message keep their shapes; the inputs stay unchanged."""
    mesh = opened(Mesh(width=2))
    tensors = [torch.full((2, 2), 1.0), torch.tensor(2.0), torch.zeros(0, 3), torch.full((3,), 4.0).expand(2, 3)]
    with mesh.traffic.watch() as traffic:
        sums = Reduction(tensors, mesh, ("width",)).wait()
    assert traffic.calls == {"all_reduce": 1}
    assert [t.shape for t in sums] == [t.shape for t in tensors]
    assert [t.sum().item() for t in tensors] == [4.0, 2.0, 0.0, 24.0]
    return [float(t.sum()) for t in sums], [t.dim() for t in sums]


def test_reductions_pack_tensors(pools: Pools) -> None:
    assert pools[2].run(packed) == [([8.0, 4.0, 0.0, 48.0], [2, 0, 2, 2])] * 2


def sum_and_gradient(axes: tuple[str, ...]) -> tuple[float, float]:
    mesh = opened(CUBE)
    x = torch.tensor([float(mesh.rank)], requires_grad=True)
    total = sum_over(x, mesh, axes)
    (total * 3).sum().backward()  # equal on all ranks that hold the total
    assert x.grad is not None
    return total.item(), x.grad.item()


def copy_and_gradient(axes: tuple[str, ...]) -> tuple[float, float]:
    mesh = opened(CUBE)
    w = torch.tensor([5.0], requires_grad=True)
    (copied,) = copy_over(mesh, axes, w)
    assert copied is not None
    (copied * mesh.rank).sum().backward()  # different work on every rank
    assert w.grad is not None
    return copied.item(), w.grad.item()


@pytest.mark.parametrize("axes", [(), ("height",), ("depth", "width"), ("depth", "height", "width")], ids="*".join)
def test_a_sum_passes_gradients_on_and_a_copy_sums_them(axes: tuple[str, ...], pools: Pools) -> None:
    totals = [float(sum(CUBE.group(axes, rank))) for rank in range(8)]
    assert pools[8].run(sum_and_gradient, axes) == [(total, 3.0) for total in totals]
    assert pools[8].run(copy_and_gradient, axes) == [(5.0, total) for total in totals]


def inner_products(axes: tuple[str, ...]) -> tuple[float, float]:
    """⟨sum x, y⟩ and ⟨x, copy y⟩; values equal on a group count once."""
    mesh = opened(CUBE)
    generator = torch.Generator().manual_seed(mesh.rank)
    x = torch.randn(4, generator=generator, dtype=torch.float64)
    group = mesh.mesh.group(axes, mesh.rank)
    y = torch.randn(4, generator=torch.Generator().manual_seed(100 + group[0]), dtype=torch.float64)
    leaf = y.clone().requires_grad_()
    (copied,) = copy_over(mesh, axes, leaf)
    assert copied is not None
    copied.backward(x)
    summed = sum_over(x, mesh, axes)
    torch.testing.assert_close(leaf.grad, summed, rtol=0, atol=0)  # the adjoint of the copy is the sum
    left = (summed * y).sum() / len(group)
    pair = all_reduce(torch.stack([left, (x * copied.detach()).sum()]), mesh, tuple(mesh.mesh.axes))
    return float(pair[0]), float(pair[1])


@pytest.mark.parametrize("axes", [("height",), ("depth", "width"), ("depth", "height", "width")], ids="*".join)
def test_sum_and_copy_are_each_others_adjoint(axes: tuple[str, ...], pools: Pools) -> None:
    for left, right in pools[8].run(inner_products, axes):
        assert abs(left - right) < 1e-13


def mixed(dtypes: list[torch.dtype]) -> list[float]:
    """Weights of several types, including an absent and a frozen one."""
    mesh = opened(Mesh(width=2))
    weights = [torch.ones(2, dtype=dtype, requires_grad=True) for dtype in dtypes]
    frozen = torch.ones(3)
    first, nothing, *rest, last = copy_over(mesh, ("width",), weights[0], None, *weights[1:], frozen)
    assert nothing is None
    assert last is frozen
    torch.stack([copy.double().sum() for copy in (first, *rest) if copy is not None]).sum().backward()
    return [float(weight.grad.sum()) for weight in weights if weight.grad is not None]


def test_weights_of_several_types_each_get_their_sum(pools: Pools) -> None:
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float32]
    assert pools[2].run(mixed, dtypes) == [[4.0] * 4] * 2


def reduction_order(dtypes: Sequence[torch.dtype]) -> list[torch.dtype]:
    """The types of the sums in the order of backward, over ranks whose sums the backend carries."""
    mesh = opened(Mesh(width=3))
    dtypes_summed: list[torch.dtype] = []
    real = dist.all_reduce

    def spy(buffer: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        dtypes_summed.append(buffer.dtype)
        return real(buffer, *args, **kwargs)

    copies = copy_over(mesh, ("width",), *(torch.ones(2, dtype=d, requires_grad=True) for d in dtypes))
    total = torch.stack([copy.double().sum() for copy in copies if copy is not None]).sum()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", spy)
        total.backward()
    return dtypes_summed


def test_only_the_call_decides_the_order_in_which_gradients_are_summed(pools: Pools) -> None:
    """Processes hash types differently, so the order of a set would pair a float32 sum with a float64 sum."""
    for dtypes in itertools.permutations([torch.float64, torch.float32, torch.bfloat16]):
        assert pools[3].run(reduction_order, dtypes) == [list(dtypes[::-1])] * 3


def unused_copy() -> float:
    """A rank may use a copy that another rank does not: the sum runs on both."""
    mesh = opened(Mesh(width=2))
    used, idle = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    a, b = copy_over(mesh, ("width",), used, idle)
    assert a is not None
    assert b is not None
    (a.sum() if mesh.rank == 0 else a.sum() + b.sum()).backward()
    assert idle.grad is not None
    return float(idle.grad.sum())


def test_a_copy_that_only_some_ranks_use(pools: Pools) -> None:
    assert pools[2].run(unused_copy) == [2.0, 2.0]


def test_nothing_is_sent_along_axes_of_one_rank(pools: Pools) -> None:
    assert pools[1].run(single) == [True]


def single() -> bool:
    mesh = opened(Mesh())
    x = torch.ones(2, requires_grad=True)
    return sum_over(x, mesh, ("data", "width")) is x and copy_over(mesh, ("data",), x, None) == (x, None)


def misspelt() -> str:
    with pytest.raises(MeshError) as raised:
        sum_over(torch.ones(1), opened(Mesh(width=2)), ("witdh",))
    return str(raised.value)


def test_a_misspelt_axis_is_not_an_axis_of_size_one(pools: Pools) -> None:
    assert all(message.startswith("`witdh` is not a mesh axis") for message in pools[2].run(misspelt))
