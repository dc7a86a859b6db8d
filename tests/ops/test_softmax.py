"""Softmax, log-softmax, softmin and log-sum-exp along cut and uncut dims."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from convmesh import Mesh, UnsupportedError, replicated
from convmesh.testing import SplitCase, opened
from convmesh.testing.strategies import batch_sizes, extents, layouts, spatial_dims
from tests.draws import draws
from tests.ops.grids import on_grids

Check = Callable[[SplitCase], None]

FORMS: dict[str, Callable[..., Any]] = {
    "F.softmax": F.softmax,
    "torch.softmax": torch.softmax,
    "Tensor.softmax": lambda x, dim, **options: x.softmax(dim, **options),
    "F.log_softmax": F.log_softmax,
    "torch.log_softmax": torch.log_softmax,
    "Tensor.log_softmax": lambda x, dim, **options: x.log_softmax(dim, **options),
    "F.softmin": F.softmin,
}
MODULES: dict[str, type[nn.Module]] = {
    "nn.Softmax": nn.Softmax,
    "nn.LogSoftmax": nn.LogSoftmax,
    "nn.Softmin": nn.Softmin,
}


TYPES = [(torch.float64, None), (torch.float32, None), (torch.float32, torch.float64), (torch.float32, torch.float32)]


def normalise(x: Any, form: str, dim: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Any:
    if form in MODULES:
        return MODULES[form](dim)(scale * x)
    return FORMS[form](scale * x, dim, dtype=dtype)


@on_grids
@draws(15)
@given(data=st.data())
@pytest.mark.operator(
    "softmax, log_softmax, softmin", "any dim, cut or not; functions, methods, modules; dtype; float32"
)
def test_softmax(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = (data.draw(batch_sizes(mesh)), 3, *data.draw(extents(data.draw(spatial_dims(mesh)))))
    form = data.draw(st.sampled_from([*FORMS, *MODULES]))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    dtype, wanted = data.draw(st.sampled_from(TYPES))
    # Exponentials of 1000 overflow unless the largest is subtracted; float32 has no digits left for such gradients.
    scale = data.draw(st.sampled_from([1.0, 1000.0] if dtype == torch.float64 else [1.0]))
    check(SplitCase(partial(normalise, form=form, dim=dim, scale=scale, dtype=wanted), mesh, (shape,), dtype=dtype))


@on_grids
@given(data=st.data())
def test_softmax_in_any_layout(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = (2, 3, *data.draw(extents(2)))
    fn = partial(normalise, form=data.draw(st.sampled_from([*FORMS])), dim=data.draw(st.integers(0, 3)))
    cuts = (data.draw(layouts(mesh, shape)),)
    check(SplitCase(fn, mesh, (shape,), cuts=cuts))  # type: ignore[arg-type]


def logsumexp(x: Any, dim: Any, keepdim: bool, method: bool) -> Any:
    return x.logsumexp(dim, keepdim) if method else torch.logsumexp(x, dim, keepdim=keepdim)


@on_grids
@draws(10)
@given(data=st.data())
@pytest.mark.operator("logsumexp", "any dims, cut or not; keepdim")
def test_logsumexp(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = (data.draw(batch_sizes(mesh)), 3, *data.draw(extents(data.draw(spatial_dims(mesh)))))
    dims = st.integers(-len(shape), -1)
    dim = data.draw(dims | st.lists(dims, min_size=1, unique=True).map(tuple))
    fn = partial(logsumexp, dim=dim, keepdim=data.draw(st.booleans()), method=data.draw(st.booleans()))
    check(SplitCase(fn, mesh, (shape,)))


def masked(x: Any, form: str, dim: int, value: float) -> Any:
    """Positive values replaced: whole shards, whole rows or single values."""
    blocked = torch.where(x > 0.3, value, x)
    return torch.logsumexp(blocked, dim) if form == "logsumexp" else FORMS[form](blocked, dim)


@on_grids
@given(data=st.data())
def test_infinities_and_nans(mesh: Mesh, data: st.DataObject, check: Check) -> None:
    shape = (data.draw(batch_sizes(mesh)), 3, *data.draw(extents(data.draw(spatial_dims(mesh)), largest=4)))
    form = data.draw(st.sampled_from(["F.softmax", "F.log_softmax", "logsumexp"]))
    dim, value = (
        data.draw(st.integers(0, len(shape) - 1)),
        data.draw(st.sampled_from([-torch.inf, torch.inf, torch.nan])),
    )
    check(SplitCase(partial(masked, form=form, dim=dim, value=value), mesh, (shape,)))


def bfloat16(x: Any) -> Any:
    return F.softmax(x, -1), F.log_softmax(x, -1), torch.logsumexp(x, -1)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(width=3), Mesh(height=2, width=2)], ids=str)
def test_half_precision(mesh: Mesh, check: Check) -> None:
    check(SplitCase(bfloat16, mesh, ((2, 3, 5, 7),), dtype=torch.bfloat16))


def refusal(mesh: Mesh) -> None:
    x: Any = replicated(torch.randn(2, 3), opened(mesh))
    with pytest.raises(UnsupportedError, match=r"`dim` \(=None\) must be given"):
        F.softmax(x)
    with pytest.raises(IndexError, match=r"`dim` \(=2\) must be from -2 to 1"):
        F.log_softmax(x, 2)


def test_refusals(pools: Any) -> None:
    pools[1].run(refusal, Mesh())
