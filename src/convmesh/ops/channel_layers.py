"""Convolution, transposed convolution and dense layers whose weights are cut by channel and filter.

The weight's placement says what happens: a DTensor cut by filters gathers its input, one cut by input channels
sum-scatters its output, one cut by both does both (stationary-y, -x and -w; see `layout/channels.py`).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.distributed.tensor import DTensor

from convmesh.dist import OpenMesh
from convmesh.errors import UnsupportedError
from convmesh.kernels.conv import best_format
from convmesh.layout import Box, ExchangePlan, Layout, plan_exchange
from convmesh.layout.channels import ChannelSplit, channel_layouts
from convmesh.layout.maps import DimMap, Same, Transposed, Window, excess
from convmesh.layout.terms import Term, split_terms
from convmesh.ops.autocast import autocast_inputs
from convmesh.ops.channel_function import CutLayer, CutLayerFunction, LocalLayer
from convmesh.ops.local_layers import LocalConv, LocalDense, LocalTransposed
from convmesh.ops.sharded import Sharded

Plans = tuple[Layout, ExchangePlan, ExchangePlan]


def channel_split(weight: DTensor, transposed: bool = False) -> ChannelSplit:
    """Which axes cut a weight's input channels and which its filters, outermost first."""
    names = weight.device_mesh.mesh_dim_names or ()
    filter_dim, channel_dim = (1, 0) if transposed else (0, 1)
    by_dim: dict[int, list[str]] = {filter_dim: [], channel_dim: []}
    for name, placement in zip(names, weight.placements, strict=True):
        if placement.is_replicate():
            continue
        if not placement.is_shard() or placement.dim not in by_dim:  # type: ignore[attr-defined]
            raise UnsupportedError(f"`weight` is placed {placement} along {name!r}; cut it by filters or channels.")
        by_dim[placement.dim].append(name)  # type: ignore[attr-defined]
    return ChannelSplit(kept=tuple(by_dim[channel_dim]), gathered=tuple(by_dim[filter_dim]))


@lru_cache(maxsize=None)
def _plans(
    source: Layout, maps: tuple[DimMap, ...], filters: int, split: ChannelSplit, groups: int, rank: int
) -> Plans:
    found = channel_layouts(source, maps, filters, split, groups)
    inputs = plan_exchange(source, found.input_needs, rank)
    return found.output, inputs, plan_exchange(found.output, found.output_parts, rank)


def cut_conv(
    x: Sharded, weight: DTensor, bias: torch.Tensor | None, windows: tuple[Window, ...], groups: int
) -> Sharded:
    """Convolution with a cut weight."""
    split = channel_split(weight)
    check_groups(split, groups, x.mesh)
    maps: tuple[DimMap, ...] = (Same(), Same(), *windows)
    plans = _plans(x.layout, maps, weight.shape[0], split, groups, x.mesh.rank)
    stride, dilation = tuple(w.stride for w in windows), tuple(w.dilation for w in windows)
    local_groups = groups // x.mesh.mesh.extent(split.gathered) if groups > 1 else 1
    term = _covering_term(x.layout, plans[0], windows, x.mesh.rank)
    local = LocalConv(term, plans[2].frame.shape, stride, dilation, local_groups)
    return _run(x, weight, bias, split, plans, local)


@lru_cache(maxsize=None)
def _covering_term(source: Layout, work: Layout, windows: tuple[Window, ...], rank: int) -> Term | None:
    out = Box(work.box(rank).spans[2:])
    terms = split_terms(windows, Box(source.box(rank).spans[2:]), out, source.shape[2:], overlap=False)
    return terms.late[0] if terms.late else None


def cut_conv_transpose(
    x: Sharded, weight: DTensor, bias: torch.Tensor | None, steps: tuple[Transposed, ...], groups: int
) -> Sharded:
    """Transposed convolution with a cut weight."""
    split = channel_split(weight, transposed=True)
    if groups > 1:
        raise UnsupportedError(f"`groups` (={groups}) must be 1 for a transposed convolution with cut channels.")
    plans = _plans(x.layout, (Same(), Same(), *steps), weight.shape[1], split, groups, x.mesh.rank)
    stride, dilation = tuple(s.stride for s in steps), tuple(s.dilation for s in steps)
    space = Box(plans[0].box(x.mesh.rank).spans[2:])
    reaches = plans[1].frame.size > 0
    pads = tuple((-low, -high) for low, high in excess(steps, space, x.shape[2:])) if reaches else ()
    local = LocalTransposed(plans[2].frame.shape, stride, dilation, 1, pads)
    return _run(x, weight, bias, split, plans, local)


def cut_linear(x: Sharded, weight: DTensor, bias: torch.Tensor | None) -> Sharded:
    """Dense layer with a cut weight on a matrix of samples."""
    if x.dim() != 2:
        raise UnsupportedError(f"`input` (shape {tuple(x.shape)}) must have 2 dims for a dense layer with a cut weight.")
    split = channel_split(weight)
    plans = _plans(x.layout, (Same(), Same()), weight.shape[0], split, 1, x.mesh.rank)
    return _run(x, weight, bias, split, plans, LocalDense())


def check_groups(split: ChannelSplit, groups: int, mesh: OpenMesh) -> None:
    ranks = mesh.mesh.extent(split.axes)
    if groups > 1 and (split.kept or groups % ranks):
        most = max(n for n in range(1, ranks + 1) if groups % n == 0)
        raise UnsupportedError(
            f"`groups` (={groups}) must be a multiple of the {ranks} ranks that cut the channels, and the weight cut by "
            f"filters; the largest split that works is {most} ways."
        )


def _run(
    x: Sharded, weight: DTensor, bias: torch.Tensor | None, split: ChannelSplit, plans: Plans, local: LocalLayer
) -> Sharded:
    output, inputs, outputs = plans
    here = weight.to_local()
    if bias is not None and not isinstance(bias, DTensor):
        raise UnsupportedError("`bias` must be cut like the filters of its cut `weight`; see `convmesh.cut_channels`.")
    bias_here = None if bias is None else bias.to_local()
    x, here, bias_here = autocast_inputs(x, here, bias_here)
    layer = CutLayer(
        mesh=x.mesh,
        local=local,
        inputs=inputs,
        outputs=outputs,
        reduce_axes=tuple(name for name in output.axes if name not in split.axes),
        has_bias_duty=x.mesh.mesh.part(split.kept, x.mesh.mesh.coordinates(x.mesh.rank)) == 0,
        keeps_gathered=x.mesh.keeps_gathered,
        wire=best_format(x.dtype, x.device, x.dim(), here.shape[2:]),
    )
    with torch.autocast(x.device.type, enabled=False):
        y = CutLayerFunction.apply(x.local, here, bias_here, layer)
    return Sharded(y, output, x.mesh)
