"""Convolution, transposed convolution and dense layers whose weights are cut by channel and filter.

The weight's placement decides: a DTensor cut by filters gathers its input, one cut by input channels
sum-scatters its output, one cut by both does both (stationary-y, -x and -w; see `layout/channels.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

import torch

from convmesh.dist import OpenMesh
from convmesh.dist.cut_weights import Cuts, local_shape, shard_of, weight_blocks
from convmesh.errors import UnsupportedError
from convmesh.kernels.local_conv import best_format
from convmesh.layout import Box, Demand, Layout, Region, plan_exchange
from convmesh.layout.channels import (
    ChannelLayouts,
    ChannelPlans,
    ChannelSplit,
    Sums,
    channel_layouts,
    groups_divide,
    largest_split,
)
from convmesh.layout.layout import LAYOUTS_KEPT, CopiedLayout, FoldedLayout, chunked_cut, fair_cut
from convmesh.layout.maps import Same, Transposed, Window, excess
from convmesh.layout.terms import Term, split_terms
from convmesh.ops.channels.channel_function import CutLayer, CutLayerFunction, LocalLayer
from convmesh.ops.channels.local_layers import LocalConv, LocalDense, LocalTable, LocalTransposed
from convmesh.ops.channels.sub_batches import StreamedFunction, StreamedLayer, sub_batches
from convmesh.ops.channels.undecided_weight import PlannedWeight
from convmesh.ops.core.autocast import autocast_inputs, without_autocast
from convmesh.ops.core.exchange_plans import Maps
from convmesh.ops.core.sharded import Sharded
from convmesh.private_torch.dtensors import cut_dim, is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

CutWeight: TypeAlias = "DTensor | PlannedWeight"

GATHERS_AGAIN = "gathers_again"
"""The attribute of a weight whose layer gathers its input again in backward instead of keeping it."""


def is_cut(weight: object) -> TypeGuard[CutWeight]:
    return is_dtensor(weight) or isinstance(weight, PlannedWeight)


def channel_split(weight: DTensor, filter_dim: int) -> ChannelSplit:
    """Which axes cut a weight's input channels and which its filters, outermost first."""
    names = weight.device_mesh.mesh_dim_names or ()
    by_dim: dict[int | None, list[str]] = {0: [], 1: []}
    for name, placement in zip(names, weight.placements, strict=True):
        if placement.is_replicate():
            continue
        dim = cut_dim(placement)
        if dim not in by_dim:
            raise UnsupportedError(f"`weight` is placed {placement} along {name!r}; cut it by filters or channels.")
        by_dim[dim].append(name)
    blocks = weight_blocks(weight)
    return ChannelSplit(kept=tuple(by_dim[1 - filter_dim]), gathered=tuple(by_dim[filter_dim]), blocks=blocks)


@lru_cache(maxsize=LAYOUTS_KEPT)
def _plans(source: Layout, maps: Maps, filters: int, groups: int, rank: int, split: ChannelSplit) -> ChannelPlans:
    return _planned(source, channel_layouts(source, maps, filters, split, groups), rank)


@lru_cache(maxsize=LAYOUTS_KEPT)
def _dense_plans(source: Layout, features: int, rank: int, split: ChannelSplit, is_copy: bool = False) -> ChannelPlans:
    """The plans of a layer whose channels are the last dim. A rank's own copy of the input has its own gradient."""
    last = len(source.cuts) - 1
    plans = _planned(source, channel_layouts(source, (Same(),) * (last + 1), features, split, dim=last), rank)
    return plans._replace(input_sums=()) if is_copy else plans


def _planned(source: Layout, layouts: ChannelLayouts, rank: int) -> ChannelPlans:
    inputs = plan_exchange(source, layouts.input_needs, rank)
    outputs = plan_exchange(layouts.output, layouts.output_parts, rank)
    return ChannelPlans(layouts.output, inputs, outputs, layouts.input_sums, layouts.output_sums)


def cut_conv(
    x: Sharded, weight: CutWeight, bias: torch.Tensor | None, windows: tuple[Window, ...], groups: int
) -> Sharded:
    """Convolution with a cut weight."""
    maps: Maps = (Same(), Same(), *windows)
    plans_of = partial(_plans, x.layout, maps, weight.shape[0], groups, x.mesh.rank)
    split = _split(x, weight, plans_of, groups)
    output, outputs = plans_of(split).output, plans_of(split).outputs
    stride, dilation = tuple(w.stride for w in windows), tuple(w.dilation for w in windows)
    local_groups = groups // x.mesh.mesh.extent(split.gathered) if groups > 1 else 1
    term = _covering_term(x.layout, output, windows, x.mesh.rank)
    local = LocalConv(term, outputs.frame.shape, stride, dilation, local_groups, x.device_kind)
    return _run(x, weight, bias, split, plans_of(split), local)


@lru_cache(maxsize=LAYOUTS_KEPT)
def _covering_term(source: Layout, work: Layout, windows: tuple[Window, ...], rank: int) -> Term | None:
    out = Box(work.box(rank).spans[2:])
    terms = split_terms(windows, Box(source.box(rank).spans[2:]), out, source.shape[2:], overlap=False)
    return terms.late[0] if terms.late else None


def cut_conv_transpose(
    x: Sharded, weight: CutWeight, bias: torch.Tensor | None, steps: tuple[Transposed, ...], groups: int
) -> Sharded:
    """Transposed convolution with a cut weight; groups are cut together with their channels, in the weight's dim 0."""
    filter_dim = transposed_filter_dim(groups)
    plans_of = partial(_plans, x.layout, (Same(), Same(), *steps), weight.shape[1] * groups, groups, x.mesh.rank)
    split = _split(x, weight, plans_of, groups, filter_dim)
    output, inputs, outputs = plans_of(split)[:3]
    stride, dilation = tuple(s.stride for s in steps), tuple(s.dilation for s in steps)
    space = Box(output.box(x.mesh.rank).spans[2:])
    pads = _crop(steps, space, x.shape[2:]) if _reaches(inputs.frame) else ()
    local_groups = groups // x.mesh.mesh.extent(split.gathered) if groups > 1 else 1
    local = LocalTransposed(outputs.frame.shape, stride, dilation, local_groups, pads)
    return _run(x, weight, bias, split, plans_of(split), local, filter_dim)


def transposed_filter_dim(groups: int) -> int:
    """The dim of a transposed convolution's weight, (C, F / groups, …), that is cut along with its filters."""
    return 1 if groups == 1 else 0


def _reaches(inputs: Region) -> bool:
    return all(inputs.dims[2:])


def _crop(steps: tuple[Transposed, ...], out: Box, extents: torch.Size) -> tuple[tuple[int, int], ...]:
    return tuple((-low, -high) for low, high in excess(steps, out, extents))


def cut_linear(x: Sharded, weight: CutWeight, bias: torch.Tensor | None, sums: Sums = "channel") -> Sharded:
    """Dense layer with a cut weight, over the last dim, the features; samples and tokens come before it.

    `sums` says where partial outputs go; an undecided weight decides that too.
    """
    if x.dim() < 2:
        raise UnsupportedError(
            f"`input` (shape {tuple(x.shape)}) must have 2 dims or more for a dense layer with a cut weight."
        )
    is_copy = isinstance(x.layout, CopiedLayout)
    if isinstance(x.layout, CopiedLayout):
        x = Sharded(x.local.squeeze(-1), x.layout.single, x.mesh)
    plans_of = partial(_dense_plans, x.layout, weight.shape[0], x.mesh.rank, is_copy=is_copy)
    split = _split(x, weight, plans_of, 1, dim=x.dim() - 1)
    if split.kept and not isinstance(weight, PlannedWeight):
        split = replace(split, sums=sums)
    in_parts = x.dim() == 2 and x.mesh.settings.sub_batches > 1 and split.sums == "channel"
    if in_parts and {*x.layout.cuts[0].axes} & {*split.axes}:
        return _run_streamed(x, weight, bias, split, plans_of(split).output)
    made = _run(x, weight, bias, split, plans_of(split), LocalDense(), dim=x.dim() - 1)
    return made if split.blocks == 1 else _folded(made, split.blocks)


def cut_embedding(x: Sharded, weight: CutWeight, padding: int | None, sums: Sums = "channel") -> Sharded:
    """Rows of a cut table, as the product of one-hot words with a dense layer's weight, the table's transpose.

    Cut by filters, each rank has some features of all words; cut by channels, all features of some words.
    """
    words, features = weight.shape
    plans_of = partial(_table_plans, x.layout, words, features, x.mesh.rank)
    one_hot = Sharded(x.local, _one_hot(x.layout, words), x.mesh)
    split = _split(one_hot, weight, plans_of, 1, filter_dim=1, dim=x.dim())
    if split.kept and not isinstance(weight, PlannedWeight):
        split = replace(split, sums=sums)
    table, _ = _local_parts(x, weight, None, split, filter_dim=1)
    part = x.mesh.mesh.part(split.kept, x.mesh.mesh.coordinates(x.mesh.rank))
    first = chunked_cut(x.mesh.mesh, words, split.kept).partition.span(part).start
    layer = _layer(x, weight, table, split, plans_of(split), LocalTable(words, first, padding), x.dim())
    return Sharded(CutLayerFunction.apply(x.local, table, None, layer), plans_of(split).output, x.mesh)


@lru_cache(maxsize=LAYOUTS_KEPT)
def _one_hot(source: Layout, words: int) -> Layout:
    """The layout that words would have as one-hot vectors."""
    return Layout(source.mesh, (*source.cuts, fair_cut(source.mesh, words, ())))


@lru_cache(maxsize=LAYOUTS_KEPT)
def _table_plans(source: Layout, words: int, features: int, rank: int, split: ChannelSplit) -> ChannelPlans:
    dims = len(source.cuts)
    layouts = channel_layouts(_one_hot(source, words), (Same(),) * (dims + 1), features, split, dim=dims)
    inputs = plan_exchange(source, Demand(source.mesh, layouts.input_needs.dims[:dims]), rank)
    outputs = plan_exchange(layouts.output, layouts.output_parts, rank)
    return ChannelPlans(layouts.output, inputs, outputs, output_sums=layouts.output_sums)


def _folded(made: Sharded, blocks: int) -> Sharded:
    """A dense layer's output whose features, like its weight's rows, are a rank's parts of several blocks."""
    axes, features = made.layout.cuts[-1]
    block = features.extent // blocks
    cuts = (fair_cut(made.layout.mesh, blocks, ()), chunked_cut(made.layout.mesh, block, axes))
    layout = FoldedLayout(made.layout.mesh, (*made.layout.cuts[:-1], *cuts))
    return Sharded(made.local.unflatten(-1, (blocks, -1)), layout, made.mesh)


def _run_streamed(
    x: Sharded, weight: CutWeight, bias: torch.Tensor | None, split: ChannelSplit, output: Layout
) -> Sharded:
    """A dense layer that receives its input from all ranks, one sub-batch at a time."""
    rank = x.mesh.rank
    batches = sub_batches(x.layout, output, rank, x.mesh.settings.sub_batches)
    x, weight_here, bias_here = autocast_inputs(x, *_local_parts(x, weight, bias, split))
    plans = [_dense_plans(b.layout, weight.shape[0], rank, split) for b in batches]
    parts = tuple(_layer(x, weight, weight_here, split, batch_plans, LocalDense()) for batch_plans in plans)
    layer = StreamedLayer(parts, batches, tuple(x.local.shape), output.box(rank).shape)
    with without_autocast(x.device):
        y = StreamedFunction.apply(x.local, weight_here, bias_here, layer)
    return Sharded(y, output, x.mesh)


def _split(
    x: Sharded,
    weight: CutWeight,
    plans_of: Callable[[ChannelSplit], ChannelPlans],
    groups: int,
    filter_dim: int = 0,
    dim: int = 1,
) -> ChannelSplit:
    """The weight's cut: its placement, or, for an undecided weight, the decision made now."""
    if isinstance(weight, PlannedWeight):
        assert weight.decide is not None
        weight.decided = weight.decide(x, plans_of, groups, dim)
        return weight.decided
    shard_of(weight, x.mesh)
    split = channel_split(weight, filter_dim)
    check_groups(split, groups, x.mesh)
    return split


def check_groups(split: ChannelSplit, groups: int, mesh: OpenMesh) -> None:
    """Groups are cut like channels: every rank must have whole groups."""
    ranks = mesh.mesh.extent(split.axes)
    if groups > 1 and (split.kept or not groups_divide(groups, ranks)):
        raise UnsupportedError(
            f"`groups` (={groups}) must be a multiple of the {ranks} ranks that cut the channels, and the weight must "
            f"be cut by filters; the largest split that works is {largest_split(groups, ranks)} ways."
        )


def _run(
    x: Sharded,
    weight: CutWeight,
    bias: torch.Tensor | None,
    split: ChannelSplit,
    plans: ChannelPlans,
    local: LocalLayer,
    filter_dim: int = 0,
    dim: int = 1,
) -> Sharded:
    x, weight_here, bias_here = autocast_inputs(x, *_local_parts(x, weight, bias, split, filter_dim))
    layer = _layer(x, weight, weight_here, split, plans, local, dim)
    with without_autocast(x.device):
        y = CutLayerFunction.apply(x.local, weight_here, bias_here, layer)
    return Sharded(y, plans.output, x.mesh)


def _local_parts(
    x: Sharded, weight: CutWeight, bias: torch.Tensor | None, split: ChannelSplit, filter_dim: int = 0
) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight_here = _local_part(weight, x.mesh, {filter_dim: split.gathered, 1 - filter_dim: split.kept})
    return weight_here, None if bias is None else _local_part(bias, x.mesh, {0: split.gathered})


def _layer(
    x: Sharded,
    weight: CutWeight,
    weight_here: torch.Tensor,
    split: ChannelSplit,
    plans: ChannelPlans,
    local: LocalLayer,
    dim: int = 1,
) -> CutLayer:
    return CutLayer(
        mesh=x.mesh,
        local=local,
        inputs=plans.inputs,
        outputs=plans.outputs,
        input_sums=plans.input_sums,
        output_sums=plans.output_sums,
        reduce_axes=x.mesh.weight_axes(tuple(name for name in plans.output.axes if name not in split.axes)),
        has_bias_duty=x.mesh.mesh.part(split.kept, x.mesh.mesh.coordinates(x.mesh.rank)) == 0,
        keeps_gathered=not getattr(weight, GATHERS_AGAIN, False),
        wire=best_format(x.dtype, x.device_kind, x.dim(), weight_here.shape[2:]),
        dim=dim,
    )


def _local_part(param: torch.Tensor, mesh: OpenMesh, cuts: Cuts) -> torch.Tensor:
    if is_dtensor(param):
        return shard_of(param, mesh)
    if mesh.is_dry:
        shape = local_shape(param.shape, mesh, cuts)
        return torch.empty(shape, dtype=param.dtype, device="meta", requires_grad=param.requires_grad)
    raise UnsupportedError("`bias` must be cut like the filters of its cut `weight`; see `convmesh.cut_channels`.")
