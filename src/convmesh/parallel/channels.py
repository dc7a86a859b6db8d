"""Cutting a model's channels and filters: which layer by which algorithm, decided before anything runs.

A dry run of the model on one rank of the mesh meets every layer with its input's true layout. Each layer takes the
algorithm whose transfers, forward and backward, move the fewest elements. Where only channel-local operators lie
between two layers with a wide middle, that makes the pair y-then-x: it gathers once and sum-scatters once, and nothing
is moved in the middle.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from convmesh.dist import OpenMesh, dry_mesh
from convmesh.dist.weights import cut_weight
from convmesh.errors import UnsupportedError
from convmesh.layout import Layout, Mesh
from convmesh.layout.channels import ChannelSplit, Volumes, candidates, volumes
from convmesh.layout.mesh import CHANNEL_AXES
from convmesh.ops.planned import PlannedWeight, Plans
from convmesh.ops.sharded import CutOf, Sharded, shard

Choice = Literal["auto", "x", "y", "w", "whole"]
Algorithms = Choice | Mapping[str, Choice]

LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
PER_CHANNEL = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
    nn.GroupNorm, nn.PReLU,
)  # fmt: skip


@dataclass
class ChannelPlan:
    """For every layer its cut and what it moves; for every norm the axes that cut its channels."""

    layers: dict[str, tuple[ChannelSplit, Volumes]] = field(default_factory=dict)
    per_channel: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [f"{name}: {split.algorithm} {moved}" for name, (split, moved) in self.layers.items()]
        return "\n".join(rows)


def plan_channels(
    model: nn.Module, sample: Sequence[int], mesh: Mesh, cut: CutOf | None = None, algorithm: Algorithms = "auto"
) -> ChannelPlan:
    """Decide the cut of every layer for inputs of the global shape `sample`, cut as `cut` says; needs no processes."""
    plan = ChannelPlan()
    dry = dry_mesh(mesh)
    names = {id(module): name for name, module in model.named_modules()}
    tensors = {
        name: torch.empty_like(t, device="meta") for name, t in (*model.named_parameters(), *model.named_buffers())
    }
    for name, module in model.named_modules():
        if isinstance(module, LAYERS) and (choice := _choice(name, algorithm)) != "whole":
            tensors[f"{name}.weight"] = PlannedWeight.of(module.weight, _decider(plan, name, choice, mesh))

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(args[0], Sharded) and args[0].layout.is_cut(1):
            plan.per_channel[names[id(module)]] = args[0].layout.cuts[1].axes

    hooks = [m.register_forward_pre_hook(note) for m in model.modules() if isinstance(m, PER_CHANNEL)]
    try:
        x = shard(torch.empty(tuple(sample), device="meta"), dry, cut or {})
        torch.func.functional_call(model, tensors, (x,))
    finally:
        for hook in hooks:
            hook.remove()
    return plan


def cut_channels(
    model: nn.Module,
    sample: Sequence[int],
    mesh: OpenMesh,
    cut: CutOf | None = None,
    algorithm: Algorithms = "auto",
) -> ChannelPlan:
    """Replace the weights of `model` by this rank's shards (DTensor parameters), as `plan_channels` decides.

    `algorithm` is one choice for all layers, or maps patterns of layer names to choices; "whole" leaves a layer uncut.
    """
    plan = plan_channels(model, sample, mesh.mesh, cut, algorithm)
    mesh.agree("`cut_channels`", str(plan))
    for name, (split, _) in plan.layers.items():
        module = model.get_submodule(name)
        filter_dim = 1 if isinstance(module, TRANSPOSED) else 0
        _replace(module, "weight", mesh, {filter_dim: split.gathered, 1 - filter_dim: split.kept})
        _replace(module, "bias", mesh, {0: split.gathered})
    for name, axes in plan.per_channel.items():
        for tensor in ("weight", "bias", "running_mean", "running_var"):
            _replace(model.get_submodule(name), tensor, mesh, {0: axes})
    return plan


def _choice(name: str, algorithm: Algorithms) -> Choice:
    if isinstance(algorithm, str):
        return algorithm
    return next((choice for pattern, choice in algorithm.items() if fnmatch.fnmatchcase(name, pattern)), "auto")


def _decider(plan: ChannelPlan, name: str, choice: Choice, mesh: Mesh) -> Any:
    def decide(x: Sharded, plans_of: Callable[[ChannelSplit], Plans], groups: int) -> ChannelSplit:
        axes = x.layout.cuts[1].axes or tuple(axis for axis in CHANNEL_AXES if axis in mesh.axes)
        splits = _possible(name, choice, axes, bool(x.layout.cuts[1].axes), groups)
        priced = [(volumes(*plans_of(split)[1:]), split) for split in splits]
        moved, split = min(priced, key=lambda pair: pair[0].total)
        _check_counts(name, x.layout, plans_of(split)[0], split, mesh, groups)
        plan.layers[name] = (split, moved)
        return split

    return decide


def _possible(name: str, choice: Choice, axes: tuple[str, ...], is_cut: bool, groups: int) -> list[ChannelSplit]:
    """The splits that a layer may take. A whole input needs no gathering, and groups none either: cut the filters."""
    if groups > 1 or (not is_cut and choice == "auto"):
        return [ChannelSplit(gathered=axes)]
    found = [split for split in candidates(axes) if choice in ("auto", split.algorithm)]
    if not found:
        raise UnsupportedError(
            f"layer {name!r}: algorithm {choice!r} needs its channels cut by two axes, but they are cut by {axes}; "
            "use a mesh with channel= and filter=, or algorithm 'x', 'y' or 'auto'."
        )
    return found


def _check_counts(name: str, source: Layout, output: Layout, split: ChannelSplit, mesh: Mesh, groups: int) -> None:
    ranks = mesh.extent(split.axes)
    for what, extent, cut_by in (
        ("filters", output.shape[1], split.gathered + split.kept),
        ("channels", source.shape[1], split.kept),
    ):
        if extent < mesh.extent(cut_by):
            raise UnsupportedError(
                f"layer {name!r}: {mesh.extent(cut_by)} ranks > {extent} {what}; the largest split that works is "
                f"{extent} ways. Make the channel axes smaller, or leave it uncut: algorithm={{{name!r}: 'whole'}}."
            )
    if groups > 1 and groups % ranks:
        most = max(n for n in range(1, ranks + 1) if groups % n == 0)
        raise UnsupportedError(
            f"layer {name!r}: {groups} groups do not divide over {ranks} ranks; the largest split that works is "
            f"{most} ways."
        )


def _replace(module: nn.Module, name: str, mesh: OpenMesh, cuts: dict[int, tuple[str, ...]]) -> None:
    whole = getattr(module, name, None)
    if whole is None:
        return
    shard_ = cut_weight(whole.detach(), mesh, cuts)
    if isinstance(whole, nn.Parameter):
        setattr(module, name, nn.Parameter(shard_, requires_grad=whole.requires_grad))
    else:
        setattr(module, name, shard_)
