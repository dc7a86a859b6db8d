"""Corners of torch's own functions: where a value meets a kink, options come without names, or shapes broadcast."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from convmesh import Mesh, shard
from convmesh.testing import SplitCase, opened
from tests.conftest import Pools

Check = Callable[[SplitCase], None]

on_two_ranks = pytest.mark.parametrize("mesh", [Mesh(data=2), Mesh(height=2)], ids=str)


def prelu_of_zeros(x: Any, slope: Any) -> Any:
    return F.prelu(x - x.detach(), slope)


@on_two_ranks
@pytest.mark.parametrize("slopes", [1, 3])
def test_the_gradient_of_prelu_at_zero_is_the_slope(mesh: Mesh, slopes: int, check: Check) -> None:
    check(SplitCase(prelu_of_zeros, mesh, ((4, 3, 4),), ((slopes,),), cuts=(cut_of(mesh),)))


def softmax_in_float64(x: Any, name: str) -> Any:
    forms: dict[str, Callable[..., Any]] = {
        "torch.softmax": torch.softmax,
        "torch.log_softmax": torch.log_softmax,
        "Tensor.softmax": lambda x, *rest: x.softmax(*rest),
        "Tensor.log_softmax": lambda x, *rest: x.log_softmax(*rest),
    }
    return forms[name](x, 1, torch.float64)


@on_two_ranks
@pytest.mark.parametrize("name", ["torch.softmax", "torch.log_softmax", "Tensor.softmax", "Tensor.log_softmax"])
def test_a_type_without_its_name_is_not_ignored(mesh: Mesh, name: str, check: Check) -> None:
    fn = partial(softmax_in_float64, name=name)
    check(SplitCase(fn, mesh, ((4, 3, 4),), dtype=torch.float32, cuts=(cut_of(mesh),)))


def spread_and_mean(x: Any, name: str, rest: tuple[Any, ...]) -> Any:
    return getattr(torch, name)(x, *rest)


@on_two_ranks
@pytest.mark.parametrize("name", ["var_mean", "std_mean"])
@pytest.mark.parametrize("rest", [(False,), (True,), (1, False), ((0, 2), True, True)], ids=str)
def test_options_of_spreads_come_without_names(mesh: Mesh, name: str, rest: tuple[Any, ...], check: Check) -> None:
    check(SplitCase(partial(spread_and_mean, name=name, rest=rest), mesh, ((4, 3, 4),), cuts=(cut_of(mesh),)))


def cosines(x: Any, y: Any, dim: int) -> Any:
    # A vector that repeats one value has no gradient of its own to compare.
    return F.cosine_similarity(x, y, dim) + x.sum(dim, keepdim=True).mean() + y.mean()


@on_two_ranks
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_vectors_that_broadcast_are_compared(mesh: Mesh, dim: int, check: Check) -> None:
    cuts = ({2: "height"}, {2: "height"}) if "height" in mesh.axes else ({0: "data"}, {})
    check(SplitCase(partial(cosines, dim=dim), mesh, ((4, 1, 4), (1, 3, 4)), cuts=cuts))


def taken(x: Any, shape: tuple[int, ...], dim: int | None, named: bool) -> Any:
    indices = torch.arange(torch.Size(shape).numel()).reshape(shape) % 4
    return torch.take_along_dim(x, indices=indices, dim=dim) if named else torch.take_along_dim(x, indices, dim)


@on_two_ranks
@pytest.mark.parametrize(
    ("shape", "dim"), [((1, 3, 4), 1), ((4, 2, 1), -2), ((1, 1, 3), 2), ((5, 6, 4), 1), ((7,), None), ((2, 3), None)]
)
def test_indices_along_a_dim_broadcast(mesh: Mesh, shape: tuple[int, ...], dim: int | None, check: Check) -> None:
    extents = (1 if shape[:1] == (5,) else 4, 4, 4)
    cuts = (cut_of(mesh) if extents[0] > 1 else {2: "height" if "height" in mesh.axes else "data"},)
    for named in (False, True):
        check(SplitCase(partial(taken, shape=shape, dim=dim, named=named), mesh, (extents,), cuts=cuts))


def cut_of(mesh: Mesh) -> dict[int, str]:
    return {0: "data"} if "data" in mesh.axes else {2: "height"}


def largest_drawn(dtype: torch.dtype) -> float:
    x: Any = shard(torch.empty(2, 1 << 16, dtype=dtype), opened(Mesh(data=2)), {0: "data"})
    drawn: list[Any] = [torch.rand_like(x), x.clone().uniform_()]
    assert all(numbers.dtype == dtype and numbers.local.min() >= 0 for numbers in drawn)
    return max(float(numbers.local.max()) for numbers in drawn)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_uniform_numbers_are_below_one_in_short_types(dtype: torch.dtype, pools: Pools) -> None:
    assert 0.99 < max(pools[2].run(largest_drawn, dtype)) < 1
