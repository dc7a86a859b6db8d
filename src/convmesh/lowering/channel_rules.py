"""The rules by which a layer's channels and filters are cut: candidates, limits, and which tensors are cut how.

Each layer takes the algorithm whose transfers, forward and backward, move the fewest elements for its input's layout.
Where only channel-local operators separate two layers with a wide middle, the pair becomes y-then-x: one gather, one
sum-scatter, and nothing moved in the middle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from convmesh.dist import OpenMesh
from convmesh.dist.cut_weights import cut_weight
from convmesh.errors import UnsupportedError
from convmesh.layout import Mesh
from convmesh.layout.channels import (
    ChannelPlans,
    ChannelSplit,
    Sums,
    Volumes,
    candidates,
    groups_divide,
    largest_split,
    volumes,
)
from convmesh.ops.channels.channel_layers import transposed_filter_dim
from convmesh.ops.core.sharded import Sharded
from convmesh.private_torch.module_tables import keep_apart

Choice = Literal["auto", "x", "y", "w", "whole"]
PlansOf = Callable[[ChannelSplit], ChannelPlans]

LAYERS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear,
    nn.Embedding,
)  # fmt: skip
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
PER_CHANNEL = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
    nn.GroupNorm,
)  # fmt: skip

SEQUENCES = (nn.LSTM, nn.GRU, nn.RNN)
CELLS = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
RECURRENT = (*SEQUENCES, *CELLS)
"""Layers whose weights are cut by hidden units, gate by gate."""


@dataclass(frozen=True)
class LayerCut:
    """One layer: how its weight is cut, what one rank sends, and what keeping its gathered input would cost."""

    split: ChannelSplit
    moved: Volumes
    gathered_extra: int
    """Elements that a kept gathered input has beyond the rank's own shard."""
    gathers_again: bool = False


@dataclass(frozen=True)
class Asked:
    """What a plan asks of one layer's cut; what it leaves open is decided where the layer meets its input."""

    name: str
    algorithm: Choice
    axes: tuple[str, ...]
    sums: Sums = "channel"
    blocks: int = 1
    """The number of blocks in which the layer's output is read; every rank gets the same part of each."""


def decide_cut(asked: Asked, x: Sharded, plans_of: PlansOf, groups: int, dim: int = 1) -> LayerCut:
    """Of the allowed cuts of a layer with channels in `dim`, the one that moves the least for its input.

    Of two that move the same amount, a layer on tokens takes the one that keeps no gathered input.
    """
    cut_by = x.layout.cuts[dim].axes
    splits = _possible(asked, cut_by or asked.axes, bool(cut_by), groups)
    if asked.blocks > 1:
        splits = [_in_blocks(split, asked.blocks) for split in splits if not split.kept] or splits
    if dim > 1:
        splits.sort(key=lambda split: len(split.gathered))
    priced = [(volumes(plans_of(split), input_learns=x.requires_grad), split) for split in splits]
    moved, split = min(priced, key=lambda pair: pair[0].total)
    _check_counts(asked.name, x.shape[dim], plans_of(split).output.shape[dim], split, x.mesh.mesh, groups)
    inputs = plans_of(split).inputs
    return LayerCut(split, moved, max(0, inputs.frame.size - inputs.held.size))


def _possible(asked: Asked, axes: tuple[str, ...], is_cut: bool, groups: int) -> list[ChannelSplit]:
    """The splits that a layer may take. A whole input needs no gathering, nor do groups: cut the filters."""
    name, choice = asked.name, asked.algorithm
    if groups > 1 or (not is_cut and choice == "auto"):
        return [ChannelSplit(gathered=axes)]
    allowed = [split for split in candidates(axes, asked.sums) if choice in ("auto", split.algorithm)]
    if not allowed:
        raise UnsupportedError(
            f"layer {name!r}: algorithm {choice!r} needs its channels cut by two axes, but they are cut by {axes}; "
            "use a mesh with channel= and filter=, or algorithm 'x', 'y' or 'auto'."
        )
    return allowed


def _in_blocks(split: ChannelSplit, blocks: int) -> ChannelSplit:
    """The split with filters cut in each block; a dim that several axes cut has no blocks."""
    return replace(split, blocks=blocks) if len(split.gathered) == 1 else split


def decide_units(asked: Asked, module: nn.Module, mesh: Mesh) -> ChannelSplit:
    """The cut of a recurrent layer: the same hidden units of every gate on each rank, which stay where they are."""
    assert isinstance(module, RECURRENT)
    units, ranks = module.hidden_size, mesh.extent(asked.axes)
    if asked.algorithm not in ("auto", "y"):
        raise UnsupportedError(
            f"layer {asked.name!r}: algorithm {asked.algorithm!r} is for layers without memory; hidden units are cut "
            "by 'y', which sends states and not the sums of all gates. Use algorithm 'y' or 'auto'."
        )
    if len(asked.axes) > 1:
        raise UnsupportedError(
            f"layer {asked.name!r}: hidden units are cut by one axis, not by {asked.axes}; name one of them."
        )
    if units % ranks:
        raise UnsupportedError(
            f"layer {asked.name!r}: {units} hidden units do not divide over {ranks} ranks; the largest split that "
            f"works is {largest_split(units, ranks)} ways."
        )
    return ChannelSplit(gathered=asked.axes, blocks=_gates(module))


def _gates(module: nn.Module) -> int:
    """How many gates the weights of a recurrent layer have rows for."""
    assert isinstance(module, RECURRENT)
    rows: int = getattr(module, "weight_hh" if isinstance(module, CELLS) else "weight_hh_l0").shape[0]
    return rows // int(module.hidden_size)


def _check_counts(name: str, channels: int, filters: int, split: ChannelSplit, mesh: Mesh, groups: int) -> None:
    ranks = mesh.extent(split.axes)
    scattered = split.kept if split.sums == "channel" else ()
    for what, extent, cut_by in (("filters", filters, split.gathered + scattered), ("channels", channels, split.kept)):
        if extent < mesh.extent(cut_by):
            raise UnsupportedError(
                f"layer {name!r}: {mesh.extent(cut_by)} ranks > {extent} {what}; the largest split that works is "
                f"{extent} ways. Make the channel axes smaller, or leave it uncut: algorithm={{{name!r}: 'whole'}}."
            )
    if not groups_divide(groups, ranks):
        raise UnsupportedError(
            f"layer {name!r}: {groups} groups do not divide over {ranks} ranks; the largest split that works is "
            f"{largest_split(groups, ranks)} ways."
        )


def weight_cuts(module: nn.Module, split: ChannelSplit) -> dict[str, dict[int, tuple[str, ...]]]:
    """How a split cuts the tensors of a layer, by name; a projection of hidden units is cut along its columns."""
    if isinstance(module, RECURRENT):
        names = (name for name, _ in module.named_parameters(recurse=False))
        return {name: {int(name.startswith("weight_hr")): split.gathered} for name in names}
    filter_dim = transposed_filter_dim(module.groups) if isinstance(module, TRANSPOSED) else 0
    if isinstance(module, nn.Embedding):
        filter_dim = 1
    return {"weight": {filter_dim: split.gathered, 1 - filter_dim: split.kept}, "bias": {0: split.gathered}}


def channel_cuts(axes: tuple[str, ...]) -> dict[str, dict[int, tuple[str, ...]]]:
    """How channels cut by `axes` cut the tensors of a norm, by name."""
    return {name: {0: axes} for name in ("weight", "bias", "running_mean", "running_var")}


def replace_tensor(
    module: nn.Module, name: str, mesh: OpenMesh, cuts: dict[int, tuple[str, ...]], blocks: int = 1
) -> None:
    """Put this rank's shard in place of a whole parameter or buffer, if the module has it."""
    whole = getattr(module, name, None)
    if whole is None:
        return
    shard = cut_weight(whole.detach(), mesh, cuts, blocks)
    if isinstance(module, SEQUENCES):
        keep_apart(module)
    if isinstance(whole, nn.Parameter):
        setattr(module, name, nn.Parameter(shard, requires_grad=whole.requires_grad))
    else:
        setattr(module, name, shard)
