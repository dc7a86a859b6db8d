"""The input of several dense layers that cut their filters over the same axes: brought to the ranks only once.

Each rank gets its own copy, so backward adds up what the rank's layers contribute before anything is sent.
"""

from __future__ import annotations

from functools import lru_cache

from convmesh.dist import copy_over
from convmesh.dist.exchange import exchange
from convmesh.layout import Cut, Layout, Partition
from convmesh.layout.channels import ChannelPlans, ChannelSplit, channel_layouts
from convmesh.layout.exchange_plan import plan_exchange
from convmesh.layout.layout import LAYOUTS_KEPT, CopiedLayout
from convmesh.layout.maps import Same
from convmesh.ops.core.sharded import Sharded

Axes = tuple[str, ...]


@lru_cache(maxsize=LAYOUTS_KEPT)
def copied_layout(source: Layout, axes: Axes) -> CopiedLayout:
    """The layout of one copy per rank along `axes`, with all features and with no token dim cut by these axes."""
    last, copies = len(source.cuts) - 1, source.mesh.extent(axes)
    gathered = [dim for dim, cut in enumerate(source.cuts) if dim == last or {*cut.axes} & {*axes}]
    return CopiedLayout(source.mesh, (*source.with_whole(gathered).cuts, Cut(axes, Partition.even(copies, copies))))


def copied_input(x: Sharded, axes: Axes) -> Sharded:
    """A copy of the input for each rank along `axes`; backward sums the gradients of the copies."""
    if x.layout.copies:
        return x
    plans = _plans(x.layout, axes, x.mesh.rank)
    (copy,) = copy_over(x.mesh, plans.input_sums, exchange(x.local, plans.inputs, x.mesh))
    assert copy is not None
    return Sharded(copy.unsqueeze(-1), copied_layout(x.layout, axes), x.mesh)


@lru_cache(maxsize=LAYOUTS_KEPT)
def _plans(source: Layout, axes: Axes, rank: int) -> ChannelPlans:
    """The transfers of a layer with one filter per rank: what it needs of its input does not depend on their number."""
    last = len(source.cuts) - 1
    split = ChannelSplit(gathered=axes)
    layouts = channel_layouts(source, (Same(),) * (last + 1), source.mesh.extent(axes), split, dim=last)
    inputs = plan_exchange(source, layouts.input_needs, rank)
    outputs = plan_exchange(layouts.output, layouts.output_parts, rank)
    return ChannelPlans(layouts.output, inputs, outputs, layouts.input_sums)
