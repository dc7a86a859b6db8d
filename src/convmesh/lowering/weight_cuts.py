"""Weights of a dry run: how each is cut, and over which axes its gradient is summed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from convmesh.dist import OpenMesh
from convmesh.dist.cut_weights import local_shape
from convmesh.errors import PlanError
from convmesh.graph import Weight
from convmesh.kernels.memory_format import memory_format_of
from convmesh.layout import Layout
from convmesh.layout.channels import ChannelSplit
from convmesh.lowering.channel_rules import (
    LAYERS,
    PER_CHANNEL,
    RECURRENT,
    Asked,
    channel_cuts,
    decide_cut,
    decide_units,
    weight_cuts,
)
from convmesh.ops.channels.undecided_weight import PlannedWeight
from convmesh.ops.core.sharded import Sharded
from convmesh.plans import Plan, Split, WeightProgram
from convmesh.private_torch.module_tables import named_tensors

Axes = tuple[str, ...]
Cuts = dict[int, Axes]


def without_data(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return tensor
    # Not `empty_like`: for a weight that is already cut, that would return a shard.
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", memory_format=memory_format_of(tensor))
    return made.requires_grad_(tensor.requires_grad)


def dry_weights(
    layer: str, module: nn.Module, split: Split | None, cuts_norm: bool, decided: ChannelSplit | None, blocks: int = 1
) -> dict[str, torch.Tensor]:
    """A module's tensors without data; those that are cut say so, and decide how when they meet their input."""
    weights = {name: without_data(tensor) for name, tensor in named_tensors(module)}
    if isinstance(module, LAYERS) and split is not None and split.channel:
        sums = split.sums if isinstance(module, (nn.Linear, nn.Embedding)) else "channel"
        asked = Asked(layer, split.algorithm, split.channel, sums, blocks)
        weights["weight"] = PlannedWeight.of(weights["weight"], partial(_decide, asked, decided))
    elif isinstance(module, RECURRENT) and split is not None and split.channel:
        decide = partial(_decide_units, Asked(layer, split.algorithm, split.channel), module)
        for name in weights:
            if name.startswith(("weight_ih", "weight_hh")):
                weights[name] = PlannedWeight.of(weights[name], decide)
    elif isinstance(module, PER_CHANNEL) and cuts_norm:
        for name in channel_cuts(()):
            if weights.get(name) is not None:
                weights[name] = PlannedWeight.of(weights[name])
    return weights


def _decide(
    asked: Asked, decided: ChannelSplit | None, x: Sharded, plans_of: Any, groups: int, dim: int
) -> ChannelSplit:
    if decided is not None:  # a layer that runs twice keeps its first cut
        return decided
    return decide_cut(asked, x, plans_of, groups, dim).split


def _decide_units(asked: Asked, module: nn.Module, x: Sharded, plans_of: Any, groups: int, dim: int) -> ChannelSplit:
    del plans_of, groups, dim
    return decide_units(asked, module, x.mesh.mesh)


class DecidedCuts:
    """The cuts of all weights, decided layer by layer."""

    def __init__(self) -> None:
        self.cuts: dict[str, Cuts] = {}
        self.blocks: dict[str, int] = {}
        """By weight whose first dim is cut block by block: their number."""
        self._decided: dict[str, ChannelSplit] = {}

    def note_norm(self, layer: str, module: nn.Module, given: Layout) -> bool:
        """Whether a norm's tensors are cut, like the channels of its input."""
        if not isinstance(module, PER_CHANNEL) or not given.is_cut(1):
            return False
        for name, cuts in channel_cuts(given.cuts[1].axes).items():
            if getattr(module, name, None) is not None:
                self.cuts[f"{layer}.{name}"] = cuts
        return True

    def decided(self, layer: str) -> ChannelSplit | None:
        return self._decided.get(layer)

    def settle(self, layer: str, module: nn.Module, split: ChannelSplit, named: Mapping[str, str]) -> None:
        """Keep what was decided for a layer; `named` are the model's names of its tensors, if not the layer's own."""
        self._decided[layer] = split
        for name, cuts in weight_cuts(module, split).items():
            if getattr(module, name, None) is not None:
                path = named.get(name, f"{layer}.{name}")
                self._keep(path, {dim: axes for dim, axes in cuts.items() if axes}, split.blocks if cuts.get(0) else 1)

    def _keep(self, path: str, cuts: Cuts, blocks: int) -> None:
        if self.cuts.get(path, cuts) != cuts or (path in self.cuts and self.blocks.get(path, 1) != blocks):
            raise PlanError(f"two layers use {path!r}, but the plan cuts it in two ways; split both alike.")
        self.cuts[path] = cuts
        if blocks > 1:
            self.blocks[path] = blocks

    def decided_plan(self, plan: Plan) -> Plan:
        """The plan with every algorithm named."""
        named = {name: replace(plan.split(name), algorithm=choice.algorithm) for name, choice in self._decided.items()}
        changed = {name: split for name, split in named.items() if split != plan.split(name)}
        return plan.with_splits(changed) if changed else plan


def shared_sums(uses: Mapping[str, Sequence[tuple[str, Axes]]]) -> tuple[dict[str, Axes], frozenset[str]]:
    """The axes over which to sum every weight's gradient; and the nodes that must sum at once, because one of their
    weights also serves nodes whose work is cut by other axes: one sum after backward would count some parts twice."""
    eager: set[str] = set()
    while True:
        axes_by_name = {name: {() if node in eager else axes for node, axes in by} for name, by in uses.items()}
        mixed = {node for name, axes in axes_by_name.items() if len(axes) > 1 for node, _ in uses[name]}
        if mixed <= eager:
            return {name: next(iter(axes)) for name, axes in axes_by_name.items()}, frozenset(eager)
        eager |= mixed


def weight_programs(
    weights: Sequence[Weight], mesh: OpenMesh, cuts: Mapping[str, Cuts], sum_axes: Mapping[str, Axes]
) -> tuple[WeightProgram, ...]:
    """What this rank holds of every weight."""
    return tuple(
        WeightProgram(
            name=weight.name,
            shape=weight.shape,
            local_shape=local_shape(weight.shape, mesh, cuts[weight.name]) if weight.name in cuts else weight.shape,
            dtype=weight.dtype,
            learns=weight.learns,
            cuts=tuple(cuts.get(weight.name, {}).items()),
            sum_axes=sum_axes.get(weight.name, ()),
        )
        for weight in weights
    )
