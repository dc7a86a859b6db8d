"""Reductions over any dims, cut or not."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from convmesh import Mesh, UnsupportedError, replicated
from convmesh.testing import SplitCase, opened
from convmesh.testing.strategies import batch_sizes, extents, layouts, spatial_dims
from tests.draws import draws
from tests.ops.grids import on_grids

Check = Callable[[SplitCase], None]

MANY_DIMS = ("sum", "mean", "amax", "amin", "var", "std", "norm")
ONE_DIM = ("max", "min", "argmax", "argmin", "prod")


def shapes(mesh: Mesh, data: st.DataObject) -> tuple[int, ...]:
    return (data.draw(batch_sizes(mesh)), 3, *data.draw(extents(data.draw(spatial_dims(mesh)))))


def some_dims(shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
    """None, one dim, or several, from either end."""
    one = st.integers(-len(shape), len(shape) - 1)
    several = st.lists(one, min_size=1, unique_by=lambda d: d % len(shape)).map(tuple)
    return st.none() | one | several


def reduce(x: Any, name: str, method: bool, options: dict[str, Any]) -> Any:
    result = getattr(x, name)(**options) if method else getattr(torch, name)(x, **options)
    return tuple(result) if isinstance(result, tuple) else result


@on_grids
@draws(15)
@given(data=st.data())
@pytest.mark.operator("sum, mean, amax, amin, var, std, norm", "any dims, cut or not; keepdim; functions and methods")
def test_over_many_dims(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = shapes(mesh, data)
    name = data.draw(st.sampled_from(MANY_DIMS))
    options: dict[str, Any] = {"dim": data.draw(some_dims(shape)), "keepdim": data.draw(st.booleans())}
    if name in {"var", "std"}:
        options["correction"] = 0  # torch warns about a single value with the default
    if name == "norm":
        options["p"] = 2  # torch's default takes at most two dims
    if options["dim"] is None and name in {"amax", "amin"}:
        options["dim"] = ()
    dtype = data.draw(st.sampled_from([torch.float64, torch.float64, torch.float32]))
    fn = partial(reduce, name=name, method=data.draw(st.booleans()), options=options)
    check(SplitCase(fn, mesh, (shape,), dtype=dtype))


@on_grids
@draws(15)
@given(data=st.data())
@pytest.mark.operator("max, min, argmax, argmin, prod", "of everything or along a dim with global indices; keepdim")
def test_over_one_dim(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = shapes(mesh, data)
    name = data.draw(st.sampled_from(ONE_DIM))
    options: dict[str, Any] = {}
    if data.draw(st.booleans()):
        options = {"dim": data.draw(st.integers(-len(shape), len(shape) - 1)), "keepdim": data.draw(st.booleans())}
    fn = partial(reduce, name=name, method=data.draw(st.booleans()), options=options)
    check(SplitCase(fn, mesh, (shape,)))


@on_grids
@given(data=st.data())
@pytest.mark.operator("reductions", "any layout: uneven and empty parts, several axes on a dim, replicated axes")
def test_in_any_layout(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = (2, 3, *data.draw(extents(2)))
    name = data.draw(st.sampled_from(MANY_DIMS + ONE_DIM))
    options: dict[str, Any] = {"dim": data.draw(st.integers(0, 3))}
    if name in {"var", "std"}:
        options["correction"] = 0
    fn = partial(reduce, name=name, method=False, options=options)
    cuts = (data.draw(layouts(mesh, shape)),)
    check(SplitCase(fn, mesh, (shape,), cuts=cuts))  # type: ignore[arg-type]


def with_ties(x: Any, name: str, options: dict[str, Any]) -> Any:
    """Few different values, so that the largest occurs many times, on several ranks."""
    few = x - x.detach() + torch.round(x.detach())
    return reduce(few, name, False, options)


@on_grids
@draws(10)
@given(data=st.data())
@pytest.mark.operator("amax, max, argmax, …", "ties: shared gradients, first indices")
def test_ties(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = shapes(mesh, data)
    name = data.draw(st.sampled_from(["amax", "amin", "max", "min", "argmax", "argmin", "max of all", "argmax of all"]))
    options: dict[str, Any] = {} if name.endswith("all") else {"dim": data.draw(st.integers(0, len(shape) - 1))}
    check(SplitCase(partial(with_ties, name=name.split()[0], options=options), mesh, (shape,)))


def with_nans(x: Any, name: str, options: dict[str, Any]) -> Any:
    return reduce(torch.where(x.detach() > 1, torch.nan, x.detach()), name, False, options)


@on_grids
@given(data=st.data())
def test_nans(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = shapes(mesh, data)
    name = data.draw(st.sampled_from(["sum", "amax", "max", "min", "argmax", "argmin", "prod"]))
    options: dict[str, Any] = {"dim": data.draw(st.integers(0, len(shape) - 1))} if data.draw(st.booleans()) else {}
    check(SplitCase(partial(with_nans, name=name, options=options), mesh, (shape,)))


def of_integers(x: Any, name: str, options: dict[str, Any]) -> Any:
    return reduce(x, name, False, options)


@on_grids
@draws(10)
@given(data=st.data())
@pytest.mark.operator("any, all, count_nonzero", "any dims, cut or not; integer sums, products and extremes")
def test_of_integers(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = shapes(mesh, data)
    name = data.draw(st.sampled_from(["any", "all", "count_nonzero", "sum", "prod", "amax", "max", "argmin"]))
    options: dict[str, Any] = {"dim": data.draw(st.integers(0, len(shape) - 1))}
    if data.draw(st.booleans()) and name != "amax":
        options = {}
    fn = partial(of_integers, name=name, options=options)
    check(SplitCase(fn, mesh, (shape,), integer_inputs=frozenset([0]), classes=data.draw(st.integers(1, 4))))


def vector_norm(x: Any, order: float, options: dict[str, Any]) -> Any:
    return torch.linalg.vector_norm(x, order, **options)


@on_grids
@draws(10)
@given(data=st.data())
@pytest.mark.operator("torch.linalg.vector_norm, torch.norm", "p = 0, 1, 2, 3, inf, -inf, …; any dims, cut or not")
def test_vector_norm(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = shapes(mesh, data)
    options = {"dim": data.draw(some_dims(shape)), "keepdim": data.draw(st.booleans())}
    order = data.draw(st.sampled_from([0, 0.5, 1, 2, 3, torch.inf, -torch.inf]))
    check(SplitCase(partial(vector_norm, order=order, options=options), mesh, (shape,)))


def spreads(x: Any) -> Any:
    """Forms of variance, and a standard deviation of 0, whose gradient is 0."""
    flat = 0 * x + 3
    forms = [torch.var(x), x.var(False), x.var(1, True), x.std((0, 1), True, True), torch.std(x, (1, 2), correction=2)]
    return *forms, *torch.var_mean(x, (0, 1)), *torch.std_mean(x, 1, keepdim=True), flat.std(2, False)


def others(x: Any) -> Any:
    """Types, NumPy's names and binary forms."""
    forms = [x.sum(dtype=torch.float64), x.mean(axis=(1, 2), keepdims=True), torch.sum(input=x, dim=(), keepdim=True)]
    binary = [torch.max(x, x * x), x.min(other=x + 1), torch.max(x * 2, torch.ones(3, 1, 1, 1, dtype=x.dtype))]
    chained = [x.sum().max(), (x - x.mean((0, 2), keepdim=True)).norm(p="fro"), x.prod(1, dtype=torch.float64)]
    return *forms, *binary, *chained, x.sum().argmax(), x.sum().max(0).values, torch.norm(x, None, 1)


@on_grids
def test_forms(mesh: Mesh, check: Check) -> None:
    check(SplitCase(spreads, mesh, ((2, 3, 4, 5, 7),)))
    check(SplitCase(others, mesh, ((2, 3, 4, 5, 7),), dtype=torch.float32))


def half(x: Any) -> Any:
    return x.sum((0, 2)), x.mean(), x.var(), x.norm(), x.amax(-1)


@pytest.mark.parametrize("mesh", [Mesh(data=2), Mesh(width=3), Mesh(height=2, width=2)], ids=str)
def test_half_precision(mesh: Mesh, check: Check) -> None:
    check(SplitCase(half, mesh, ((2, 3, 5, 7),), dtype=torch.bfloat16))


def refusals(mesh: Mesh) -> None:
    x: Any = replicated(torch.ones(2, 3, dtype=torch.int64), opened(mesh))
    with pytest.raises(UnsupportedError, match=r"`mean` needs a floating type, not torch\.int64"):
        x.mean()
    with pytest.raises(UnsupportedError, match=r"`p` \(='nuc'\) must be a number or 'fro'"):
        torch.norm(x, "nuc")
    with pytest.raises(IndexError, match=r"`dim` \(=2\) must be from -2 to 1"):
        x.sum(2)
    with pytest.raises(RuntimeError, match=r"`dim` \(=\(0, -2\)\) names a dim more than once"):
        x.sum((0, -2))


def test_refusals(pools: Any) -> None:
    pools[1].run(refusals, Mesh())
