"""The layout that a layer's split asks of its input."""

from __future__ import annotations

from functools import lru_cache

from convmesh.layout import Layout
from convmesh.layout.layout import LAYOUTS_KEPT
from convmesh.ops.core.sharded import Sharded
from convmesh.plans import Split


@lru_cache(maxsize=LAYOUTS_KEPT)
def arranged_layout(given: Layout, split: Split, cuts_channels: bool) -> Layout:
    """`given` with samples and space cut as `split` says. Channels stay as they come, unless their axes are needed
    elsewhere, or the layer cuts its weight by other ones. Dims that are cut by the axes that cut the weight stay too:
    the layer gathers them itself, so that backward need not sum what it then throws away."""
    wanted = split.cut(len(given.cuts))
    target = Layout.of(given.mesh, given.shape, wanted)
    own = {*split.channel} if cuts_channels else set()
    kept = {
        dim: cut
        for dim, cut in enumerate(given.cuts)
        if dim != 1 and (cut.axes == wanted.get(dim, ()) or (cut.axes and {*cut.axes} <= own and dim not in wanted))
    }
    if len(given.cuts) > 1 and _keeps_channels(given, split, cuts_channels, target.axes):
        kept[1] = given.cuts[1]
    target = target.replacing(kept)
    return given if target == given else target


def _keeps_channels(given: Layout, split: Split, cuts_channels: bool, elsewhere: tuple[str, ...]) -> bool:
    axes = {*given.cuts[1].axes}
    if axes & {*elsewhere}:
        return False
    return not cuts_channels or not split.channel or axes == {*split.channel}


def arrange(x: Sharded, split: Split, cuts_channels: bool) -> Sharded:
    """`x` in the layout that the layer's split asks for."""
    return x.redistribute(arranged_layout(x.layout, split, cuts_channels))
