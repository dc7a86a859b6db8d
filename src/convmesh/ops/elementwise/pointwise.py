"""Operators that work on each index independently: nothing travels, except to line up two operands."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from convmesh.layout import Cut, Layout
from convmesh.layout.layout import LAYOUTS_KEPT
from convmesh.layout.maps import Same, Spread
from convmesh.ops.core.exchange_plans import Maps
from convmesh.ops.core.fetch import fetch
from convmesh.ops.core.registry import implements
from convmesh.ops.core.sharded import Sharded, on_mesh
from convmesh.private_torch.tensor_internals import is_view

_T = torch.Tensor

UNARY: tuple[Callable[..., Any], ...] = (
    F.relu, torch.relu, _T.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.celu, F.gelu, F.silu, F.mish, F.softplus,
    F.hardtanh, F.hardswish, F.hardsigmoid, F.hardshrink, F.softshrink, F.tanhshrink, F.softsign, F.logsigmoid,
    F.threshold, F.sigmoid, F.tanh, torch.sigmoid, _T.sigmoid, torch.tanh, _T.tanh, torch.exp, _T.exp, torch.log,
    _T.log, torch.log1p, _T.log1p, torch.sqrt, _T.sqrt, torch.rsqrt, _T.rsqrt, torch.abs, _T.abs, torch.neg, _T.neg,
    torch.sin, _T.sin, torch.cos, _T.cos, torch.erf, _T.erf, torch.square, _T.square, torch.reciprocal, _T.reciprocal,
    torch.sign, _T.sign, torch.floor, _T.floor, torch.ceil, _T.ceil, torch.round, _T.round, torch.clamp, _T.clamp,
    torch.clip, _T.clip, torch.clone, _T.clone, _T.contiguous, _T.float, _T.double, _T.half, _T.bfloat16, _T.long,
    _T.int, _T.bool, torch.zeros_like, torch.ones_like, torch.isnan, torch.isfinite,
    torch.logical_not,
)  # fmt: skip

BINARY: tuple[Callable[..., Any], ...] = (
    torch.add, _T.add, torch.sub, _T.sub, torch.mul, _T.mul, torch.div, _T.div, torch.pow, _T.pow, torch.maximum,
    torch.minimum, torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne, torch.logical_and, torch.logical_or,
    torch.atan2, torch.fmod,
)  # fmt: skip


def _register_unary(function: Callable[..., Any]) -> None:
    @implements(function)
    def split(x: Sharded, *args: Any, **kwargs: Any) -> Sharded:
        if kwargs.get("inplace"):
            # A shard may be a view returned by an exchange, which autograd does not allow to be overwritten.
            x.local = function(x.local, *args, **{**kwargs, "inplace": not is_view(x.local)})
            return x
        return x.like(function(x.local, *args, **kwargs))


def _register_binary(function: Callable[..., Any]) -> None:
    @implements(function)
    def split(a: Any, b: Any, **kwargs: Any) -> Sharded:
        operands, layout, mesh = line_up(a, b)
        return Sharded(function(*operands, **kwargs), layout, mesh)


for _function in UNARY:
    _register_unary(_function)
for _function in BINARY:
    _register_binary(_function)


@implements(torch.where)
def where(condition: Sharded, a: Any, b: Any) -> Sharded:
    """`torch.where` with all operands lined up."""
    operands, layout, mesh = line_up(condition, a, b)
    return Sharded(torch.where(*operands), layout, mesh)


@implements(F.prelu)
def prelu(x: Sharded, weight: torch.Tensor) -> Sharded:
    """PReLU as arithmetic, so that the weight's gradient is summed like any broadcast operand's."""
    slope = weight.view(-1, *([1] * (x.dim() - 2))) if weight.numel() > 1 else weight
    result: Sharded = torch.clamp(x, min=0) + slope * torch.clamp(x, max=0)  # type: ignore[call-overload]
    return result


def line_up(*operands: Any) -> tuple[list[Any], Layout, Any]:
    """Each operand's local part for a broadcast result, the result's layout, and the mesh. Numbers stay numbers."""
    first = next(o for o in operands if isinstance(o, Sharded))
    if all(isinstance(o, Sharded) and o.layout == first.layout for o in operands):  # the usual case: nothing to line up
        return [o.local for o in operands], first.layout, first.mesh
    tensors = [on_mesh(o, first.mesh) if isinstance(o, (Sharded, torch.Tensor)) else o for o in operands]
    layout = broadcast_layout(tuple(t.layout for t in tensors if isinstance(t, Sharded)))
    return [_local_part(t, layout) if isinstance(t, Sharded) else t for t in tensors], layout, first.mesh


@lru_cache(maxsize=LAYOUTS_KEPT)
def broadcast_layout(layouts: tuple[Layout, ...]) -> Layout:
    """The result's layout: each dim is cut as in the first operand that cuts it, else whole."""
    shape = torch.broadcast_shapes(*(layout.shape for layout in layouts))
    chosen: dict[int, Cut] = {}
    used: set[str] = set()
    for layout in layouts:
        offset = len(shape) - len(layout.cuts)
        for dim, cut in enumerate(layout.cuts):
            target = dim + offset
            if cut.axes and cut.partition.extent == shape[target] and target not in chosen and not used & {*cut.axes}:
                chosen[target] = cut
                used |= {*cut.axes}
    return Layout.of(layouts[0].mesh, shape).replacing(chosen)


def _local_part(x: Sharded, work: Layout) -> torch.Tensor:
    """The operand's indices that broadcast onto this rank's box of the result."""
    layout, maps = _spread_onto(x.layout, work)
    if lead := len(work.cuts) - x.dim():
        x = Sharded(x.local.reshape((1,) * lead + tuple(x.local.shape)), layout, x.mesh)
    return fetch(x, work, maps)


@lru_cache(maxsize=LAYOUTS_KEPT)
def _spread_onto(source: Layout, work: Layout) -> tuple[Layout, Maps]:
    """An operand's layout with leading dims of extent 1 added as needed, and how it spreads over `work`."""
    lead = Layout.of(source.mesh, (1,) * (len(work.cuts) - len(source.cuts)))
    layout = Layout(source.mesh, (*lead.cuts, *source.cuts))
    pairs = zip(layout.shape, work.shape, strict=True)
    return layout, tuple(Same() if n == out else Spread(out) for n, out in pairs)
