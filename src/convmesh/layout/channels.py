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
from typing import Literal, NamedTuple

from convmesh.layout.box import Span
from convmesh.layout.demand import Demand, DimDemand
from convmesh.layout.exchange_plan import ExchangePlan
from convmesh.layout.layout import Layout, chunked_cut, fair_cut
from convmesh.layout.maps import DimMap, demand, out_shape

Algorithm = Literal["x", "y", "w"]
Sums = Literal["channel", "whole", "token"]
"""Where summed outputs go: to parts of the channels, to every rank, or to parts of the dim before the channels."""
Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChannelSplit:
    """Which axes cut a weight's input channels (`kept`) and which its filters (`gathered`)."""

    kept: Axes = ()
    gathered: Axes = ()
    sums: Sums = "channel"
    """Where the sums over `kept` go; "whole" and "token" are for layers whose channels are the last dim."""
    blocks: int = 1
    """Equal blocks of filters, each of which is cut by `gathered`, so that every rank has the same part of all."""

    @property
    def algorithm(self) -> Algorithm:
        if not self.gathered:
            return "x"
        return "w" if self.kept else "y"

    @property
    def axes(self) -> Axes:
        return self.kept + self.gathered


def split_for(algorithm: Algorithm, channels_cut_by: Axes, sums: Sums = "channel") -> ChannelSplit:
    """The split of an algorithm for an input whose channels are cut by these axes, outermost first."""
    if algorithm == "x":
        return ChannelSplit(kept=channels_cut_by, sums=sums)
    if algorithm == "y":
        return ChannelSplit(gathered=channels_cut_by)
    return ChannelSplit(kept=channels_cut_by[:1], gathered=channels_cut_by[1:], sums=sums)


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
    input_sums: Axes = ()
    """Axes along which ranks have the same input but compute with different filters: its gradient is summed, whole."""
    output_sums: Axes = ()
    """Axes along which ranks have partial sums of the same output, which all of them get."""


def channel_layouts(
    source: Layout, maps: Sequence[DimMap], filters: int, split: ChannelSplit, groups: int = 1, dim: int = 1
) -> ChannelLayouts:
    """The layouts of a layer with `maps` for all dims but that of the channels, `dim`, whose map is ignored.

    If the input's samples or space are cut by the split's own axes, they are gathered along with its channels: each
    rank then computes its filters for all of them, and sends their summed gradients back.
    """
    mesh, channels = source.mesh, source.shape[dim]
    shape = [*out_shape(maps, source.shape)]
    shape[dim] = filters
    free = source.with_whole([other for other in _cut_by(source, split.axes) if other != dim])
    work = free.with_shape(shape).replacing({dim: chunked_cut(mesh, filters, split.gathered)})
    output = _with_sums(work, split, dim)
    kept = chunked_cut(mesh, channels, split.kept).partition
    gathered = chunked_cut(mesh, filters, split.gathered).partition
    wanted = [_inputs_of(gathered.span(g), filters, channels, groups) for g in range(gathered.parts)]
    if groups == 1:
        wanted = [Span(0, channels)] * gathered.parts
    inputs = [kept.span(k).intersect(w) for k in range(kept.parts) for w in wanted]
    parts = [gathered.span(g) for g in range(gathered.parts) for _ in range(kept.parts)]
    spatial = [*demand(work, maps, source.shape).dims]
    made = [*Demand.ownership(work).dims]
    spatial[dim] = _demand(split.axes, inputs)
    made[dim] = _demand(split.gathered + split.kept, parts)
    same_input = dim > 1 and not {*split.gathered} & {*source.axes}
    if same_input:
        spatial[dim] = _demand(split.kept, [kept.span(k) for k in range(kept.parts)])
    if split.sums == "whole":
        made[dim] = Demand.ownership(work).dims[dim]
    return ChannelLayouts(
        output=output,
        input_needs=Demand(mesh, spatial),
        output_parts=Demand(mesh, made),
        input_sums=split.gathered if same_input else (),
        output_sums=split.kept if split.sums == "whole" else (),
    )


def _with_sums(work: Layout, split: ChannelSplit, dim: int) -> Layout:
    """The layout of the work, with the axes of its sums where the sums go."""
    if split.sums == "whole":
        return work
    if split.sums == "token":
        axes, tokens = work.cuts[dim - 1]
        return work.replacing({dim - 1: fair_cut(work.mesh, tokens.extent, axes + split.kept)})
    return work.replacing({dim: chunked_cut(work.mesh, work.shape[dim], split.gathered + split.kept)})


def _cut_by(layout: Layout, axes: Axes) -> list[int]:
    """The dims that any of `axes` cut."""
    return [dim for dim, cut in enumerate(layout.cuts) if {*cut.axes} & {*axes}]


def _inputs_of(filters: Span, of_filters: int, of_channels: int, groups: int) -> Span:
    """The channels that a span of filters reads in a grouped convolution."""
    if not filters.extent:
        return Span(0, 0)
    first, last = filters.start * groups // of_filters, (filters.stop - 1) * groups // of_filters
    return Span(first * of_channels // groups, (last + 1) * of_channels // groups)


def _demand(axes: Axes, spans: list[Span]) -> DimDemand:
    return DimDemand(axes, [(span,) if span.extent else () for span in spans])


def candidates(channels_cut_by: Axes, sums: Sums = "channel") -> list[ChannelSplit]:
    """The splits to choose from: y, x and, for channels cut by two axes, w."""
    names: tuple[Algorithm, ...] = ("y", "x", "w") if len(channels_cut_by) > 1 else ("y", "x")
    return [split_for(name, channels_cut_by, sums) for name in names]


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


class ChannelPlans(NamedTuple):
    """One rank's exchanges of a layer with cut channels, and the axes of the sums that every rank gets."""

    output: Layout
    inputs: ExchangePlan
    outputs: ExchangePlan
    input_sums: Axes = ()
    output_sums: Axes = ()


def volumes(plans: ChannelPlans, input_learns: bool = True) -> Volumes:
    """What the two exchanges of a layer move, each in both directions; an input of the network needs no gradient."""
    inputs, outputs, mesh = plans.inputs, plans.outputs, plans.output.mesh
    summed = _summed(inputs.frame.size, mesh.extent(plans.input_sums))
    return Volumes(
        gather_input=inputs.forward.elements_sent,
        scatter_output=outputs.adjoint.elements_sent + _summed(outputs.frame.size, mesh.extent(plans.output_sums)),
        gather_output_gradient=outputs.forward.elements_sent,
        scatter_input_gradient=inputs.adjoint.elements_sent + summed if input_learns else 0,
    )


def _summed(elements: int, ranks: int) -> int:
    """What a rank sends in an all-reduce, which passes twice over all parts but its own."""
    return 2 * (ranks - 1) * elements // ranks
