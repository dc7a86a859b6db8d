"""Channel and filter parallelism: one pattern, three names.

The channels of a layer's input and output are cut over the same axes. The layer splits those axes into `kept` ones,
which cut the input channels of its weight, and `gathered` ones, which cut its filters. Then

    forward     gather x over `gathered`;  convolve with w[F / gathered, C / kept];  sum-scatter y over `kept`
    backward    gather dy over `kept`;     compute dw and dx;                        sum-scatter dx over `gathered`

With nothing gathered this is stationary-x, with nothing kept stationary-y, with both stationary-w (Dryden et al., SC
2019). Input channels are cut by (kept, gathered) and output channels by (gathered, kept), the outer axes first, so what
a collective moves is one run of channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from convmesh.layout.box import Span
from convmesh.layout.demand import Demand, DimDemand
from convmesh.layout.exchange_plan import ExchangePlan
from convmesh.layout.layout import Cut, Layout, chunked_cut
from convmesh.layout.maps import DimMap, demand, out_shape
from convmesh.layout.mesh import Mesh

Algorithm = Literal["x", "y", "w"]
Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChannelSplit:
    """Which axes cut a weight's input channels (`kept`) and which its filters (`gathered`)."""

    kept: Axes = ()
    gathered: Axes = ()

    @property
    def algorithm(self) -> Algorithm:
        if not self.gathered:
            return "x"
        return "w" if self.kept else "y"

    @property
    def axes(self) -> Axes:
        return self.kept + self.gathered


def split_for(algorithm: Algorithm, channels_cut_by: Axes) -> ChannelSplit:
    """The split of an algorithm for an input whose channels are cut by these axes, outermost first."""
    if algorithm == "x":
        return ChannelSplit(kept=channels_cut_by)
    if algorithm == "y":
        return ChannelSplit(gathered=channels_cut_by)
    return ChannelSplit(kept=channels_cut_by[:1], gathered=channels_cut_by[1:])


def groups_divide(groups: int, ranks: int) -> bool:
    """Whether every rank gets whole groups; the single group of a plain convolution may be cut anyhow."""
    return groups == 1 or groups % ranks == 0


def largest_split(groups: int, ranks: int) -> int:
    """The most of `ranks` ranks over which groups divide."""
    return max(n for n in range(1, ranks + 1) if groups % n == 0)


@dataclass(frozen=True, slots=True)
class ChannelLayouts:
    """Where a cut layer's output lives, and the parts of input and output that every rank needs and computes."""

    output: Layout
    input_needs: Demand
    output_parts: Demand


def channel_layouts(
    source: Layout, maps: Sequence[DimMap], filters: int, split: ChannelSplit, groups: int = 1
) -> ChannelLayouts:
    """The layouts of a layer with `maps` for all dims but channels (dim 1, whose map is ignored).

    If the input's samples or space are cut by the split's own axes, they are gathered along with its channels: each
    rank then computes its filters for all of them, and sends their summed gradients back.
    """
    mesh, channels = source.mesh, source.shape[1]
    shape = [*out_shape(maps, source.shape)]
    shape[1] = filters
    free = source.with_whole([dim for dim in _cut_by(source, split.axes) if dim != 1])
    output = _with_channels(free.with_shape(shape), chunked_cut(mesh, filters, split.gathered + split.kept))
    kept = chunked_cut(mesh, channels, split.kept).partition
    gathered = chunked_cut(mesh, filters, split.gathered).partition
    wanted = [_inputs_of(gathered.span(g), filters, channels, groups) for g in range(gathered.parts)]
    if groups == 1:
        wanted = [Span(0, channels)] * gathered.parts
    inputs = [kept.span(k).intersect(w) for k in range(kept.parts) for w in wanted]
    parts = [gathered.span(g) for g in range(gathered.parts) for _ in range(kept.parts)]
    spatial = demand(output, maps, source.shape).dims
    return ChannelLayouts(
        output=output,
        input_needs=_with_channel_demand(mesh, spatial, split.axes, inputs),
        output_parts=_with_channel_demand(mesh, Demand.ownership(output).dims, split.gathered + split.kept, parts),
    )


def _cut_by(layout: Layout, axes: Axes) -> list[int]:
    """The dims that any of `axes` cut."""
    return [dim for dim, cut in enumerate(layout.cuts) if {*cut.axes} & {*axes}]


def _inputs_of(filters: Span, of_filters: int, of_channels: int, groups: int) -> Span:
    """The channels that a span of filters reads in a grouped convolution."""
    if not filters.extent:
        return Span(0, 0)
    first, last = filters.start * groups // of_filters, (filters.stop - 1) * groups // of_filters
    return Span(first * of_channels // groups, (last + 1) * of_channels // groups)


def _with_channels(layout: Layout, cut: Cut) -> Layout:
    return layout.replacing({1: cut})


def _with_channel_demand(mesh: Mesh, dims: Sequence[DimDemand], axes: Axes, spans: list[Span]) -> Demand:
    own = DimDemand(axes, [(span,) if span.extent else () for span in spans])
    return Demand(mesh, [own if dim == 1 else given for dim, given in enumerate(dims)])


def candidates(channels_cut_by: Axes) -> list[ChannelSplit]:
    """The splits to choose from: y, x and, for channels cut by two axes, w."""
    names: tuple[Algorithm, ...] = ("y", "x", "w") if len(channels_cut_by) > 1 else ("y", "x")
    return [split_for(name, channels_cut_by) for name in names]


@dataclass(frozen=True, slots=True)
class Volumes:
    """Elements that one rank sends for a layer in a step; `gather_input` once more if the input is gathered again."""

    gather_input: int
    scatter_output: int
    gather_output_gradient: int
    scatter_input_gradient: int

    @property
    def total(self) -> int:
        forward = self.gather_input + self.scatter_output
        return forward + self.gather_output_gradient + self.scatter_input_gradient


def volumes(inputs: ExchangePlan, outputs: ExchangePlan, input_learns: bool = True) -> Volumes:
    """What the two exchanges of a layer move, each in both directions; an input of the network needs no gradient."""
    return Volumes(
        gather_input=inputs.forward.elements_sent,
        scatter_output=outputs.adjoint.elements_sent,
        gather_output_gradient=outputs.forward.elements_sent,
        scatter_input_gradient=inputs.adjoint.elements_sent if input_learns else 0,
    )
