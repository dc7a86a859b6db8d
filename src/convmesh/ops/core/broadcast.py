"""Lining up operands that broadcast: each rank gets the parts that its box of the result needs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from convmesh.layout import Cut, Layout
from convmesh.layout.layout import LAYOUTS_KEPT
from convmesh.layout.maps import Same, Spread
from convmesh.ops.core.exchange_plans import Maps
from convmesh.ops.core.fetch import fetch
from convmesh.ops.core.sharded import Sharded, on_mesh


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
    """The part of an operand that broadcasts onto this rank's box of the result."""
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
