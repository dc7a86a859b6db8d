"""cat and stack, split, chunk, tensor_split and unbind."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from convmesh import Mesh, shard
from convmesh.testing import RankPool, SplitCase, natural_cut, opened
from convmesh.testing.strategies import batch_sizes, extents, spatial_dims
from tests.draws import draws
from tests.ops.grids import on_grids

Check = Callable[[SplitCase], None]


def joined(*tensors: Any, name: str, dim: int) -> Any:
    return getattr(torch, name)(tensors, dim)


def called(x: Any, name: str, method: bool, args: tuple[Any, ...]) -> Any:
    return getattr(x, name)(*args) if method else getattr(torch, name)(x, *args)


def draw_shape(data: st.DataObject, mesh: Mesh) -> tuple[int, ...]:
    return (data.draw(batch_sizes(mesh)), 3, *data.draw(extents(data.draw(spatial_dims(mesh)))))


def other_cut(data: st.DataObject, mesh: Mesh, dims: int) -> dict[int, str | tuple[str, ...]]:
    """Each axis cuts a random dim, or none."""
    places = data.draw(st.permutations(range(dims)))
    wanted = {dim: name for dim, name in zip(places, mesh.axes, strict=False) if data.draw(st.booleans())}
    return dict(wanted)


@on_grids
@given(data=st.data())
@draws(15)
@pytest.mark.operator("cat", "any dim, cut or not; operands in any layouts; plain tensors")
def test_cat(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = draw_shape(data, mesh)
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    along = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=4))
    shapes = tuple(tuple(n if d == dim % len(shape) else m for d, m in enumerate(shape)) for n in along)
    cuts: list[Any] = [natural_cut(mesh, len(shape)) for _ in shapes]
    if data.draw(st.booleans()):
        cuts = [other_cut(data, mesh, len(shape)) for _ in shapes]
    name = data.draw(st.sampled_from(["cat", "concat", "concatenate"]))
    plain = (shape,) if data.draw(st.booleans()) else ()
    check(SplitCase(partial(joined, name=name, dim=dim), mesh, shapes, plain, cuts=tuple(cuts)))


@on_grids
@given(data=st.data())
@pytest.mark.operator("stack", "any place; operands in any layouts; plain tensors")
def test_stack(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = draw_shape(data, mesh)
    dim = data.draw(st.integers(-len(shape) - 1, len(shape)))
    cuts = (natural_cut(mesh, len(shape)), other_cut(data, mesh, len(shape)))
    plain = (shape,) if data.draw(st.booleans()) else ()
    check(SplitCase(partial(joined, name="stack", dim=dim), mesh, (shape, shape), plain, cuts=cuts))


@on_grids
@given(data=st.data())
@draws(12)
@pytest.mark.operator("split, chunk, tensor_split, unbind", "any dim, cut or not; sizes or numbers of pieces")
def test_split(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = draw_shape(data, mesh)
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    extent = shape[dim]
    ends = sorted(data.draw(st.lists(st.integers(0, extent), max_size=3)))
    sizes = [b - a for a, b in zip([0, *ends], [*ends, extent], strict=True)]
    pieces = data.draw(st.integers(1, 5))
    name, first = data.draw(
        st.sampled_from([("split", pieces), ("split", sizes), ("split_with_sizes", sizes), ("chunk", pieces),
                         ("tensor_split", pieces), ("tensor_split", tuple(ends)), ("unbind", None)])
    )  # fmt: skip
    args = (dim,) if first is None else (first, dim)
    check(SplitCase(partial(called, name=name, method=data.draw(st.booleans()), args=args), mesh, (shape,)))


def overlapping(x: Any) -> Any:
    return x.tensor_split((3, 1), dim=2)


def test_pieces_may_overlap(check: Check) -> None:
    check(SplitCase(overlapping, Mesh(height=2), ((1, 1, 5, 2),)))


def promotes_and_skips_empty_operands() -> None:
    mesh = opened(Mesh(height=2))
    x: Any = shard(torch.ones(1, 1, 3, 2), mesh, {2: "height"})
    joined_types: Any = torch.cat([x, x.double()], 2)
    assert joined_types.dtype == torch.float64
    after_nothing: Any = torch.cat([torch.empty(0), x])
    assert after_nothing.shape == x.shape
    assert after_nothing.layout == x.layout


def test_types_are_promoted_and_empty_operands_skipped(pools: dict[int, RankPool]) -> None:
    pools[2].run(promotes_and_skips_empty_operands)


def refused() -> None:
    mesh = opened(Mesh(height=2))
    x: Any = shard(torch.ones(1, 1, 3, 2), mesh, {2: "height"})
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat([x, x[..., :1]], 2)
    with pytest.raises(RuntimeError, match="split"):
        x.split([1, 1], 2)


def test_torch_refuses_by_the_global_shape(pools: dict[int, RankPool]) -> None:
    pools[2].run(refused)
