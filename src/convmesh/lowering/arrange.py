"""The layout that a layer's split asks of its input."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from torch import nn

from convmesh.graph import Graph, Node
from convmesh.layout import Cut, Layout
from convmesh.layout.layout import LAYOUTS_KEPT, fair_cut
from convmesh.lowering.channel_rules import CELLS, LAYERS, SEQUENCES
from convmesh.ops.channels.joint_input import copied_input, copied_layout
from convmesh.ops.core.sharded import Sharded
from convmesh.plans import Split, split_nodes

Role = Literal["follows", "cuts", "dense", "joint", "words", "sequence", "time_first"]
"""What a layer does with channels. "follows" takes them as they come. The others cut its weight along them: in dim 1
("cuts"), in the last dim ("dense"), in the last dim together with others that read the same tensor ("joint"), or in a
last dim that only its output has ("words"). "sequence" and "time_first" read time step by step, in dim 1 or dim 0."""


class Arranged(NamedTuple):
    """A change of layout: the split that asks for it, and the layer's role."""

    split: Split
    role: Role


def role_of(module: nn.Module | None) -> Role:
    if isinstance(module, nn.Embedding):
        return "words"
    if isinstance(module, nn.Linear):
        return "dense"
    if isinstance(module, SEQUENCES):
        return "sequence" if module.batch_first else "time_first"
    if isinstance(module, CELLS):
        return "dense"
    return "cuts" if isinstance(module, LAYERS) else "follows"


@lru_cache(maxsize=LAYOUTS_KEPT)
def arranged_layout(given: Layout, split: Split, role: Role) -> Layout:
    """`given` with samples and space cut as `split` says. Channels stay as they come, unless their axes are needed
    elsewhere or the layer cuts its weight by other axes. Dims cut by the axes that cut the weight stay cut too: the
    layer gathers them itself, so that backward need not sum what it would throw away."""
    if given.copies:
        return given
    if role == "joint":
        return copied_layout(_with_tokens(given, split, len(given.cuts)), split.channel)
    if role == "words":
        return _with_tokens(given, split, len(given.cuts) + 1)
    if role in ("sequence", "time_first"):
        return _over_time(given, split, 0 if role == "sequence" else 1)
    if role == "dense" and len(given.cuts) > 2:
        return _with_tokens(given, split, len(given.cuts))
    cuts_channels, wanted = role != "follows", split.cut(len(given.cuts))
    target = Layout.of(given.mesh, given.shape, wanted)
    own = {*split.channel} if cuts_channels else set()
    kept = {
        dim: cut
        for dim, cut in enumerate(given.cuts)
        if dim != 1 and (cut.axes == wanted.get(dim, ()) or (cut.axes and {*cut.axes} <= own and dim not in wanted))
    }
    if len(given.cuts) > 1 and _keeps_channels(given.cuts[1], split, cuts_channels, target.axes):
        kept[1] = given.cuts[1]
    target = target.replacing(kept)
    return given if target == given else target


def _over_time(given: Layout, split: Split, sample_dim: int) -> Layout:
    """For a recurrent layer: time is whole, and so are features unless the axes that cut hidden units cut them."""
    samples, features = given.cuts[sample_dim], given.cuts[2]
    if samples.axes != split.sample:
        samples = fair_cut(given.mesh, given.shape[sample_dim], split.sample)
    target = given.with_whole([0, 1, 2]).replacing({sample_dim: samples})
    if features.axes and features.axes == split.channel:
        target = target.replacing({2: features})
    return given if target == given else target


def _keeps_channels(channels: Cut, split: Split, cuts_channels: bool, elsewhere: tuple[str, ...]) -> bool:
    axes = {*channels.axes}
    if axes & {*elsewhere}:
        return False
    return not cuts_channels or not split.channel or axes == {*split.channel}


def _with_tokens(given: Layout, split: Split, dims: int) -> Layout:
    """For a layer whose output has features in the last of `dims`: dims before it that are already cut stay so; axes
    that cut nothing yet cut what the split says."""
    cuts = [*given.cuts]
    if len(cuts) == dims and not _keeps_channels(cuts[-1], split, True, ()):
        cuts[-1] = fair_cut(given.mesh, given.shape[-1], ())
    for dim, axes in split.cut(dims, channels_last=True).items():
        used = {name for cut in cuts for name in cut.axes}
        if not cuts[dim].axes and not used & {*axes}:
            cuts[dim] = fair_cut(given.mesh, given.shape[dim], axes)
    target = Layout(given.mesh, cuts)
    return given if target == given else target


def input_user(graph: Graph, name: str) -> Node | None:
    """The layer whose split says how an input is cut: the first that takes it, else the network's first."""
    nodes = {node.name: node for node in split_nodes(graph)}
    taking = (nodes[node.name] for node in graph.consumers(name) if node.name in nodes)
    return next(taking, next(iter(nodes.values()), None))


def input_layout(whole: Layout, name: str, user: Node, split: Split) -> Layout:
    """An input's layout as its user's split wants it; if layers come between, only samples and tokens are cut."""
    if name in user.inputs:
        return arranged_layout(whole, split, _role(user))
    made = user.outputs[0].shape
    cut = {0: split.sample}
    if user.channels_last and len(made) > 2 and made[1:-1] == whole.shape[1:]:
        cut = split.cut(len(made), channels_last=True)
    return Layout.of(whole.mesh, whole.shape, cut) if whole.cuts else whole


def _role(node: Node) -> Role:
    if node.op == "Embedding":
        return "words"
    if node.is_recurrent and not node.is_cell:
        return "sequence" if node.sample_dim == 0 else "time_first"
    return "dense" if node.channels_last or node.is_cell else "follows"


def arrange(x: Sharded, split: Split, role: Role) -> Sharded:
    """`x` in the layout that the layer's split asks for."""
    if role == "joint" and not x.layout.copies:
        return copied_input(arrange(x, split, "dense"), split.channel)
    return x.redistribute(arranged_layout(x.layout, split, role))
